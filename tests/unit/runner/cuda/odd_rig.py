"""Odd rows of every kind, and a desk that compares each of their steps with the sampler of processors."""

from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from headrace.core.plan import Masks, Plan, RowStatus, Scores, StepResult
from headrace.core.request import SamplingParams
from headrace.runner.torch.sampler import Sampler
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.torch.model_rig import GREEDY, TensorCheckpoint

HOT = SamplingParams(temperature=1.0, seed=5)
BIAS = ((17, 3.0), (30, -2.5), (17, 1.0))
ODD: dict[str, SamplingParams] = {
    "repetition": replace(GREEDY, repetition_penalty=1.8),
    "frequency": replace(GREEDY, frequency_penalty=0.7),
    "presence, drawn": replace(HOT, presence_penalty=1.5, repetition_penalty=0.9, top_p=0.9),
    "bias": replace(GREEDY, logit_bias=BIAS),
    "bias, drawn": replace(HOT, logit_bias=BIAS, top_k=12),
    "allowed": replace(HOT, allowed_ids=(3, 9, 27, 81, 159)),
    "no end yet": replace(GREEDY, min_tokens=2, logit_bias=((0, 50.0), (7, 49.0)), stop_ids=(7,)),
    "allowed, no end yet": replace(GREEDY, min_tokens=2, allowed_ids=(0, 5, 6)),
    "no end, and none is known": replace(GREEDY, min_tokens=2, ignore_eos=True),
    "nothing is left": replace(GREEDY, allowed_ids=(0,), min_tokens=9),
    "scores": replace(GREEDY, logprobs=3),
    "a score alone": replace(HOT, logprobs=0),
    "all alternatives": replace(HOT, logprobs=32, min_p=0.05),
    "mask": replace(GREEDY, masked=True),
    "mask, drawn": replace(HOT, masked=True, top_p=0.8),
    "a mask that never comes": replace(GREEDY, masked=True, logprobs=1),
    "all": replace(HOT, masked=True, top_k=30, repetition_penalty=1.2, logprobs=5, logit_bias=BIAS, min_tokens=1),
    "plain": GREEDY,
    "plain, drawn": HOT,
}


class TwinDesk(CudaDesk):
    """`unmasked` are slots whose masks never come. Of drawn tokens `is_exact` says whether they must be the sampler's."""

    def __init__(self, checkpoint: TensorCheckpoint, *, is_exact: bool = True, **more: Any) -> None:
        super().__init__(checkpoint, **more)
        self.unmasked: set[int] = set()
        self.is_exact = is_exact
        config = self.config
        self._twin = Sampler(config.slots, config.vocab_size, config.eos_ids, torch.device("cpu"))
        self._settings: dict[int, SamplingParams] = {}

    def run(self, made: Plan) -> StepResult:
        for start in made.begun:
            self._twin.begin(start)
            self._settings[start.slot] = start.sampling
        masks = self._masks(made)
        self.runner.launch(made)
        self.runner.sample(made.step, masks)
        result = self.runner.collect()
        rows = np.flatnonzero(made.samples).astype(np.int32)
        if len(rows):
            self._compare(made, rows, masks, result)
        return result

    def _masks(self, made: Plan) -> Masks:
        """As narrow as half the vocabulary for some, and wider than it for others."""
        of = made.slots.tolist()
        rows = [
            row
            for row, slot in enumerate(of)
            if made.samples[row] and self._settings[slot].masked and slot not in self.unmasked
        ]
        words = -(-self.config.vocab_size // 32) + made.step % 3 - 1
        bits = np.random.default_rng(made.step).integers(0, 2**32, (len(rows), words), np.uint32)
        return Masks(np.array(rows, np.int32), bits)

    def _compare(self, made: Plan, rows: Any, masks: Masks, result: StepResult) -> None:
        logits = torch.stack([self.runner.last_logits[row] for row in rows.tolist()]).float()
        ends = (made.starts + made.counts)[rows]
        truth = self._twin.sample(logits.clone(), made.slots[rows], ends, masks, rows)
        assert result.statuses[rows].tolist() == truth.statuses.tolist()
        for row, token in zip(rows.tolist(), truth.tokens.tolist(), strict=True):
            drawn = self._settings[int(made.slots[row])].temperature > 0
            assert int(result.tokens[row]) == token or (drawn and not self.is_exact), (made.step, row)
        same = result.tokens[rows] == truth.tokens
        _compare_scores(result.scores, truth.scores, set(rows[same & (truth.statuses == RowStatus.OK)].tolist()))


def _compare_scores(found: Scores | None, truth: Scores | None, rows: set[int]) -> None:
    """Of each row by itself: the orders of rows are not the same."""
    assert (found is None) == (truth is None)
    if found is None or truth is None:
        return
    assert sorted(found.owners.tolist()) == sorted(truth.owners.tolist())
    assert found.top_ids.shape == truth.top_ids.shape
    for entry, owner in enumerate(truth.owners.tolist()):
        if owner in rows:
            at = found.owners.tolist().index(owner)
            assert found.positions[at] == truth.positions[entry]
            assert found.top_ids[at].tolist() == truth.top_ids[entry].tolist()
            assert np.allclose(found.logprobs[at], truth.logprobs[entry], atol=1e-5)
            assert np.allclose(found.top_logprobs[at], truth.top_logprobs[entry], atol=1e-5)
