"""When a child that died is started again. Owns the rule; starts nothing, reads no clock."""

from dataclasses import dataclass

FIRST_S = 0.1
MOST_S = 30.0
# A child that was healthy for so long, and for so many times the wait before it, does not fail because it starts.
HEALTHY_S = 5.0
HEALTHY_WAITS = 10.0
_MOST_DOUBLINGS = 16


@dataclass(slots=True)
class Restarts:
    """Never gives up: the wait doubles with each death in a row, and starts over once the child has worked for a while.
    So one that is killed now and then is back before its streams are given up, and of the time of one that works at
    all, waits take a tenth at most."""

    deaths: int = 0
    delay_s: float = 0.0

    def next_delay_s(self, healthy_s: float) -> float:
        """How long to wait after a death; `healthy_s` is how long the child had been healthy before it."""
        if healthy_s >= max(HEALTHY_S, HEALTHY_WAITS * self.delay_s):
            self.deaths = 0
        self.delay_s = min(FIRST_S * 2.0 ** min(self.deaths, _MOST_DOUBLINGS), MOST_S)
        self.deaths += 1
        return self.delay_s
