"""A token's random number depends on (seed, choice, position) alone, so its text does not depend on company."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.core.request import SamplingParams
from headrace.runner.cells import MASK_64, mix_int
from headrace.runner.torch import luck
from tests.unit.runner.torch.sampler_rig import FloatArray, Rig

SETTINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.97),
    SamplingParams(top_k=50, top_p=0.9),
    SamplingParams(top_k=200),
    SamplingParams(top_k=2000, top_p=0.8),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=2.0, min_p=0.001, top_p=0.95),
    SamplingParams(temperature=0.0),
    SamplingParams(presence_penalty=1.0, repetition_penalty=1.2, top_p=0.95),
    SamplingParams(logit_bias=((7, 4.0),), logprobs=3),
    SamplingParams(allowed_ids=tuple(range(0, 900, 7)), logprobs=0),
)


def signed(value: int) -> int:
    value &= MASK_64
    return value - 2**64 if value >= 2**63 else value


def test_the_numbers_are_splitmix64_as_integers_have_it() -> None:
    keys = [luck.key(seed, choice) for seed, choice in ((0, 0), (1, 0), (-5, 2), (2**64 - 1, 7), (123456789, 1))]
    positions = [0, 1, 77, 8191, 2**31 - 2]
    got = luck.bits(torch.tensor(keys), torch.tensor(positions)).tolist()
    step = 0x9E3779B97F4A7C15
    assert got == [signed(mix_int(key + (position + 1) * step)) for key, position in zip(keys, positions, strict=True)]


def test_a_number_below_a_total_is_the_top_of_the_bits() -> None:
    bits = torch.tensor([0, -1, 1 << 62, -(1 << 63), 12345 << 32])
    for total in (1, 2, 1000, 2**30 + 77, luck.MAX_TOTAL):
        expected = [((value & MASK_64) >> 32) * total >> 32 for value in bits.tolist()]
        assert luck.below(bits, torch.tensor(total)).tolist() == expected
        assert max(expected) < total


def units(keys: list[int], positions: list[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1), [keys, positions]."""
    drawn = luck.bits(torch.tensor(keys)[:, None], torch.tensor(positions)[None, :])
    return luck.below(drawn, torch.tensor(2**31)).double().numpy() / 2**31


@pytest.mark.parametrize("what", ["seeds", "choices", "negative seeds", "attempts"])
def test_neighbouring_seeds_and_choices_have_nothing_to_do_with_each_other(what: str) -> None:
    count, positions = 64, list(range(2000))
    if what == "attempts":
        first = luck.bits(torch.tensor([luck.key(5, 0)]), torch.tensor(positions))
        bits = torch.stack([luck.again(first, attempt) for attempt in range(1, count)])
        table = luck.below(bits, torch.tensor(2**31)).double().numpy() / 2**31
    else:
        pairs = {"seeds": (1, 0), "choices": (0, 1), "negative seeds": (-1, 0)}[what]
        table = units([luck.key(pairs[0] * i, pairs[1] * i) for i in range(count)], positions)
    correlations = np.corrcoef(table) - np.eye(len(table))
    # Five standard errors of a correlation over 2,000 pairs.
    assert np.abs(correlations).max() < 5 / np.sqrt(2000)
    # The same position of neighbouring seeds, shifted by one place as well.
    shifted = np.corrcoef(table[:-1, 1:].ravel(), table[1:, :-1].ravel())[0, 1]
    assert abs(shifted) < 5 / np.sqrt(table.size)
    counts = np.histogram(table, bins=100, range=(0, 1))[0]
    expected = table.size / 100
    assert ((counts - expected) ** 2 / expected).sum() < 99 + 5 * np.sqrt(2 * 99)


def wild_rows(count: int, vocab_size: int) -> FloatArray:
    """Rows of every kind: sharp, flat, with equals, with -inf, one scaled by 1,000."""
    generator = np.random.default_rng(count)
    logits = generator.normal(0, 1, (count, vocab_size)).astype(np.float32) * np.float32(2.5)
    logits[0::5] *= 4
    logits[1::5] *= 0.1
    logits[2::5] = np.round(logits[2::5])
    logits[3::5, ::2] = -np.inf
    logits[-1] *= 1000
    return logits


@pytest.mark.parametrize(("vocab_size", "count"), [(3001, 36), (49152, 33)])
def test_a_row_draws_the_same_token_alone_and_in_any_company(vocab_size: int, count: int) -> None:
    logits = wild_rows(count, vocab_size)
    settings = [replace(SETTINGS[slot % len(SETTINGS)], seed=slot // 3) for slot in range(count)]
    positions = [5 + slot for slot in range(count)]

    def sampled(slots: list[int]) -> dict[int, tuple[int, bytes]]:
        rig = Rig(vocab_size, slots=count)
        for slot in range(count):
            rig.begin(slot, settings[slot], (1, 2, 3, 5, 8), num_prompt=3, choice=slot % 2)
        got = rig.sample(logits[slots], slots, [positions[slot] for slot in slots], rows=slots)
        assert not got.statuses.any()
        scores = dict.fromkeys(slots, b"")
        if got.scores is not None:
            numbers = np.concatenate([got.scores.logprobs[:, None], got.scores.top_logprobs], 1)
            for owner, line in zip(got.scores.owners.tolist(), numbers, strict=True):
                scores[owner] = line[np.isfinite(line)].tobytes()
        return {slot: (token, scores[slot]) for slot, token in zip(slots, got.tokens.tolist(), strict=True)}

    together = sampled(list(range(count)))
    shuffled = np.random.default_rng(1).permutation(count).tolist()
    assert sampled(shuffled) == together
    assert {**sampled(shuffled[: count // 2]), **sampled(shuffled[count // 2 :])} == together
    for slot in range(count):
        assert sampled([slot])[slot] == together[slot]


def test_a_seed_is_a_text_and_another_seed_or_choice_another() -> None:
    logits = wild_rows(3, 500)[1]

    def text(seed: int, choice: int, slot: int) -> list[int]:
        rig = Rig(500)
        rig.begin(slot, SamplingParams(seed=seed, top_p=0.99), choice=choice)
        return [rig.token(logits, slot, position) for position in range(3, 13)]

    assert text(4, 0, slot=0) == text(4, 0, slot=5)
    assert len({tuple(text(seed, choice, 0)) for seed in range(5) for choice in range(3)}) == 15


def test_threads_do_not_change_a_token() -> None:
    logits = wild_rows(10, 49152)
    settings = [replace(SETTINGS[slot % 8], seed=slot) for slot in range(10)]
    before = torch.get_num_threads()
    tokens = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rig = Rig(49152, slots=10)
            for slot in range(10):
                rig.begin(slot, settings[slot])
            tokens.append(rig.sample(logits, range(10)).tokens.tolist())
    finally:
        torch.set_num_threads(before)
    assert tokens[0] == tokens[1]
