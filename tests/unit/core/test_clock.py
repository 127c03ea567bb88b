"""The machine's clock: what a loop owns and nobody else reads."""

from headrace.core.clock import SystemClock
from headrace.core.ports import Clock


def test_it_never_goes_back() -> None:
    clock: Clock = SystemClock()
    times_s = [clock.now_s() for _ in range(100)]
    assert times_s == sorted(times_s)
