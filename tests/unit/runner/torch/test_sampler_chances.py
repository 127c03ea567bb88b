"""Drawn ids are distributed as a plain reference says, for every filter; and the check would notice if not."""

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.request import SamplingParams
from headrace.runner.torch.penalties import asks
from tests.unit.runner.torch.sampler_rig import FloatArray, Rig, count_draws, fit, plain_chances

DRAWS = 4000
SEEN = (1, 2, 3, 5, 5, 5, 8, 8)


def peaked(vocab_size: int, spread: float) -> FloatArray:
    """Logits whose likeliest ids lie anywhere; seen ids are among the likely ones."""
    logits = np.random.default_rng(vocab_size).normal(0.0, spread, vocab_size).astype(np.float32)
    logits[list(set(SEEN))] += 2 * spread
    return logits


SMALL, MIDDLE, WIDE = peaked(50, 1.5), peaked(400, 1.5), peaked(1500, 0.8)

# Logits, settings, and settings that are slightly wrong.
CASES: dict[str, tuple[FloatArray, SamplingParams, SamplingParams]] = {
    "plain": (SMALL, SamplingParams(), SamplingParams(temperature=1.15)),
    "cold": (SMALL, SamplingParams(temperature=0.6), SamplingParams(temperature=0.7)),
    "hot": (MIDDLE, SamplingParams(temperature=2.5), SamplingParams(temperature=2.0)),
    "top-k": (SMALL, SamplingParams(top_k=7), SamplingParams(top_k=6)),
    "top-k of many": (MIDDLE, SamplingParams(top_k=150), SamplingParams(top_k=120)),
    "top-k of most": (WIDE, SamplingParams(top_k=700), SamplingParams(top_k=650)),
    "top-p": (SMALL, SamplingParams(top_p=0.8), SamplingParams(top_p=0.75)),
    "top-p, wide": (WIDE, SamplingParams(top_p=0.9), SamplingParams(top_p=0.87)),
    "top-p, narrow part of a wide row": (WIDE, SamplingParams(top_p=0.3), SamplingParams(top_p=0.28)),
    "min-p": (SMALL, SamplingParams(min_p=0.2), SamplingParams(min_p=0.25)),
    "min-p, wide": (WIDE, SamplingParams(min_p=0.02), SamplingParams(min_p=0.024)),
    "top-k, top-p": (SMALL, SamplingParams(top_k=12, top_p=0.8), SamplingParams(top_k=50, top_p=0.8)),
    "top-k, top-p, wide": (WIDE, SamplingParams(top_k=600, top_p=0.7), SamplingParams(top_k=1500, top_p=0.7)),
    "min-p, top-p": (SMALL, SamplingParams(min_p=0.1, top_p=0.85), SamplingParams(top_p=0.85)),
    "min-p, top-p, wide": (WIDE, SamplingParams(min_p=0.04, top_p=0.8), SamplingParams(top_p=0.8)),
    "all filters": (
        SMALL,
        SamplingParams(temperature=1.4, min_p=0.05, top_k=15, top_p=0.85),
        SamplingParams(min_p=0.05, top_k=15, top_p=0.85),
    ),
    "repetition": (SMALL, SamplingParams(repetition_penalty=1.4), SamplingParams()),
    "presence": (SMALL, SamplingParams(presence_penalty=1.2), SamplingParams(frequency_penalty=1.2)),
    "frequency": (SMALL, SamplingParams(frequency_penalty=1.0), SamplingParams(presence_penalty=1.0)),
    "penalties, top-p": (
        MIDDLE,
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4, top_p=0.9),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.4, top_p=0.9),
    ),
    "bias": (
        SMALL,
        SamplingParams(logit_bias=((4, 3.0), (5, -1.5), (4, 0.5))),
        SamplingParams(logit_bias=((4, 3.0), (5, -1.5))),
    ),
    "bias before penalties": (
        SMALL,
        SamplingParams(logit_bias=((5, -4.0), (8, -3.0)), repetition_penalty=1.8),
        SamplingParams(logit_bias=((5, -4.0), (8, -3.0))),
    ),
    "allowed ids": (SMALL, SamplingParams(allowed_ids=(4, 5, 9, 30)), SamplingParams(allowed_ids=(4, 5, 9))),
    "allowed ids, top-p": (
        MIDDLE,
        SamplingParams(allowed_ids=tuple(range(0, 400, 3)), top_p=0.9),
        SamplingParams(allowed_ids=tuple(range(0, 400, 3))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ids_come_as_often_as_the_reference_says(name: str) -> None:
    logits, sampling, wrong = CASES[name]
    counts = count_draws(logits, sampling, DRAWS // 2 if asks(sampling) else DRAWS, SEEN)
    assert fit(counts, plain_chances(logits, sampling, SEEN)) > 1e-3
    assert fit(counts, plain_chances(logits, wrong, SEEN)) < 1e-6


def test_positions_of_one_request_are_as_good_as_seeds() -> None:
    rig = Rig(len(SMALL), slots=1)
    rig.begin(0, SamplingParams(top_p=0.9, seed=11))
    tokens = [rig.token(SMALL, position=position) for position in range(3, 253)]
    counts = np.bincount(tokens, minlength=len(SMALL))
    assert fit(counts, plain_chances(SMALL, SamplingParams(top_p=0.9))) > 1e-3


@pytest.mark.parametrize("levels", [[2.0] * 8, [3.0, 3.0] + [1.0] * 200, [0.0, -0.0] * 300])
@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_k": 90}, {"top_k": 300}, {"top_p": 0.5}, {"top_p": 0.9}])
def test_of_equal_logits_the_lower_ids_stay(levels: list[float], filters: dict[str, float]) -> None:
    logits = np.full(640, -np.inf, np.float32)
    logits[np.arange(0, len(levels))] = np.array(levels, np.float32)[::-1]
    sampling = replace(SamplingParams(), **filters)
    chances = plain_chances(logits, sampling)
    counts = count_draws(logits, sampling, 2000)
    assert fit(counts, chances) > 1e-3
    # Nearly every id that may come does: the edge is where the reference has it.
    assert np.count_nonzero(counts) >= 0.95 * np.count_nonzero(chances)


def test_a_nucleus_of_nothing_is_the_likeliest_id() -> None:
    assert np.flatnonzero(count_draws(SMALL, SamplingParams(top_p=0.0), 50)).tolist() == [int(SMALL.argmax())]
    assert np.flatnonzero(count_draws(WIDE, SamplingParams(top_p=1e-9), 50)).tolist() == [int(WIDE.argmax())]
    assert np.flatnonzero(count_draws(SMALL, SamplingParams(top_k=1), 50)).tolist() == [int(SMALL.argmax())]
    assert np.flatnonzero(count_draws(SMALL, SamplingParams(min_p=1.0), 50)).tolist() == [int(SMALL.argmax())]


def test_very_cold_and_very_large_logits_do_not_overflow() -> None:
    logits = np.linspace(-3e38, 3e38, 100).astype(np.float32)
    for temperature in (1e-9, 1e-5, 1.0, 100.0):
        counts = count_draws(logits, SamplingParams(temperature=temperature), 20)
        assert counts.argmax() == 99


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.01}])
def test_a_vocabulary_need_not_fill_its_blocks(vocab_size: int, filters: dict[str, float]) -> None:
    logits = np.linspace(0.0, 1.0, vocab_size).astype(np.float32)
    sampling = replace(SamplingParams(), **filters)
    counts = count_draws(logits, sampling, 500, ids=(0,), num_prompt=1)
    assert fit(counts, plain_chances(logits, sampling, (0,), 1)) > 1e-3
