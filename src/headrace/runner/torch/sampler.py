"""Chooses the next token of every row: the settings of all slots, and the order in which they act.

Order: allowed ids, bias, stops before `min_tokens`, grammar mask; penalties; temperature; min-p; top-k;
top-p; one random number. Of equal logits the lower id is the better. A row fails alone. Greedy rows
cost one pass over their logits. Knows neither models nor blocks nor plans.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.plan import IntArray, Masks, RowStatus, Scores, SlotStart
from headrace.core.request import SamplingParams
from headrace.runner.torch import luck, penalties
from headrace.runner.torch.penalties import PenaltyPool
from headrace.runner.torch.sampler_ranks import block_maxima, first_best, padded, padded_size
from headrace.runner.torch.sampler_rules import Rules, forbidden, rules_of
from headrace.runner.torch.sampler_scores import Asked, score
from headrace.runner.torch.sampler_urn import Filters, Urn

# What a slot's occupant asks for beyond the likeliest id.
_DRAWN = 1
_RULED = 2
_PENALISED = 4
_MASKED = 8
_SCORED = 16

StatusArray = NDArray[np.uint8]
RowArray = NDArray[np.intp]


class Sampled(NamedTuple):
    """An entry per row; a failed row has token -1 and no score."""

    tokens: IntArray
    statuses: StatusArray
    scores: Scores | None


class Sampler:
    """Every slot's settings lie in tensors indexed by slot; only rules are looked at row by row."""

    def __init__(self, slots: int, vocab_size: int, eos_ids: Sequence[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._width = padded_size(vocab_size)
        self._eos_ids = tuple(eos_ids)
        self._device = device
        self._traits = np.zeros(slots, np.uint8)
        self._rules: list[Rules | None] = [None] * slots
        self._penalties = PenaltyPool(slots, vocab_size, device)
        # Alternatives asked for; -1: no log-probabilities.
        self._logprobs = np.full(slots, -1, np.int64)
        self._prompt_logprobs = np.full(slots, -1, np.int64)
        self._keys = torch.zeros(slots, dtype=torch.int64, device=device)
        self._filters = torch.ones(slots, 4, dtype=torch.float64, device=device)
        self._urn = Urn(self._width, device)

    def begin(self, start: SlotStart) -> None:
        """Replace all that the slot holds by what its new occupant asks for."""
        slot, sampling = start.slot, start.sampling
        with torch.inference_mode():
            self._penalties.begin(start)
            rules = rules_of(start, self._eos_ids, self._device)
            self._rules[slot] = rules
            self._logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
            self._prompt_logprobs[slot] = -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
            self._traits[slot] = (
                _DRAWN * luck.is_drawn(sampling)
                | _RULED * (rules is not None)
                | _PENALISED * penalties.asks(sampling)
                | _MASKED * sampling.masked
                | _SCORED * (sampling.logprobs is not None)
            )
            if self._traits[slot] & _DRAWN:
                self._set_filters(slot, sampling)
                self._keys[slot] = luck.key(sampling.seed, start.choice)

    def wants_prompt_scores(self, slot: int) -> bool:
        return bool(self._prompt_logprobs[slot] >= 0)

    def sample(
        self, logits: Tensor, slots: IntArray, positions: IntArray, masks: Masks | None, rows: IntArray
    ) -> Sampled:
        """One token per row of `logits` [r, vocabulary] float32, which may be overwritten.

        `positions[i]` is the place of the new token in its sequence, `rows[i]` its row in the plan,
        which masks and scores speak of.
        """
        if not len(slots):
            return Sampled(np.zeros(0, np.int32), np.zeros(0, np.uint8), None)
        with torch.inference_mode():
            traits = self._traits[slots]
            wanted = int(np.bitwise_or.reduce(traits))
            logits = padded(logits)
            maxima = block_maxima(logits)
            # A row's maximum tells all: NaN wins over numbers, and -inf means that there is no number.
            statuses = np.where(_finite(maxima), RowStatus.OK, RowStatus.NOT_FINITE).astype(np.uint8)
            scored = np.flatnonzero(traits & _SCORED)
            raw = logits.index_select(0, self._indices(scored)) if len(scored) else None
            if masks is not None or wanted & (_RULED | _PENALISED | _MASKED):
                self._restrict(logits, maxima, statuses, slots, positions, masks, rows)
            tokens = first_best(logits, maxima)
            if wanted & _DRAWN:
                self._draw(tokens, logits, maxima, slots, positions, statuses)
            scores = None
            if raw is not None:
                scores = self._score(raw, tokens, scored, statuses, slots, positions, rows)
            # Last: whoever finds no memory before it can be sampled again.
            if wanted & _PENALISED:
                noted = np.flatnonzero((statuses == RowStatus.OK) & (traits & _PENALISED > 0))
                if len(noted):
                    self._penalties.note(slots[noted], tokens[self._indices(noted)])
            chosen = tokens.cpu().numpy().astype(np.int32)
            chosen[statuses != RowStatus.OK] = -1
            return Sampled(chosen, statuses, scores)

    def score_prompt(self, logits: Tensor, slot: int, row: int, positions: IntArray, ids: IntArray) -> Scores:
        """`logits[i]` [vocabulary] predicts `ids[i]` at `positions[i]`. A row that is not finite scores NaN."""
        with torch.inference_mode():
            count = len(ids)
            asked = Asked(
                owners=np.full(count, row, np.int64),
                positions=np.asarray(positions, np.int32),
                alternatives=np.full(count, max(0, int(self._prompt_logprobs[slot])), np.int64),
            )
            return score(padded(logits), torch.from_numpy(ids.astype(np.int64)).to(self._device), asked)

    def _set_filters(self, slot: int, sampling: SamplingParams) -> None:
        temperature, limited = sampling.temperature, 0 < sampling.top_k < self._vocab_size
        # p >= min_p * best p, said of logits before the temperature.
        depth = math.log(sampling.min_p) * temperature if sampling.min_p > 0 else -math.inf
        top_k = sampling.top_k if limited else self._width
        self._filters[slot] = torch.tensor((1.0 / temperature, depth, top_k, sampling.top_p), dtype=torch.float64)

    def _restrict(
        self,
        logits: Tensor,
        maxima: Tensor,
        statuses: StatusArray,
        slots: IntArray,
        positions: IntArray,
        masks: Masks | None,
        rows: IntArray,
    ) -> None:
        """Rules, masks and penalties in place; a row with nothing left to take, or without its mask, fails."""
        traits = self._traits[slots]
        changed = np.zeros(len(slots), np.bool_)
        for index in np.flatnonzero(traits & _RULED).tolist():
            rules, position = self._rules[slots[index]], int(positions[index])
            if rules is not None and rules.bind(position):
                rules.apply(logits[index], position)
                changed[index] = True
        entry_of = {} if masks is None else {row: entry for entry, row in enumerate(masks.rows.tolist())}
        masked = np.array([row in entry_of for row in rows.tolist()], np.bool_)
        if masks is not None and masked.any():
            barred = forbidden(masks, [entry_of[row] for row in rows[masked].tolist()], self._width)
            for index, bar in zip(np.flatnonzero(masked).tolist(), barred.to(self._device), strict=True):
                logits[index].masked_fill_(bar, -math.inf)
            changed |= masked
        penalised = np.flatnonzero(traits & _PENALISED)
        if len(penalised):
            self._penalties.apply(logits, self._indices(penalised), slots[penalised])
            changed[penalised] = True
        sound = statuses == RowStatus.OK
        statuses[sound & (traits & _MASKED > 0) & ~masked] = RowStatus.MASK
        if changed.any():
            self._judge(logits, maxima, statuses, np.flatnonzero(changed))

    def _judge(self, logits: Tensor, maxima: Tensor, statuses: StatusArray, changed: RowArray) -> None:
        """Look at changed rows again: is there still an id to take, and did no number overflow?"""
        maxima.copy_(block_maxima(logits))
        peaks = maxima.amax(-1).cpu().numpy()[changed]
        verdicts = np.where(np.isneginf(peaks), RowStatus.MASK, RowStatus.NOT_FINITE).astype(np.uint8)
        failed = ~np.isfinite(peaks) & (statuses[changed] == RowStatus.OK)
        statuses[changed[failed]] = verdicts[failed]

    def _draw(
        self,
        tokens: Tensor,
        logits: Tensor,
        maxima: Tensor,
        slots: IntArray,
        positions: IntArray,
        statuses: StatusArray,
    ) -> None:
        """Replace the likeliest ids of rows with a temperature by drawn ones."""
        drawn = np.flatnonzero((statuses == RowStatus.OK) & (self._traits[slots] & _DRAWN > 0))
        if not len(drawn):
            return
        at, of = self._indices(drawn), self._indices(slots[drawn])
        bits = luck.bits(self._keys[of], self._indices(positions[drawn]))
        tokens[at] = self._urn.draw(logits, maxima, at, Filters(self._filters[of]), bits)

    def _score(
        self,
        raw: Tensor,
        tokens: Tensor,
        scored: RowArray,
        statuses: StatusArray,
        slots: IntArray,
        positions: IntArray,
        rows: IntArray,
    ) -> Scores | None:
        good = statuses[scored] == RowStatus.OK
        scored = scored[good]
        if not len(scored):
            return None
        asked = Asked(rows[scored].astype(np.int64), positions[scored], self._logprobs[slots[scored]])
        return score(raw.index_select(0, self._indices(np.flatnonzero(good))), tokens[self._indices(scored)], asked)

    def _indices(self, values: NDArray[np.signedinteger]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


def _finite(maxima: Tensor) -> NDArray[np.bool_]:
    finite: NDArray[np.bool_] = maxima.amax(-1).isfinite().cpu().numpy()
    return finite
