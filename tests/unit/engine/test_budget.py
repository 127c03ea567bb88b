"""How long a step may take: from targets, never from a constant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.config import CostProfile
from headrace.engine.budget import StepBudget, longest_step_s, part_target_s, step_target_s
from headrace.engine.cost import CostModel

# 1 ms a token, nothing else: seconds and tokens are easy to compare.
PLAIN = CostModel(CostProfile(c0_s=10e-3, c_in_s=1e-3, c_out_s=1e-3, c_kv_s=0.0, c_att_s=0.0))


def budget(target_s: float = 0.1, predicted_s: float = 0.0, tokens: int = 1000, limit_s: float = 0.5) -> StepBudget:
    return StepBudget(PLAIN, target_s, predicted_s, tokens, grain=8, limit_s=limit_s)


@pytest.mark.parametrize(
    ("itl_s", "ttft_s", "target_s"),
    [
        (0.05, 10.0, 0.05),  # what is running
        (10.0, 0.25, 0.05),  # a fifth of what will come
        (1e-6, 1e-6, 0.022),  # twice the smallest step
        (10.0, 100.0, 0.5),  # never above the longest step
        (float("inf"), float("inf"), 0.5),
    ],
)
def test_the_target_of_a_step(itl_s: float, ttft_s: float, target_s: float) -> None:
    assert step_target_s(PLAIN, itl_s, ttft_s, longest_s=0.5) == pytest.approx(target_s)


def test_a_device_whose_smallest_step_is_long_still_batches() -> None:
    slow = CostModel(CostProfile(c0_s=1.0, c_out_s=0.01))
    assert longest_step_s(PLAIN, 0.5) == 0.5
    assert longest_step_s(slow, 0.5) == pytest.approx(2.02)
    assert step_target_s(slow, 0.05, 1.0, longest_step_s(slow, 0.5)) == pytest.approx(2.02)


def test_a_chunk_is_bounded_by_time_by_tokens_and_by_what_is_left() -> None:
    assert budget(target_s=0.1, predicted_s=0.04).chunk(0, 500) == 60
    assert budget(tokens=30).chunk(0, 500) == 30
    assert budget().chunk(0, 7) == 7
    assert budget(tokens=0).chunk(0, 7) == 0
    assert budget().chunk(0, 0) == 0


def test_what_costs_nothing_is_not_added_to_a_step_that_is_full() -> None:
    free = CostModel(CostProfile(c0_s=10e-3, c_in_s=0.0, c_out_s=0.0, c_kv_s=0.0, c_att_s=0.0))
    for predicted_s, count in ((0.09, 500), (0.1, 0)):
        assert StepBudget(free, 0.1, predicted_s, 1000, grain=8, limit_s=0.5, owed=False).chunk(0, 500) == count


def test_what_is_taken_is_gone() -> None:
    left = budget(target_s=0.1, tokens=90)
    assert left.take(0, 60) == pytest.approx(0.06)
    assert left.tokens == 30 and left.predicted_s == pytest.approx(0.06)
    assert left.chunk(0, 500) == 30


def test_a_chunk_below_the_grain_is_not_worth_a_row_unless_it_is_the_last() -> None:
    left = budget(target_s=0.1055)
    left.take(0, 100)
    assert left.chunk(0, 500) == 0
    assert left.chunk(0, 5) == 5


def test_one_grain_a_step_is_owed_when_decode_rows_fill_the_target() -> None:
    full = budget(target_s=0.1, predicted_s=0.2)
    assert full.chunk(0, 500) == 8
    full.take(0, 8)
    assert full.chunk(0, 500) == 0


def test_what_is_owed_does_not_pass_the_longest_step() -> None:
    assert budget(target_s=0.1, predicted_s=0.4951).chunk(0, 500) == 4
    assert budget(target_s=0.1, predicted_s=0.5).chunk(0, 500) == 0


@given(st.floats(0.0, 0.6), st.integers(0, 200), st.lists(st.integers(1, 300), max_size=8))
def test_a_step_keeps_its_target_or_else_owes_one_grain(predicted_s: float, tokens: int, pending: list[int]) -> None:
    left = budget(target_s=0.1, predicted_s=predicted_s, tokens=tokens)
    for count in (left.chunk(0, waiting) for waiting in pending):
        if count:
            left.take(0, count)
    assert left.tokens >= 0
    assert left.predicted_s <= max(predicted_s, 0.1 + 8e-3, min(0.5, predicted_s + 8e-3)) + 1e-9


def test_a_part_of_a_prompt_is_a_multiple_of_what_the_runner_asks_for_unless_it_is_the_last() -> None:
    held = StepBudget(PLAIN, 0.2, 0.0, 10_000, grain=32, limit_s=1.0, multiple=32)
    free = StepBudget(PLAIN, 0.2, 0.0, 10_000, grain=32, limit_s=1.0).chunk(0, 10_000)
    assert free % 32 and held.chunk(0, 10_000) == free - free % 32
    assert held.chunk(0, free) == free
    # No room for one: what there is.
    assert StepBudget(PLAIN, 0.2, 0.0, 20, grain=32, limit_s=1.0, multiple=32).chunk(0, 10_000) == 20


def test_a_prompt_in_parts_lengthens_steps_by_what_they_were_when_it_began() -> None:
    assert part_target_s(0.010, float("inf")) == part_target_s(0.010, 0.010) == pytest.approx(0.019)
    assert part_target_s(0.012, 0.010) == pytest.approx(0.019)
    # Where they have grown by more than a quarter, they are not held to what they once were.
    assert part_target_s(0.020, 0.010) == pytest.approx(0.030)
    assert part_target_s(0.008, 0.010) == pytest.approx(0.0152)
