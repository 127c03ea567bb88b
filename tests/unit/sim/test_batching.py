"""Three batching policies on traces small enough to work out by hand: every step takes 10 ms."""

from pathlib import Path

import numpy as np
import pytest

from headrace.core.config import CostProfile
from headrace.core.errors import InvalidInput
from headrace.sim.batching import Machine, Policy, PolicyRun, Trace, run_policy
from headrace.sim.batching_picture import draw_batching
from headrace.sim.batching_report import Load as BatchingLoad
from headrace.sim.batching_report import (
    Setting,
    WaitingTime,
    draw_trace,
    measure,
    run_batching,
    run_straggler,
    scarce_machine,
)
from headrace.sim.lengths import LogNormal

pytestmark = pytest.mark.unit

STEP_S = 0.01
EVEN = CostProfile(c0_s=STEP_S, c_in_s=0.0, c_out_s=0.0, c_kv_s=0.0, c_att_s=0.0)


def trace(outputs: list[int], arrivals: list[int] | None = None, prompt: int = 16, longest: int = 8) -> Trace:
    """Arrivals are given in steps."""
    arrivals_s = np.array(arrivals or [0] * len(outputs), np.float64) * STEP_S
    return Trace(arrivals_s, np.full(len(outputs), prompt), np.array(outputs), longest)


def play(
    policy: Policy, what: Trace, *, slots: int = 2, blocks: int = 64, linger: int = 0, depth: int = 1
) -> PolicyRun:
    return run_policy(policy, what, Machine(slots, blocks, 16, EVEN, depth), linger * STEP_S)


def steps(times_s: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
    return [round(value / STEP_S) for value in times_s.tolist()]


def test_a_static_batch_returns_with_its_longest() -> None:
    run = play(Policy.STATIC, trace([1, 3, 2, 1]))
    assert steps(run.finished_s) == [1, 3, 5, 4]
    assert steps(run.returned_s) == [3, 3, 5, 5]


def test_a_static_batch_waits_until_it_is_full_or_nothing_more_comes() -> None:
    run = play(Policy.STATIC, trace([1, 1, 1], arrivals=[0, 7, 9]))
    assert steps(run.spans.starts_s) == [7, 7, 9]


def test_a_dynamic_batch_closes_on_its_linger_time() -> None:
    run = play(Policy.DYNAMIC, trace([1, 1, 1], arrivals=[0, 7, 9]), linger=3)
    assert steps(run.spans.starts_s) == [3, 9, 9]


def test_a_dynamic_batch_takes_what_came_while_the_last_one_ran() -> None:
    run = play(Policy.DYNAMIC, trace([8, 1, 1, 1], arrivals=[0, 2, 3, 4]), linger=1)
    assert steps(run.spans.starts_s) == [1, 9, 9, 10]


def test_continuous_gives_a_freed_slot_to_the_next_request_at_once() -> None:
    run = play(Policy.CONTINUOUS, trace([1, 3, 2, 1]))
    assert steps(run.finished_s) == [1, 3, 3, 4]
    assert steps(run.first_s) == [1, 1, 2, 4]


def test_a_batch_promises_every_row_the_longest_output() -> None:
    longest = 80  # with its prompt six blocks of 16
    run = play(Policy.STATIC, trace([2, 2, 2], longest=longest), slots=3, blocks=13)
    assert steps(run.spans.starts_s) == [0, 0, 2]


def test_a_request_that_could_never_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="does not fit"):
        play(Policy.STATIC, trace([2], longest=80), blocks=5)


def test_a_trace_that_goes_back_is_refused() -> None:
    with pytest.raises(InvalidInput, match="arrivals"):
        trace([1, 1], arrivals=[2, 1])


def test_a_slot_held_by_a_finished_row_is_not_occupied() -> None:
    figures = measure(play(Policy.STATIC, trace([1, 3, 2, 1])))
    assert figures.occupancy == pytest.approx((1 + 3 + 2 + 1) / (2 * 5))
    # Only while the second batch waits for the first.
    assert figures.occupancy_while_waiting == pytest.approx((1 + 3) / (2 * 3))
    assert figures.output_tokens_per_s == pytest.approx(7 / (5 * STEP_S))


def test_waiting_time_is_the_union_of_all_waits() -> None:
    run = play(Policy.STATIC, trace([2, 2, 2], arrivals=[0, 0, 6]), slots=1)
    waiting = WaitingTime(run)
    assert waiting.total_s == pytest.approx(2 * STEP_S)
    overlaps = waiting.overlap_s(np.array([0.0, 3.0, 5.0]) * STEP_S, np.array([1.0, 9.0, 6.0]) * STEP_S)
    assert overlaps.tolist() == pytest.approx([STEP_S, 0.0, 0.0])


def test_nothing_waits_in_an_empty_house() -> None:
    figures = measure(play(Policy.CONTINUOUS, trace([3])))
    assert figures.occupancy_while_waiting is None
    assert figures.occupancy == pytest.approx(0.5)


def test_kv_counts_blocks_with_tokens_of_unfinished_requests() -> None:
    run = play(Policy.STATIC, trace([1, 3]))
    assert run.steps.kv_blocks.tolist() == [2, 2, 2]  # two prompts of a block; then 17 and 18 tokens of one


@pytest.mark.parametrize("depth", [1, 2])
def test_all_policies_serve_the_same_tokens_and_continuous_soonest(depth: int) -> None:
    setting = Setting(120, LogNormal(60, 0.5, 10, 200), LogNormal(30, 1.0, 5, 200), Machine(8, 400, depth=depth))
    what = draw_trace(setting, None)
    figures = {policy: measure(run_policy(policy, what, setting.machine, 0.05)) for policy in Policy}
    assert figures[Policy.STATIC] == figures[Policy.DYNAMIC]
    assert figures[Policy.CONTINUOUS].output_tokens_per_s > 1.5 * figures[Policy.STATIC].output_tokens_per_s
    busy = figures[Policy.CONTINUOUS].occupancy_while_waiting
    assert busy is not None
    assert busy > 0.95


def test_scarce_kv_is_used_up_by_continuous_batching_only() -> None:
    setting = Setting(150, LogNormal(60, 0.5, 10, 200), LogNormal(60, 1.0, 5, 200), Machine(16, 800), kv_share=0.4)
    what = draw_trace(setting, None)
    ample = {policy: measure(run_policy(policy, what, setting.machine, 0.05)) for policy in Policy}
    scarce = scarce_machine(BatchingLoad("", None, 800, ample), what, setting)
    used = {policy: measure(run_policy(policy, what, scarce, 0.05)).kv_use_while_waiting or 0.0 for policy in Policy}
    assert used[Policy.CONTINUOUS] > 0.88
    assert used[Policy.STATIC] < 0.5


def test_short_replies_do_not_wait_for_a_long_one_under_continuous_batching() -> None:
    tails = [run_straggler(long, Machine(8), 0.05) for long in (50, 500)]
    moved_s = abs(tails[0].short_p99_s[Policy.CONTINUOUS] - tails[1].short_p99_s[Policy.CONTINUOUS])
    assert moved_s < tails[0].step_s
    assert tails[1].short_p99_s[Policy.STATIC] > 5 * tails[0].short_p99_s[Policy.STATIC]


def test_the_same_seed_draws_the_same_trace_and_a_rate_moves_only_arrivals() -> None:
    setting = Setting(50, LogNormal(60, 0.5, 10, 200), LogNormal(30, 1.0, 5, 200), Machine(), seed=3)
    present, spread = draw_trace(setting, None), draw_trace(setting, 10.0)
    assert present.outputs.tolist() == spread.outputs.tolist()
    assert present.prompts.tolist() == spread.prompts.tolist()
    assert (np.diff(spread.arrivals_s) > 0).all()


@pytest.mark.parametrize(
    "output", [LogNormal(30, 1.0, 5, 100), LogNormal(50, 0.1, 40, 60)], ids=["short", "none short"]
)
def test_the_picture_is_drawn_with_and_without_short_replies(tmp_path: Path, output: LogNormal) -> None:
    pytest.importorskip("matplotlib")
    setting = Setting(12, LogNormal(60, 0.5, 10, 200), output, Machine(4, 200), straggler_outputs=(20, 40))
    notes: list[str] = []
    draw_batching(run_batching(setting, notes.append), tmp_path / "batching.png")
    assert (tmp_path / "batching.png").read_bytes().startswith(b"\x89PNG")
    assert len(notes) == 4
