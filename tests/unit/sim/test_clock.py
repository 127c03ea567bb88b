"""Virtual time in whole nanoseconds."""

import pytest

from headrace.sim.clock import VirtualClock, to_ns

pytestmark = pytest.mark.unit


def test_the_clock_moves_when_told() -> None:
    clock = VirtualClock()
    clock.move_to(1_500_000_000)
    assert clock.now_s() == 1.5
    assert clock.now_ns == 1_500_000_000


def test_the_clock_never_goes_back() -> None:
    clock = VirtualClock()
    clock.move_to(10)
    with pytest.raises(AssertionError):
        clock.move_to(9)


@pytest.mark.parametrize("nanoseconds", [0, 1, 999, 5_136_789, 10**9 + 1, 86_400 * 10**9 + 7])
def test_an_instant_survives_the_way_through_seconds(nanoseconds: int) -> None:
    assert to_ns(nanoseconds / 1e9) == nanoseconds


def test_a_part_of_a_nanosecond_counts_as_one() -> None:
    assert to_ns(1.4e-9) == 2
