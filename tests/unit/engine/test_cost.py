"""The cost model: it learns all five coefficients, keeps what it knows and never goes negative."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import CostProfile
from headrace.core.plan import Work
from headrace.engine.cost import CostModel

GUESS = CostProfile()
TRUE = CostProfile(c0_s=8e-3, c_in_s=5e-5, c_out_s=1e-4, c_kv_s=6e-8, c_att_s=7e-10)
SLOWER = CostProfile(*(2.0 * coefficient for coefficient in TRUE.coefficients()))

COEFFICIENTS = st.floats(0.0, 1e-2)
PROFILES = st.builds(CostProfile, st.floats(1e-6, 1.0), COEFFICIENTS, COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)
WORKS = st.builds(Work, st.integers(0, 10_000), st.integers(0, 1024), st.integers(0, 10_000_000), st.integers(0, 10**9))


def coefficients(model: CostModel) -> tuple[float, ...]:
    return model.c0_s, model.c_in_s, model.c_out_s, model.c_kv_s, model.c_att_s


def true_s(work: Work, profile: CostProfile = TRUE) -> float:
    return CostModel(profile).predict(work)


def mixed(count: int, seed: int = 0) -> Iterator[Work]:
    """Steps of every shape: decode rows at many contexts, chunks of many sizes at many contexts."""
    chance = np.random.default_rng(seed)
    for _ in range(count):
        rows = int(chance.integers(0, 200))
        chunk = int(chance.integers(2, 4000)) if chance.random() < 0.6 else 0
        end = chunk + int(chance.integers(0, 30_000)) if chunk else 0
        yield Work(chunk, rows, rows * int(chance.integers(10, 8000)) + end, chunk * end)


def decoding(count: int, seed: int = 1) -> Iterator[Work]:
    chance = np.random.default_rng(seed)
    for _ in range(count):
        rows = int(chance.integers(1, 64))
        yield Work(0, rows, rows * int(chance.integers(100, 2000)), 0)


def taught(works: Iterator[Work], noise: float = 0.0, profile: CostProfile = TRUE) -> CostModel:
    model, chance = CostModel(GUESS), np.random.default_rng(9)
    for work in works:
        model.observe(work, true_s(work, profile) * (1.0 + noise * chance.uniform(-1.0, 1.0)))
    return model


@given(PROFILES, WORKS)
def test_a_prediction_is_the_formula(profile: CostProfile, work: Work) -> None:
    terms = (1, work.prefill_tokens, work.decode_rows, work.kv_tokens, work.attended)
    expected_s = sum(term * cost for term, cost in zip(terms, profile.coefficients(), strict=True))
    assert CostModel(profile).predict(work) == pytest.approx(expected_s, rel=1e-12)


@given(PROFILES, st.integers(0, 50_000), st.integers(1, 5_000))
def test_a_row_costs_what_it_adds_to_a_step(profile: CostProfile, start: int, count: int) -> None:
    model, end = CostModel(profile), start + count
    row = Work(0, 1, end, 0) if count == 1 else Work(count, 0, end, count * end)
    assert model.chunk_s(start, count) == pytest.approx(model.predict(row) - profile.c0_s, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.01), (0.05, 0.15)])
def test_it_learns_all_five_coefficients_from_noisy_steps(noise: float, within: float) -> None:
    model = taught(mixed(2000), noise)
    assert coefficients(model) == pytest.approx(TRUE.coefficients(), rel=within)


def test_it_starts_from_the_profile() -> None:
    assert coefficients(CostModel(TRUE)) == TRUE.coefficients()


def test_a_coefficient_that_was_never_seen_at_work_stays_at_its_profile() -> None:
    model = taught(decoding(500))
    assert (model.c_in_s, model.c_att_s) == pytest.approx((GUESS.c_in_s, GUESS.c_att_s), rel=1e-6)


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.02), (0.05, 0.1)])
def test_a_long_spell_of_decoding_does_not_move_what_prefill_taught(noise: float, within: float) -> None:
    model, chance = taught(mixed(2000)), np.random.default_rng(5)
    learned = model.c_in_s, model.c_att_s
    for work in decoding(10_000):
        model.observe(work, true_s(work) * (1.0 + noise * chance.uniform(-1.0, 1.0)))
    assert (model.c_in_s, model.c_att_s) == pytest.approx(learned, rel=within)


def test_it_follows_a_drift() -> None:
    model = taught(mixed(1000))
    for work in mixed(500, seed=2):
        model.observe(work, true_s(work, SLOWER))
    errors = [abs(model.predict(work) / true_s(work, SLOWER) - 1.0) for work in mixed(200, seed=3)]
    assert np.quantile(errors, 0.9) < 0.02


def test_a_drift_during_decoding_is_followed_too() -> None:
    model = taught(mixed(1000))
    for work in decoding(500):
        model.observe(work, true_s(work, SLOWER))
    errors = [abs(model.predict(work) / true_s(work, SLOWER) - 1.0) for work in decoding(200, seed=4)]
    assert max(errors) < 0.05


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_times_that_are_no_times_teach_nothing(seconds: float) -> None:
    model, clean = CostModel(GUESS), CostModel(GUESS)
    for work in mixed(256):
        model.observe(work, seconds)
        model.observe(work, true_s(work))
        clean.observe(work, true_s(work))
    assert coefficients(model) == coefficients(clean)


@given(st.lists(st.tuples(WORKS, st.floats(1e-6, 1e3)), min_size=8, max_size=80))
def test_no_coefficient_is_ever_negative(steps: list[tuple[Work, float]]) -> None:
    """Times that no formula explains."""
    model = CostModel(GUESS)
    for work, seconds in steps:
        model.observe(work, seconds)
        assert all(math.isfinite(cost) and cost >= 0.0 for cost in coefficients(model))


def test_larger_steps_that_took_less_time_give_zero_not_less() -> None:
    model = CostModel(GUESS)
    for size in range(1, 200):
        model.observe(Work(0, size, 10 * size, 0), 1.0 / size)
    assert min(coefficients(model)) >= 0.0
    assert model.c_out_s == 0.0 or model.c_kv_s == 0.0


@given(PROFILES, st.integers(0, 20_000), st.floats(1e-6, 10.0))
def test_the_chunk_for_a_time_is_the_largest(profile: CostProfile, start: int, seconds: float) -> None:
    """Two tokens are the smallest chunk: a single one is a decode row, at its own price."""
    model = CostModel(profile)
    count = model.chunk_for(start, seconds)
    assert count == 0 or model.chunk_s(start, count) <= seconds
    if count < 2**31 - 1:
        assert model.chunk_s(start, max(2, count + 1)) > seconds * (1.0 - 1e-9)


@pytest.mark.parametrize("seconds", [0.0, -1.0, -math.inf])
def test_no_time_is_no_chunk(seconds: float) -> None:
    assert CostModel(TRUE).chunk_for(0, seconds) == 0


def test_reading_the_context_alone_can_take_all_the_time() -> None:
    model = CostModel(TRUE)
    assert model.chunk_for(100_000, 100_000 * TRUE.c_kv_s) == 0


def test_what_costs_nothing_has_no_bound() -> None:
    assert CostModel(CostProfile(1.0, 0.0, 0.0, 0.0, 0.0)).chunk_for(10, 1e-3) == 2**31 - 1
    assert CostModel(CostProfile(1.0, 1e-3, 0.0, 0.0, 0.0)).chunk_for(10, 1.0) == 1000


def test_a_prompt_in_chunks_of_one_size_costs_about_its_prompt_time() -> None:
    model = CostModel(CostProfile(1e-3, 1e-5, 0.0, 0.0, 1e-9))
    chunks_s = sum(model.chunk_s(start, 10) for start in range(0, 1000, 10))
    assert model.prompt_s(1000) == pytest.approx(chunks_s, rel=0.01)
