"""The choice among replicas: the least seconds of work. Pure; the loads are the caller's, as old as the last report."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Seconds: no work is this small, so that a count of sequences decides between equal loads only.
_TIE_S = 1e-9
# The score of a replica that is not to be picked.
DOWN = float("inf")


def score(work_s: float, sequences: int = 0) -> float:
    """Of a replica with this much work; of equal ones the fewest sequences score least."""
    return work_s + sequences * _TIE_S


def pick(scores: Sequence[float] | NDArray[np.float64]) -> int | None:
    """The place of the least score, the first of equal ones; None when none is up."""
    if not len(scores):
        return None
    best = int(scores.argmin()) if isinstance(scores, np.ndarray) else min(range(len(scores)), key=scores.__getitem__)
    return None if scores[best] == DOWN else best
