"""Samplers for tests, many draws at once, and the distribution they must have by plain sorting in float64."""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.core.plan import IntArray, Masks, SlotStart
from headrace.core.request import SamplingParams
from headrace.runner.torch.penalties import asks
from headrace.runner.torch.sampler import Sampled, Sampler

FloatArray = NDArray[np.float32]


def ints(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int32)


def started(
    slot: int,
    sampling: SamplingParams,
    ids: Sequence[int] = (1, 2, 3),
    *,
    num_prompt: int | None = None,
    choice: int = 0,
) -> SlotStart:
    return SlotStart(
        slot=slot,
        number=slot,
        request_id=f"r{slot}",
        ids=tuple(ids),
        num_prompt=len(ids) if num_prompt is None else num_prompt,
        num_computed=0,
        blocks=(),
        sampling=sampling,
        choice=choice,
    )


class Rig:
    """A sampler whose slots are sampled by name: row i of a call belongs to `slots[i]`."""

    def __init__(self, vocab_size: int, slots: int = 8, eos_ids: Sequence[int] = ()) -> None:
        self.sampler = Sampler(slots, vocab_size, eos_ids, torch.device("cpu"))

    def begin(
        self,
        slot: int,
        sampling: SamplingParams,
        ids: Sequence[int] = (1, 2, 3),
        *,
        num_prompt: int | None = None,
        choice: int = 0,
    ) -> None:
        self.sampler.begin(started(slot, sampling, ids, num_prompt=num_prompt, choice=choice))

    def sample(
        self,
        logits: FloatArray,
        slots: Sequence[int],
        positions: Sequence[int] | None = None,
        masks: Masks | None = None,
        rows: Sequence[int] | None = None,
    ) -> Sampled:
        positions = [3] * len(slots) if positions is None else positions
        rows = range(len(slots)) if rows is None else rows
        return self.sampler.sample(torch.tensor(logits), ints(slots), ints(positions), masks, ints(rows))

    def token(self, logits: FloatArray, slot: int = 0, position: int = 3) -> int:
        return int(self.sample(logits[None], [slot], [position]).tokens[0])


def words(vocab_size: int, allowed: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
    """The mask words of rows that allow these ids."""
    bits = np.zeros((len(allowed), -(-vocab_size // 32), 32), np.uint32)
    for entry, ids in enumerate(allowed):
        for token in ids:
            bits[entry, token // 32, token % 32] = 1
    packed: NDArray[np.uint32] = (bits << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return packed


def count_draws(
    logits: FloatArray, sampling: SamplingParams, draws: int, ids: Sequence[int] = (1, 2, 3), num_prompt: int = 3
) -> NDArray[np.int64]:
    """How often each id came up, for requests that differ in their seeds and at some positions of each."""
    slots = min(draws, 250)
    rig = Rig(len(logits), slots)
    for slot in range(slots):
        rig.begin(slot, replace(sampling, seed=slot), ids, num_prompt=num_prompt)
    tokens = []
    for step in range(draws // slots):
        sampled = rig.sample(np.repeat(logits[None], slots, 0), range(slots), [len(ids) + step] * slots)
        assert not sampled.statuses.any()
        tokens.append(sampled.tokens)
        for slot in range(slots) if asks(sampling) else ():
            # Otherwise what was drawn would count.
            rig.begin(slot, replace(sampling, seed=slot), ids, num_prompt=num_prompt)
    return np.bincount(np.concatenate(tokens), minlength=len(logits))


def plain_logits(
    logits: FloatArray, sampling: SamplingParams, ids: Sequence[int] = (1, 2, 3), num_prompt: int = 3
) -> NDArray[np.float64]:
    """Allowed ids, bias, then penalties, an id at a time."""
    values = logits.astype(np.float64)
    if sampling.allowed_ids:
        values[[token for token in range(len(values)) if token not in sampling.allowed_ids]] = -np.inf
    for token, bias in sampling.logit_bias:
        values[token] += bias
    output = list(ids[num_prompt:])
    for token in set(ids):
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= sampling.frequency_penalty * output.count(token)
        values[token] -= sampling.presence_penalty * (token in output)
    return values


def plain_chances(
    logits: FloatArray, sampling: SamplingParams, ids: Sequence[int] = (1, 2, 3), num_prompt: int = 3
) -> NDArray[np.float64]:
    """The distribution by the book: sort everything, cut, renormalise after every filter."""
    values = plain_logits(logits, sampling, ids, num_prompt) / sampling.temperature
    order = np.lexsort((np.arange(len(values)), -values))
    chances = np.exp(values[order] - values.max())
    chances /= chances.sum()
    chances[chances < sampling.min_p * chances[0] * (1 - 1e-9)] = 0.0
    if sampling.top_k:
        chances[sampling.top_k :] = 0.0
    chances /= chances.sum()
    before = np.cumsum(chances) - chances
    before[0] = -1.0
    chances[before >= sampling.top_p] = 0.0
    result = np.zeros(len(values))
    result[order] = chances / chances.sum()
    return result


def fit(counts: NDArray[np.int64], chances: NDArray[np.float64]) -> float:
    """The chi-square p-value of the counts; cells that expect fewer than five share one."""
    if counts[chances == 0].any():
        return 0.0
    expected = chances * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum()).astype(np.float64)
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = max(1, len(expected) - 1)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2).double()))
