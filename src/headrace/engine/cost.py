"""The online cost model: how long a step will take, and how large a chunk a time allows.

Owns the five coefficients. Learns from (work, seconds) pairs alone; knows no clock and no device.
Observations are kept in small rings, one per shape of step, so that a long spell of one shape cannot
push out what was learned from another: without excitation a coefficient stays where it is.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.core.config import CostProfile
from headrace.core.plan import Work

_RING = 32
# Refit soon while predictions are off, seldom while they are good.
_REFIT_EVERY = 8
_REFIT_AT_LEAST_EVERY = 64
_GOOD_ERROR = 0.005
# A step predicted this well, after others that were, teaches nothing.
_NOTHING_NEW = 1e-3
# A step counts as at most this many times longer or shorter than predicted.
_MOST_SURPRISE = 8.0
_HALF_LIFE_STEPS = 40.0
# What stale observations keep, so that they speak where no fresh one does.
_LEAST_WEIGHT = 1e-4
# Strength of the pull towards the profile, in units of one fresh observation per coefficient.
_PROFILE_WEIGHT = 1e-5
_DIMENSIONS = 5


class CostModel:
    """`predict` never falls below zero and no coefficient is ever negative."""

    def __init__(self, profile: CostProfile) -> None:
        self._profile = np.array(profile.coefficients())
        self.c0_s, self.c_in_s, self.c_out_s, self.c_kv_s, self.c_att_s = profile.coefficients()
        self._rings: dict[tuple[int, int], int] = {}
        self._features = np.zeros((0, _DIMENSIONS))
        self._seen_at = np.zeros(0)
        self._fill: list[int] = []
        self._num_observed = 0
        self._error = 1.0

    def predict(self, work: Work) -> float:
        return (
            self.c0_s
            + self.c_in_s * work.prefill_tokens
            + self.c_out_s * work.decode_rows
            + self.c_kv_s * work.kv_tokens
            + self.c_att_s * work.attended
        )

    def chunk_s(self, start: int, count: int) -> float:
        """What a row of `count` tokens from position `start` adds to a step."""
        end = start + count
        if count == 1:
            return self.c_out_s + self.c_kv_s * end
        return self.c_in_s * count + self.c_kv_s * end + self.c_att_s * count * end

    def chunk_for(self, start: int, seconds: float) -> int:
        """The most tokens from position `start` on that add at most `seconds` to a step."""
        spare = seconds - self.c_kv_s * start
        if spare <= 0.0:
            return 0
        linear = self.c_in_s + self.c_kv_s + self.c_att_s * start
        if self.c_att_s > 0.0:
            # The positive root of c_att·n² + linear·n - spare, in the form that does not cancel.
            count = 2.0 * spare / (linear + math.sqrt(linear * linear + 4.0 * self.c_att_s * spare))
        elif linear > 0.0:
            count = spare / linear
        else:
            return 2**31 - 1
        whole = int(min(count, 2.0**31 - 1))
        while whole > 0 and self.chunk_s(start, whole) > seconds:
            whole -= 1
        return whole

    def prompt_s(self, tokens: int) -> float:
        """Marginal device time of a whole prompt, in chunks of no particular size."""
        return self.c_in_s * tokens + self.c_att_s * tokens * (tokens + 1) * 0.5

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from one step. Times that are not finite and positive teach nothing."""
        if not (math.isfinite(seconds) and seconds > 0.0):
            return
        # One hiccup, or one clock that stood still, must not outweigh all that was learned.
        predicted = self.predict(work)
        seconds = min(max(seconds, predicted / _MOST_SURPRISE, 1e-9), max(predicted * _MOST_SURPRISE, 1e-9))
        # Rows are scaled by the time itself: every step counts by its relative error.
        scale = 1.0 / seconds
        error = abs(predicted * scale - 1.0)
        self._error += 0.1 * (error - self._error)
        self._num_observed += 1
        if error < _NOTHING_NEW and self._error < _NOTHING_NEW:
            return
        row = self._row_for(work)
        self._features[row] = (
            scale,
            work.prefill_tokens * scale,
            work.decode_rows * scale,
            work.kv_tokens * scale,
            work.attended * scale,
        )
        self._seen_at[row] = self._num_observed
        due = _REFIT_EVERY if self._error > _GOOD_ERROR else _REFIT_AT_LEAST_EVERY
        if self._num_observed % due == 0:
            self._fit()

    def _row_for(self, work: Work) -> int:
        """The ring slot to overwrite: rings are kept by context length and kind of step."""
        rows = work.decode_rows + (work.prefill_tokens > 0)
        context = work.attended // work.prefill_tokens if work.prefill_tokens else work.kv_tokens // max(1, rows)
        shape = (work.prefill_tokens.bit_length() // 3, context.bit_length() // 3)
        ring = self._rings.get(shape)
        if ring is None:
            ring = self._rings[shape] = len(self._rings)
            self._features = np.vstack([self._features, np.zeros((_RING, _DIMENSIONS))])
            self._seen_at = np.concatenate([self._seen_at, np.full(_RING, -np.inf)])
            self._fill.append(0)
        row = ring * _RING + self._fill[ring] % _RING
        self._fill[ring] += 1
        return row

    def _fit(self) -> None:
        age = self._num_observed - self._seen_at
        weights = np.maximum(np.exp2(age / -_HALF_LIFE_STEPS), _LEAST_WEIGHT) * (self._seen_at >= 0.0)
        coefficients = _regress(self._features, weights, self._profile)
        self.c0_s, self.c_in_s, self.c_out_s, self.c_kv_s, self.c_att_s = coefficients.tolist()


def fit_profile(seen: Sequence[tuple[Work, float]], prior: CostProfile) -> CostProfile:
    """The profile that explains these steps; what they do not excite stays as in `prior`."""
    works = np.array([(1, w.prefill_tokens, w.decode_rows, w.kv_tokens, w.attended) for w, _ in seen], np.float64)
    seconds = np.array([max(elapsed_s, 1e-9) for _, elapsed_s in seen])
    coefficients = _regress(works / seconds[:, None], np.ones(len(seen)), np.array(prior.coefficients()))
    return CostProfile(*coefficients.tolist())


def _regress(
    features: NDArray[np.float64], weights: NDArray[np.float64], profile: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Coefficients by which every row of `features`, scaled by its time, comes to one."""
    weighted = features * weights[:, None]
    gram = features.T @ weighted
    moment = weighted.sum(axis=0)
    # Scale-free ridge: each coefficient is pulled to its profile by a fixed share of what was seen of it.
    largest = features.max(axis=0)
    pull = _PROFILE_WEIGHT * np.where(largest > 0.0, largest, 1.0) ** 2
    return _solve_non_negative(gram + np.diag(pull), moment + pull * profile)


def _solve_non_negative(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with the most negative coefficient set to zero until none is left."""
    scale = 1.0 / np.sqrt(np.diag(gram))
    scaled = gram * scale[:, None] * scale
    target = moment * scale
    kept = list(range(len(moment)))
    solution = np.zeros(len(moment))
    while kept:
        part = np.linalg.solve(scaled[np.ix_(kept, kept)], target[kept])
        worst = int(part.argmin())
        if part[worst] >= 0.0:
            solution[kept] = part
            break
        del kept[worst]
    return solution * scale
