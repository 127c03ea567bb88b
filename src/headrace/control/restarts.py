"""When a child that died is started again. Owns the rule; starts nothing, reads no clock."""

from dataclasses import dataclass

FIRST_S = 0.5
MOST_S = 30.0
HEALTHY_S = 60.0
_MOST_DOUBLINGS = 16


@dataclass(slots=True)
class Restarts:
    """Never gives up: the wait doubles with each death in a row, and starts over after a healthy minute."""

    deaths: int = 0

    def next_delay_s(self, healthy_s: float) -> float:
        """How long to wait after a death; `healthy_s` is how long the child had been healthy before it."""
        if healthy_s >= HEALTHY_S:
            self.deaths = 0
        delay_s = min(FIRST_S * 2.0 ** min(self.deaths, _MOST_DOUBLINGS), MOST_S)
        self.deaths += 1
        return delay_s
