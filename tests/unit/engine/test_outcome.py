"""Results applied: tokens, ends, failures that stay alone, counters that add up, blocks found again."""

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.config import EngineConfig
from headrace.core.event import Counters, Outcome, TokenEvent
from headrace.core.plan import Plan, Scores, StepResult
from headrace.core.request import Request, SamplingParams
from headrace.runner.faults import Faults
from tests.builders import Rig, engine_config, prompt, request

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
BLOCK = 4


def cached(rig: Rig, made: Request) -> int:
    """Prompt tokens that a request finds in the cache; its stream is true."""
    number = rig.submit(made)
    rig.run()
    counters = rig.ended[number].counters
    assert counters.prompt_cached + counters.prompt_computed == len(made.prompt_ids)
    assert rig.tokens[number] == rig.truth(number)
    return counters.prompt_cached


def stop_at(token: int, **others: object) -> SamplingParams:
    return SamplingParams(seed=1, stop_ids=(token,), **others)  # type: ignore[arg-type]


@DEPTHS
def test_a_stream_ends_by_length_or_by_stop(depth: int) -> None:
    rig = Rig(depth=depth)
    by_length = rig.submit(request("x", max_tokens=5))
    by_stop = rig.submit(request("y", max_tokens=9), output=5)
    both = rig.submit(request("z", max_tokens=5), output=5)
    rig.run()
    assert [rig.ended[number].reason for number in (by_length, by_stop, both)] == ["length", "stop", "stop"]
    assert all(ended.outcome is Outcome.FINISHED for ended in rig.ended.values())
    rig.assert_true()


@DEPTHS
def test_a_stop_id_ends_its_own_stream_only(depth: int) -> None:
    rig = Rig(depth=depth)
    said = rig.runner.truth(prompt(8, 1), 20, seed=1)
    stopped = rig.submit(request("x", ids=prompt(8, 1), max_tokens=20, sampling=stop_at(said[6])))
    other = rig.submit(request("y", ids=prompt(8, 1), max_tokens=20, seed=1))
    rig.run()
    assert (rig.tokens[stopped], rig.tokens[other]) == (said[:7], said)


@DEPTHS
def test_a_stop_before_the_least_length_does_not_end_it(depth: int) -> None:
    rig = Rig(depth=depth)
    said = rig.runner.truth(prompt(8, 1), 20, seed=1)
    number = rig.submit(request("x", ids=prompt(8, 1), max_tokens=20, sampling=stop_at(said[6], min_tokens=8)))
    exact = rig.submit(request("y", ids=prompt(8, 1), max_tokens=20, sampling=stop_at(said[6], min_tokens=7)))
    rig.run()
    assert (rig.tokens[number], rig.tokens[exact]) == (said, said[:7])


@DEPTHS
def test_the_end_of_sequence_can_be_ignored(depth: int) -> None:
    rig = Rig(depth=depth)
    number = rig.submit(request("x", max_tokens=9, sampling=SamplingParams(ignore_eos=True)), output=3)
    rig.run()
    assert len(rig.tokens[number]) == 9 and rig.tokens[number][2] == 0
    assert rig.ended[number].reason == "length"


def test_a_wasted_row_is_refunded() -> None:
    """The stop token comes of step 3; step 4 was planned before that was known."""
    rig = Rig(engine_config(slots=2), depth=2)
    rig.submit(request("x", max_tokens=50, tenant="a"), output=4)
    rig.submit(request("y", max_tokens=50, tenant="b"))
    levels: list[float] = []
    rig.on_plan = lambda _: levels.append(rig.engine.service_levels()["a"])
    while len(rig.plans) < 6:
        rig.step()
    assert len(rig.ended) == 1
    assert levels[4] > levels[3]
    assert rig.engine.service_levels()["a"] == pytest.approx(levels[3], rel=1e-12)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_tokens_that_were_in_flight_at_a_pause_are_kept(in_flight: int) -> None:
    rig = Rig(depth=2)
    number = rig.submit(request("x", max_tokens=20))
    rig.step()
    rig.step()
    while rig.engine.in_flight < in_flight:
        rig.plan()
    known = len(rig.tokens[number])
    rig.engine.pause(number, rig.now_s)
    rig.run()
    assert len(rig.tokens[number]) == known + in_flight
    rig.engine.resume(number, rig.now_s)
    rig.run()
    rig.assert_true()


def test_tokens_that_were_in_flight_at_a_preemption_are_kept() -> None:
    rig = Rig(engine_config(slots=4, blocks=10), depth=2)
    for name in "xyz":
        rig.submit(request(name, 8, 16))
    rig.run()
    assert rig.engine.num_preemptions > 0
    assert all(ended.counters.emitted == 16 for ended in rig.ended.values())
    rig.assert_true()


@pytest.mark.parametrize("output", [4, None])
def test_a_last_token_that_was_in_flight_at_a_pause_ends_the_stream(output: int | None) -> None:
    rig = Rig(depth=2)
    number = rig.submit(request("x", max_tokens=4 if output is None else 20), output=output)
    while len(rig.tokens[number]) < 2:
        rig.step()
    rig.plan()
    rig.engine.pause(number, rig.now_s)
    rig.run()
    assert rig.ended[number].outcome is Outcome.FINISHED
    rig.assert_true()


def test_log_probabilities_stay_with_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(depth=2)
    collect = rig.runner.collect

    def collect_with_scores() -> StepResult:
        result = collect()
        rows = np.flatnonzero(result.tokens >= 0)
        tokens = result.tokens[rows]
        positions = 100 + np.arange(len(rows), dtype=np.int32)
        scores = Scores(
            rows, positions, -tokens.astype(np.float32), tokens[:, None], -tokens[:, None].astype(np.float32)
        )
        return replace(result, scores=scores)

    monkeypatch.setattr(rig.runner, "collect", collect_with_scores)
    numbers = [rig.submit(request(name, max_tokens=6)) for name in "xyz"]
    for step in range(12):
        if step == 2:
            rig.plan()
            rig.engine.pause(numbers[1], rig.now_s)
        if step == 6:
            rig.engine.resume(numbers[1], rig.now_s)
        frame = rig.step()
        said = {} if frame.scores is None else dict(zip(frame.scores.owners, frame.scores.logprobs, strict=True))
        assert said == {event.number: -event.token for event in frame.events()}
    assert len(rig.ended) == 3
    rig.assert_true()


def test_prompt_scores_are_told_once_and_the_prefix_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(engine_config(block_size=BLOCK, max_step_tokens=16))
    launch, collect = rig.runner.launch, rig.runner.collect
    plans: list[Plan] = []

    def launch_and_note(plan: Plan) -> None:
        plans.append(plan)
        launch(plan)

    def collect_with_prompt_scores() -> StepResult:
        result, plan = collect(), plans[-1]
        positions = np.arange(plan.starts[0] + 1, plan.starts[0] + plan.counts[0] + 1, dtype=np.int32)
        rows, ids = np.zeros(len(positions), np.int64), np.zeros((len(positions), 0), np.int32)
        return replace(
            result, scores=Scores(rows, positions, -positions.astype(np.float32), ids, ids.astype(np.float32))
        )

    monkeypatch.setattr(rig.runner, "launch", launch_and_note)
    monkeypatch.setattr(rig.runner, "collect", collect_with_prompt_scores)
    rig.submit(request("first", 64, 1, seed=1, block_size=BLOCK))
    rig.run()
    number = rig.submit(request("second", 64, 8, seed=1, block_size=BLOCK, sampling=SamplingParams(prompt_logprobs=0)))
    positions: list[int] = []
    for step in range(14):
        if step == 3:
            rig.engine.pause(number, rig.now_s)
            rig.engine.resume(number, rig.now_s)
        frame = rig.step()
        if frame.scores is not None:
            positions += frame.scores.positions.tolist()
    assert positions == list(range(1, 64 + 8))
    assert rig.ended[number].counters.prompt_cached == 0
    rig.assert_true()


def _fail(faults: Faults, number: int, at: int | None) -> None:
    faults.fail_row(number, at=at)


def _nan(faults: Faults, number: int, at: int | None) -> None:
    faults.nan_row(number, at=at)


def _range(faults: Faults, number: int, at: int | None) -> None:
    faults.bad_id(number, at=at)


@DEPTHS
@pytest.mark.parametrize("at", [None, 0, 3, 7])
@pytest.mark.parametrize(("inject", "name"), [(_fail, "failed"), (_nan, "not_finite"), (_range, "out_of_range")])
def test_a_row_that_fails_ends_alone(
    inject: Callable[[Faults, int, int | None], None], name: str, at: int | None, depth: int
) -> None:
    faults = Faults()
    rig = Rig(engine_config(slots=3, max_step_tokens=16), depth=depth, faults=faults)
    numbers = [rig.submit(request(letter, length=12, max_tokens=8)) for letter in "wxyz"]
    inject(faults, numbers[1], at)
    rig.run()
    failed = rig.ended[numbers[1]]
    assert (failed.outcome, failed.reason) == (Outcome.FAILED, name)
    assert len(rig.tokens[numbers[1]]) == (at or 0) and failed.message
    assert [rig.ended[number].outcome for number in numbers].count(Outcome.FINISHED) == 3
    rig.assert_true()


def test_a_row_that_fails_while_its_sequence_is_paused_ends_it() -> None:
    faults = Faults()
    rig = Rig(depth=2, faults=faults)
    number = rig.submit(request("x", max_tokens=8))
    faults.nan_row(number, at=2)
    rig.step()
    rig.step()
    rig.engine.pause(number, rig.now_s)
    rig.run()
    assert rig.ended[number].reason == "not_finite" and len(rig.tokens[number]) == 2
    rig.assert_true()


def test_a_device_that_fails_rows_at_random_harms_nobody_else() -> None:
    faults = Faults()
    rig = Rig(engine_config(slots=8, blocks=40), depth=2, faults=faults)
    for index in range(60):
        number = rig.submit(
            request(f"r{index}", 6 + index % 9, 12, block_size=BLOCK, seed=index % 3), output=3 + index % 12
        )
        if index % 4 == 0:
            (faults.fail_row, faults.nan_row, faults.bad_id)[index % 3](number, at=index % 5)
    rig.run()
    outcomes = [ended.outcome for ended in rig.ended.values()]
    assert outcomes.count(Outcome.FAILED) > 10 and outcomes.count(Outcome.FINISHED) > 40
    rig.assert_true()


@DEPTHS
def test_every_event_carries_the_counters_so_far(depth: int) -> None:
    rig = Rig(engine_config(max_step_tokens=6), depth=depth)
    rig.submit(request("x", length=20, max_tokens=5))
    events: list[TokenEvent] = []
    while not rig.engine.idle:
        events += rig.step().events()
    assert [event.index for event in events] == list(range(5))
    assert [event.counters for event in events] == [Counters(20, 0, index + 1) for index in range(5)]


@DEPTHS
def test_a_preempted_sequence_counts_its_prompt_once(depth: int) -> None:
    rig = Rig(engine_config(slots=4, blocks=12, max_step_tokens=10), depth=depth)
    for index in range(6):
        rig.submit(request(f"r{index}", length=14, max_tokens=20, block_size=BLOCK))
    rig.run()
    assert rig.engine.num_preemptions > 0
    for number, ended in rig.ended.items():
        counters = ended.counters
        assert counters.prompt_computed + counters.prompt_cached == 14
        assert counters.emitted == len(rig.tokens[number]) == 20
        assert counters.overrun == counters.replayed == 0
    assert sum(ended.counters.recomputed for ended in rig.ended.values()) > 0
    rig.assert_true()


@DEPTHS
def test_all_tokens_that_were_computed_are_counted_once(depth: int) -> None:
    """Prompt, recomputed and generated tokens but the last one: what the plans held."""
    rig = Rig(engine_config(slots=4, blocks=12), depth=depth)
    for index in range(6):
        rig.submit(request(f"r{index}", length=9 + index, max_tokens=20))
    rig.run()
    planned = sum(int(plan.counts.sum()) for plan in rig.plans)
    counters = [ended.counters for ended in rig.ended.values()]
    counted = sum(one.prompt_computed + one.recomputed + one.emitted - 1 for one in counters)
    assert rig.engine.num_preemptions > 0 and counted == planned


def test_replayed_tokens_are_counted_and_not_as_emitted() -> None:
    rig = Rig()
    said = rig.runner.truth(prompt(8, 1), 12, seed=1)
    number = rig.submit(request("x", ids=prompt(8, 1), seed=1, max_tokens=12, replay_ids=tuple(said[:5])))
    rig.run()
    assert rig.ended[number].counters == Counters(prompt_computed=8, emitted=7, replayed=5)
    assert rig.tokens[number] == said


def test_hits_found_after_a_restart_count_as_cached() -> None:
    rig = Rig(engine_config(slots=2, max_step_tokens=4))
    paused = rig.submit(request("x", ids=prompt(20, 1), max_tokens=4, block_size=BLOCK))
    rig.step()
    rig.engine.pause(paused, rig.now_s)
    rig.submit(request("y", ids=prompt(20, 1), max_tokens=4, block_size=BLOCK))
    rig.run()
    rig.engine.resume(paused, rig.now_s)
    rig.run()
    assert rig.ended[paused].counters == Counters(prompt_computed=8, prompt_cached=12, emitted=4)


@DEPTHS
@pytest.mark.parametrize(("used", "emitted", "overrun"), [(0, 0, 4), (3, 3, 1), (4, 4, 0), (9, 4, 0), (None, 4, 0)])
def test_tokens_past_what_was_used_are_overrun(depth: int, used: int | None, emitted: int, overrun: int) -> None:
    rig = Rig(depth=depth)
    number = rig.submit(request("x", max_tokens=20))
    while len(rig.tokens[number]) < 4:
        rig.step()
    rig.engine.abort(number, rig.now_s, used_tokens=used)
    rig.run()
    counters = rig.ended[number].counters
    assert (counters.emitted, counters.overrun) == (emitted, overrun)


def test_overrun_of_a_paused_sequence_is_counted_too() -> None:
    rig = Rig()
    number = rig.submit(request("x", max_tokens=20))
    for _ in range(4):
        rig.step()
    rig.engine.pause(number, rig.now_s)
    rig.engine.abort(number, rig.now_s, used_tokens=1)
    rig.run()
    assert rig.ended[number].counters == Counters(prompt_computed=8, emitted=1, overrun=3)


@DEPTHS
def test_a_prefix_is_computed_once(depth: int) -> None:
    rig = Rig(depth=depth)
    base = prompt(16, 1)
    assert cached(rig, request("x", ids=base + prompt(5, 2), block_size=BLOCK)) == 0
    assert cached(rig, request("y", ids=base + prompt(5, 3), block_size=BLOCK)) == 16
    assert cached(rig, request("z", ids=base[:11], block_size=BLOCK)) == 8


def test_at_least_one_token_is_left_to_compute() -> None:
    rig = Rig()
    assert cached(rig, request("x", ids=prompt(16, 1), block_size=BLOCK)) == 0
    assert cached(rig, request("y", ids=prompt(16, 1), block_size=BLOCK)) == 12


@DEPTHS
def test_generated_tokens_are_a_prefix_of_the_next_turn(depth: int) -> None:
    rig = Rig(depth=depth)
    first = rig.submit(request("x", ids=prompt(10, 1), max_tokens=11, block_size=BLOCK))
    rig.run()
    assert cached(rig, request("y", ids=(*prompt(10, 1), *rig.tokens[first], 5, 6), block_size=BLOCK)) == 20


def test_another_tenants_salt_finds_nothing() -> None:
    rig = Rig()
    assert cached(rig, request("x", ids=prompt(16, 1), block_size=BLOCK, tenant="a")) == 0
    assert cached(rig, request("y", ids=prompt(16, 1), block_size=BLOCK, tenant="b")) == 0


@pytest.mark.parametrize("config", [engine_config(), engine_config(prefix_cache=False)])
def test_without_a_root_or_a_cache_nothing_is_found(config: EngineConfig) -> None:
    rig = Rig(config)
    block_size = 0 if config.prefix_cache else BLOCK
    assert cached(rig, request("x", ids=prompt(16, 1), block_size=block_size)) == 0
    assert cached(rig, request("y", ids=prompt(16, 1), block_size=block_size)) == 0
    assert rig.engine.clear_prefix_cache() == 0


@DEPTHS
def test_a_prefix_is_found_only_once_its_step_is_applied(depth: int) -> None:
    """Two of one prompt that start together both compute it; one that starts after shares it while it is held."""
    rig = Rig(depth=depth)
    twins = [rig.submit(request(name, ids=prompt(16, 1), max_tokens=20, block_size=BLOCK)) for name in "xy"]
    rig.step()
    rig.step()
    third = rig.submit(request("z", ids=prompt(16, 1), max_tokens=20, block_size=BLOCK))
    rig.run()
    assert [rig.ended[number].counters.prompt_cached for number in (*twins, third)] == [0, 0, 12]
    rig.assert_true()


def test_a_paused_sequence_finds_its_own_blocks() -> None:
    rig = Rig()
    number = rig.submit(request("x", length=16, max_tokens=20, block_size=BLOCK))
    for _ in range(9):
        rig.step()
    rig.engine.pause(number, rig.now_s)
    rig.engine.resume(number, rig.now_s)
    rig.run()
    assert rig.ended[number].counters.recomputed == 0
    rig.assert_true()


@DEPTHS
def test_what_an_aborted_sequence_computed_is_found(depth: int) -> None:
    rig = Rig(depth=depth)
    number = rig.submit(request("x", ids=prompt(16, 1), max_tokens=20, block_size=BLOCK))
    rig.step()
    rig.engine.abort(number, rig.now_s)
    rig.run()
    assert cached(rig, request("y", ids=prompt(16, 1), block_size=BLOCK)) == 12


@DEPTHS
@pytest.mark.parametrize(("most", "sound"), [(32, 0), (8, 8)])
def test_what_a_failed_chunk_computed_is_not_found(depth: int, most: int, sound: int) -> None:
    faults = Faults()
    rig = Rig(engine_config(max_step_tokens=most), depth=depth, faults=faults)
    number = rig.submit(request("x", ids=prompt(16, 1), block_size=BLOCK))
    faults.fail_row(number, at=0)
    rig.run()
    assert rig.ended[number].outcome is Outcome.FAILED
    assert cached(rig, request("y", ids=prompt(16, 1), block_size=BLOCK)) == sound


@DEPTHS
def test_what_a_failed_sequence_generated_is_not_found(depth: int) -> None:
    faults = Faults()
    rig = Rig(depth=depth, faults=faults)
    number = rig.submit(request("x", ids=prompt(8, 1), max_tokens=20, block_size=BLOCK))
    faults.nan_row(number, at=10)
    rig.run()
    assert len(rig.tokens[number]) == 10
    assert cached(rig, request("y", ids=(*prompt(8, 1), *rig.tokens[number]), block_size=BLOCK)) == 8


def test_a_cleared_cache_is_empty() -> None:
    rig = Rig()
    assert cached(rig, request("x", ids=prompt(16, 1), block_size=BLOCK)) == 0
    assert rig.engine.clear_prefix_cache() > 0
    assert cached(rig, request("y", ids=prompt(16, 1), block_size=BLOCK)) == 0
    rig.engine.check()


@DEPTHS
def test_clearing_the_cache_under_load_harms_nobody(depth: int) -> None:
    rig = Rig(engine_config(blocks=24), depth=depth)
    for index in range(12):
        rig.submit(request(f"r{index}", ids=prompt(12, 1) + prompt(3, index), max_tokens=12, block_size=BLOCK))
    while not rig.engine.idle:
        rig.step()
        rig.engine.clear_prefix_cache()
    rig.assert_true()


def test_cached_blocks_are_given_up_when_memory_is_short() -> None:
    rig = Rig(engine_config(blocks=12))
    for index in range(10):
        rig.submit(request(f"r{index}", length=16, max_tokens=8, block_size=BLOCK))
    rig.run()
    rig.assert_true()
    load = rig.engine.load()
    assert (load.used_blocks, load.free_blocks) == (0, 12)
