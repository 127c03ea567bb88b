"""Faults: each kind does what it says, and harms no other row."""

import math
import threading

import pytest

from headrace.core.errors import MemoryCorrupted, RunnerFailed
from headrace.core.plan import Plan, RowStatus, StepResult
from headrace.runner.fake import FakeRunner
from headrace.runner.faults import FaultRates, Faults
from tests.unit.runner.plans import CONFIG, begin, generate, plan, run

PROMPT = list(range(10, 22))
C0_S = CONFIG.profile.c0_s


def start_two(faults: Faults, cells: bool = True, depth: int = 1) -> tuple[FakeRunner, Plan]:
    runner = FakeRunner(CONFIG, faults=faults, cells=cells, depth=depth)
    starts = [begin(slot, PROMPT, range(4 * slot, 4 * slot + 4), number=slot + 100) for slot in range(2)]
    return runner, plan(0, [(0, 0, 12, True), (1, 0, 12, True)], begun=starts)


def decode(runner: FakeRunner, step: int) -> StepResult:
    return run(runner, plan(step, [(0, 11 + step, 1, True), (1, 11 + step, 1, True)]))


def test_a_slow_step_takes_longer() -> None:
    faults = Faults()
    faults.slow(1, 0.5)
    faults.slow(lambda step: step % 2 == 0, 2.0)
    runner = FakeRunner(CONFIG, faults=faults)
    assert [run(runner, plan(step)).elapsed_s for step in range(4)] == [C0_S + 2, C0_S + 0.5, C0_S + 2, C0_S]


def test_a_hung_step_is_never_ready() -> None:
    faults = Faults()
    faults.hang(0)
    runner = FakeRunner(CONFIG, faults=faults)
    runner.launch(plan(0))
    runner.sample(0, None)
    assert runner.next_ready_s == math.inf
    with pytest.raises(RunnerFailed, match="step 0 never ends"):
        runner.collect()


def test_closing_ends_the_wait_for_a_hung_step() -> None:
    faults = Faults()
    faults.hang(0)
    runner = FakeRunner(CONFIG, faults=faults, sleep=True)
    runner.launch(plan(0))
    runner.sample(0, None)
    threading.Timer(0.02, runner.close).start()
    with pytest.raises(RunnerFailed, match="never ends"):
        runner.collect()


@pytest.mark.parametrize("cells", [True, False])
@pytest.mark.parametrize(("kind", "status"), [("fail_row", RowStatus.FAILED), ("nan_row", RowStatus.NOT_FINITE)])
def test_a_row_fails_alone_at_its_output_index(kind: str, status: int, cells: bool) -> None:
    faults = Faults()
    getattr(faults, kind)(101, at=2)
    runner, made = start_two(faults, cells)
    results = [run(runner, made), decode(runner, 1), decode(runner, 2)]
    assert [result.statuses.tolist() for result in results] == [[0, 0], [0, 0], [0, status]]
    assert results[2].tokens[1] == -1
    if cells:
        assert [int(result.tokens[0]) for result in results] == runner.truth(PROMPT, 3)


def test_without_an_index_the_next_row_fails_also_in_prefill() -> None:
    faults = Faults()
    faults.fail_row(100)
    runner, made = start_two(faults)
    result = run(runner, plan(0, [(0, 0, 8, False), (1, 0, 12, True)], begun=made.begun))
    assert result.statuses.tolist() == [RowStatus.FAILED, RowStatus.OK]


def test_a_plan_launched_before_the_failure_was_seen_still_runs() -> None:
    """Depth 2: the failed slot has a row in the next plan; it fails again, the others go on."""
    faults = Faults()
    faults.nan_row(100, at=1)
    runner, made = start_two(faults, depth=2)
    run(runner, made)
    results = [decode(runner, 1), decode(runner, 2), decode(runner, 3)]
    assert [result.statuses.tolist() for result in results] == [[RowStatus.NOT_FINITE, 0]] * 3
    assert [int(result.tokens[1]) for result in results] == runner.truth(PROMPT, 4)[1:]


def test_a_failed_slot_may_be_started_anew() -> None:
    faults = Faults()
    faults.fail_row(100, at=1)
    runner, made = start_two(faults)
    run(runner, made)
    decode(runner, 1)
    again = begin(0, PROMPT, [20, 21, 22, 23], number=102)
    assert generate(runner, again, 4, first_step=2) == runner.truth(PROMPT, 4)
    assert run(runner, plan(9, [(1, 13, 1, True)])).tokens.tolist() == [runner.truth(PROMPT, 3)[2]]


def test_what_a_failed_row_wrote_may_not_be_shared() -> None:
    faults = Faults()
    faults.nan_row(100)
    runner, made = start_two(faults)
    run(runner, made)
    with pytest.raises(MemoryCorrupted, match="bad prefix hit: block 0"):
        runner.launch(plan(1, begun=[begin(2, PROMPT, [0, 30, 31], num_computed=4)]))


@pytest.mark.parametrize("cells", [True, False])
def test_an_id_out_of_range_claims_success(cells: bool) -> None:
    faults = Faults()
    faults.bad_id(100, at=1)
    runner, made = start_two(faults, cells)
    run(runner, made)
    result = decode(runner, 1)
    assert int(result.tokens[0]) == CONFIG.vocab_size + 7
    assert result.statuses.tolist() == [RowStatus.OK, RowStatus.OK]
    assert decode(runner, 2).statuses.tolist() == [RowStatus.OK, RowStatus.OK]


def test_death_at_launch_is_for_good() -> None:
    faults = Faults()
    faults.die(1)
    runner, made = start_two(faults)
    run(runner, made)
    with pytest.raises(RunnerFailed, match="died at the launch of step 1"):
        runner.launch(plan(1))
    for call in (lambda: runner.launch(plan(2)), lambda: runner.sample(1, None), runner.collect, runner.warm_up):
        with pytest.raises(RunnerFailed, match="unusable: the device died"):
            call()


def test_death_at_collection_loses_the_step() -> None:
    faults = Faults()
    faults.die(0, at="collect")
    runner, made = start_two(faults)
    runner.launch(made)
    runner.sample(0, None)
    with pytest.raises(RunnerFailed, match="died in step 0"):
        runner.collect()
    with pytest.raises(RunnerFailed, match="unusable"):
        runner.collect()


def test_random_faults_repeat_with_their_seed_and_keep_their_rates() -> None:
    def outcomes(seed: int) -> list[int]:
        rates = FaultRates(fail=0.1, nan=0.05, range=0.05)
        found = []
        for trial in range(200):
            runner, made = start_two(Faults(rates, seed=seed + trial), cells=False)
            result = run(runner, made)
            found += [
                9 if token > CONFIG.vocab_size else status
                for token, status in zip(result.tokens.tolist(), result.statuses.tolist(), strict=True)
            ]
        return found

    found = outcomes(0)
    assert found == outcomes(0) != outcomes(1000)
    counts = {kind: found.count(kind) for kind in (RowStatus.OK, RowStatus.FAILED, RowStatus.NOT_FINITE, 9)}
    assert counts[RowStatus.OK] + counts[RowStatus.FAILED] + counts[RowStatus.NOT_FINITE] + counts[9] == 400
    assert 20 <= counts[RowStatus.FAILED] <= 65 and 8 <= counts[RowStatus.NOT_FINITE] <= 40 and 8 <= counts[9] <= 40


def test_random_steps_slow_hang_and_die() -> None:
    slow = FakeRunner(CONFIG, faults=Faults(FaultRates(slow=0.5, slow_s=3.0)))
    costs = {run(slow, plan(step)).elapsed_s for step in range(40)}
    assert costs == {C0_S, C0_S + 3.0}
    assert Faults(FaultRates(hang=1.0)).extra_s(0) == math.inf
    assert Faults(FaultRates(death=1.0)).dies(0, "launch")
    assert not Faults(FaultRates(death=1.0)).dies(0, "collect")
