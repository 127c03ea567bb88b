"""Time that passed while somebody looked: how long a thing has gone on, whatever else stood still.

A process that was stopped, or a loop that was held up, must not blame others for its own absence.
"""


class Vigil:
    """`look` is called about every `interval_s`; of a longer gap only twice that counts."""

    def __init__(self, interval_s: float) -> None:
        self._most_s = 2.0 * interval_s
        self._looked_s: float | None = None
        self.watched_s = 0.0

    def look(self, now_s: float) -> float:
        """The seconds watched since the last `restart`."""
        if self._looked_s is not None:
            self.watched_s += min(max(now_s - self._looked_s, 0.0), self._most_s)
        self._looked_s = now_s
        return self.watched_s

    def restart(self) -> None:
        self.watched_s = 0.0
