"""The choice among replicas: one where the newcomer begins at once, and of several the least seconds of work. Pure; the
loads are the caller's, as old as the last report.

Who finds a slot and blocks free waits for nobody: what runs there shares its steps. Who finds none waits for work to be
done, and its seconds are those of the score, to be weighed against whatever else a replica would cost or save. They are
a guess, since each replica learns by its own replies how long the next ones will be; that a slot is free is known.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.core.event import EngineLoad

# Seconds: no work is this small, so that a count of sequences decides between equal loads only.
_TIE_S = 1e-9
# Of a second of work that is not waited for, so that it decides between replicas with room only.
_SHARED = 1e-6
# The score of a replica that is not to be picked.
DOWN = float("inf")


def room(load: EngineLoad, newcomers: int = 1) -> int:
    """How many blocks each of so many newcomers may need and still begin at once, who waits there before them; zero
    where they do not all find a slot. Those before them are taken to need as many."""
    queued = load.waiting + newcomers
    return load.free_blocks // queued if load.free_slots >= queued else 0


def score(work_s: float, sequences: int = 0, *, waits: bool = True) -> float:
    """Of a replica with this much work, where a newcomer finds room or `waits`; of equal ones the fewest sequences
    score least."""
    return (waits + _SHARED) * (work_s + sequences * _TIE_S)


def pick(scores: Sequence[float] | NDArray[np.float64]) -> int | None:
    """The place of the least score, the first of equal ones; None when none is up."""
    if not len(scores):
        return None
    best = int(scores.argmin()) if isinstance(scores, np.ndarray) else min(range(len(scores)), key=scores.__getitem__)
    return None if scores[best] == DOWN else best
