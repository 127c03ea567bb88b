"""Virtual time. Owns the present instant in whole nanoseconds, so that equal runs meet equal instants.

It knows no event: the world moves it.
"""

import math

NS = 1_000_000_000


def to_ns(seconds: float) -> int:
    """The first whole nanosecond not before `seconds`, save for what a double cannot tell apart."""
    return math.ceil(seconds * 1e9 - 1e-3)


class VirtualClock:
    """Moves only when told, and never back."""

    __slots__ = ("_now_s", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def move_to(self, time_ns: int) -> None:
        assert time_ns >= self.now_ns, "virtual time went back"
        self.now_ns = time_ns
        self._now_s = time_ns / NS
