"""Log-probabilities of one step, gathered from several places into one record."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.plan import Scores


class ScorePile:
    def __init__(self) -> None:
        self._parts: list[Scores] = []

    def add(self, scores: Scores) -> None:
        self._parts.append(scores)

    def whole(self) -> Scores | None:
        """All entries, in the order they came; None when there are none. Narrower parts are filled up with -1."""
        if len(self._parts) <= 1:
            return self._parts[0] if self._parts else None
        most = max(part.top_ids.shape[1] for part in self._parts)
        return Scores(
            np.concatenate([part.owners for part in self._parts]),
            np.concatenate([part.positions for part in self._parts]),
            np.concatenate([part.logprobs for part in self._parts]),
            np.concatenate([_widen(part.top_ids, most, -1) for part in self._parts]),
            np.concatenate([_widen(part.top_logprobs, most, -np.inf) for part in self._parts]),
        )


def _widen(entries: NDArray[Any], width: int, filler: float) -> NDArray[Any]:
    return np.pad(entries, ((0, 0), (0, width - entries.shape[1])), constant_values=filler)
