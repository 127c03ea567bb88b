"""Which replica takes a request: the one with the least seconds of work.

Owns the table of loads that workers report. Stands in for the package `router` until it exists.
"""

import numpy as np

# Seconds: no work is this small, so that a count of sequences decides between equal loads only.
_TIE_S = 1e-9


class LeastWork:
    """Loads are as old as the last report; equal ones are told apart by their sequences, then by index."""

    def __init__(self, replicas: int) -> None:
        self._work_s = np.full(replicas, np.inf)

    def pick(self) -> int | None:
        """The replica with the least work; None when none is up."""
        best = int(self._work_s.argmin())
        return None if self._work_s[best] == np.inf else best

    def report(self, replica: int, work_s: float, sequences: int = 0) -> None:
        """A replica is up and holds this much work; of equal ones, the fewest sequences."""
        self._work_s[replica] = work_s + sequences * _TIE_S

    def remove(self, replica: int) -> None:
        """The replica is gone until it reports again."""
        self._work_s[replica] = np.inf

    @property
    def num_up(self) -> int:
        return int((self._work_s < np.inf).sum())
