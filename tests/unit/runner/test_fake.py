"""The fake runner: right tokens, the order of calls, masks, scripted ends, time."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.config import CostProfile
from headrace.core.errors import InvalidInput, RunnerFailed
from headrace.core.plan import Masks, Plan, RowStatus
from headrace.core.ports import Runner
from headrace.runner.fake import FakeRunner
from tests.unit.runner.plans import CONFIG, Row, begin, generate, ints, plan, run

PROMPT = list(range(10, 22))


class Hand:
    """A clock set by hand."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


def masks(rows: dict[int, set[int]]) -> Masks:
    words = np.zeros((len(rows), 16), np.uint32)  # 16 x 32 bits hold a vocabulary of 500
    for place, allowed in enumerate(rows.values()):
        for token in allowed:
            words[place, token // 32] |= np.uint32(1 << token % 32)
    return Masks(ints(list(rows)), words)


def first_plan(step: int = 0, slots: int = 1) -> Plan:
    """Each slot's whole prompt, in blocks of its own with room for four tokens more."""
    starts = [begin(slot, PROMPT, range(4 * slot, 4 * slot + 4)) for slot in range(slots)]
    return plan(step, [(slot, 0, 12, True) for slot in range(slots)], begun=starts)


def next_plan(step: int, position: int, slots: int = 1, masked: list[int] | None = None) -> Plan:
    return plan(step, [(slot, position, 1, True) for slot in range(slots)], masked=masked or [])


def test_it_is_a_runner() -> None:
    runner: Runner = FakeRunner(CONFIG)
    runner.load()
    runner.warm_up()
    assert runner.depth == 1


@pytest.mark.parametrize("chunk", range(1, 14))
def test_any_chunk_size_gives_the_true_tokens(chunk: int) -> None:
    runner = FakeRunner(CONFIG)
    start = begin(2, PROMPT, [40, 3, 17], seed=5, choice=1)
    tokens = generate(runner, start, 30, chunk=chunk, spare=[9, 63, 0, 31, 8, 7, 6, 5])
    assert tokens == runner.truth(PROMPT, 30, seed=5, choice=1)


@pytest.mark.parametrize("length", [2, 127, 128, 129, 200])
def test_a_prompt_of_any_length_gives_the_true_tokens(length: int) -> None:
    runner = FakeRunner(replace(CONFIG, context_len=256))
    ids = [7 * place % 499 for place in range(length)]
    assert generate(runner, begin(0, ids, range(52)), 3) == runner.truth(ids, 3)


def test_a_prompt_of_one_token_works() -> None:
    runner = FakeRunner(CONFIG)
    assert generate(runner, begin(0, [499], [0]), 10, spare=[1, 2]) == runner.truth([499], 10)


def test_tokens_depend_on_prompt_seed_and_choice_and_hold_no_eos() -> None:
    runner = FakeRunner(CONFIG)
    streams = [
        runner.truth(PROMPT, 400),
        runner.truth([9, *PROMPT[1:]], 400),
        runner.truth(PROMPT, 400, seed=1),
        runner.truth(PROMPT, 400, seed=-1),
        runner.truth(PROMPT, 400, choice=1),
    ]
    assert all(len(stream) == 400 for stream in streams)
    assert len({tuple(stream[:20]) for stream in streams}) == 5
    assert len(set(streams[0])) > 200


@dataclass
class Stream:
    """A sequence in a slot that owns eight blocks, taken into use as it grows."""

    slot: int
    number: int
    prompt: list[int]
    blocks: list[int]
    computed: int = 0
    num_given: int = 2
    said: list[int] = field(default_factory=list)

    def row(self, chance: random.Random) -> Row:
        length = len(self.prompt) + len(self.said)
        count = chance.randint(1, length - self.computed)
        return self.slot, self.computed, count, self.computed + count == length


def test_many_streams_interleaved_at_random_give_the_true_tokens() -> None:
    """Chunks and steps mixed, rows left out, blocks scattered and reused, slots taken over."""
    chance, runner = random.Random(3), FakeRunner(CONFIG)
    blocks = chance.sample(range(64), 64)
    running: dict[int, Stream] = {}
    streams: list[Stream] = []
    for step in range(600):
        begun, freed = [], []
        for slot in range(8):
            if slot not in running or len(running[slot].said) == 20:
                own = chance.sample(blocks[8 * slot : 8 * slot + 8], 8)
                stream = Stream(slot, len(streams), chance.choices(range(500), k=chance.randint(1, 8)), own)
                streams.append(stream)
                running[slot] = stream
                freed += own
                begun.append(begin(slot, stream.prompt, own[:2], number=stream.number, seed=stream.number))
        chosen = [stream for stream in running.values() if chance.random() < 0.7]
        rows = [stream.row(chance) for stream in chosen]
        grown = []
        for stream, row in zip(chosen, rows, strict=True):
            if row[1] + row[2] > 4 * stream.num_given:
                grown.append((stream.slot, stream.blocks[stream.num_given]))
                stream.num_given += 1
        result = run(runner, plan(step, rows, begun=begun, grown=grown, freed=freed))
        for stream, row, token in zip(chosen, rows, result.tokens.tolist(), strict=True):
            stream.computed += row[2]
            assert (token >= 0) == row[3]
            stream.said += [token] if row[3] else []
    assert len(streams) > 100
    for stream in streams:
        assert stream.said == runner.truth(stream.prompt, len(stream.said), seed=stream.number)


def test_a_scripted_length_ends_with_eos() -> None:
    runner = FakeRunner(CONFIG)
    runner.script("r0", 0, 3)
    tokens = generate(runner, begin(0, PROMPT, range(5)), 5)
    assert tokens[2] == CONFIG.eos_ids[0] and 0 not in tokens[:2] + tokens[3:]
    assert tokens[:3] == runner.truth(PROMPT, 5, request_id="r0")
    assert tokens == runner.truth(PROMPT, 5, request_id="r0", stop_at_eos=False)


def test_a_script_counts_from_the_prompt_also_after_a_replay() -> None:
    runner = FakeRunner(CONFIG)
    runner.script("r0", 0, 5)
    right = runner.truth(PROMPT, 9, request_id="r0")
    again = begin(0, PROMPT + right[:3], range(5), num_prompt=12)
    assert generate(runner, again, 2) == right[3:]


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_a_script_of_no_tokens_is_refused(num_tokens: int) -> None:
    with pytest.raises(InvalidInput):
        FakeRunner(CONFIG).script("r0", 0, num_tokens)


def test_eos_falls_as_often_as_asked_and_truth_knows() -> None:
    runner = FakeRunner(CONFIG, eos_probability=0.1)
    lengths = [len(runner.truth([token], 1000)) for token in range(1, 300)]
    assert 8 < sum(lengths) / len(lengths) < 12
    tokens = generate(runner, begin(0, PROMPT, range(16)), 40)
    assert tokens == runner.truth(PROMPT, 40, stop_at_eos=False)
    assert 0 in tokens


def test_a_masked_row_takes_the_first_allowed_id_from_its_token_on() -> None:
    free = FakeRunner(CONFIG).truth(PROMPT, 1)[0]
    for allowed, expected in (
        ({free, free + 1}, free),
        ({free - 1, free + 3}, free + 3),
        ({free - 1}, free - 1),
        ({499}, 499),
        ({0}, 0),
    ):
        made = first_plan()
        runner = FakeRunner(CONFIG)
        runner.launch(plan(0, [(0, 0, 12, True)], begun=made.begun, masked=[0]))
        runner.sample(0, masks({0: allowed}))
        assert runner.collect().tokens.tolist() == [expected]


def test_a_masked_stream_equals_its_truth() -> None:
    def rule(said: Sequence[int]) -> set[int]:
        return {5, 100, 200, 300, 400} if len(said) % 2 else {50, 250, 450}

    runner = FakeRunner(CONFIG)
    said: list[int] = []
    made = first_plan()
    rows: list[Row] = [(0, 0, 12, True)]
    for step in range(5):
        result = run(runner, plan(step, rows, begun=() if step else made.begun, masked=[0]), masks({0: rule(said)}))
        said.append(int(result.tokens[0]))
        rows = [(0, 12 + step, 1, True)]
    assert said == runner.truth(PROMPT, 5, masks=rule)


@pytest.mark.parametrize("given", [None, masks({}), masks({1: {3}}), masks({0: set()})])
def test_a_masked_row_without_an_allowed_id_fails_alone(given: Masks | None) -> None:
    runner = FakeRunner(CONFIG)
    run(runner, first_plan(slots=2))
    result = run(runner, next_plan(1, 12, slots=2, masked=[0]), given)
    assert result.statuses.tolist() == [RowStatus.MASK, RowStatus.OK]
    assert result.tokens.tolist() == [-1, runner.truth(PROMPT, 2)[1]]


def test_bits_beyond_the_vocabulary_allow_nothing() -> None:
    runner = FakeRunner(CONFIG)
    result = run(runner, plan(0, [(0, 0, 12, True)], begun=first_plan().begun, masked=[0]), masks({0: {505}}))
    assert result.statuses.tolist() == [RowStatus.MASK]


def test_two_plans_fly_and_the_second_uses_tokens_nobody_has_seen() -> None:
    runner, tokens = FakeRunner(CONFIG, depth=2), []
    runner.launch(first_plan())
    runner.sample(0, None)
    for step in range(1, 5):
        runner.launch(next_plan(step, 11 + step))
        tokens.append(int(runner.collect().tokens[0]))
        runner.sample(step, None)
    tokens.append(int(runner.collect().tokens[0]))
    assert tokens == runner.truth(PROMPT, 5)


def test_more_plans_than_depth_are_refused() -> None:
    runner = FakeRunner(CONFIG)
    runner.launch(first_plan())
    runner.sample(0, None)
    with pytest.raises(RunnerFailed, match="1 in flight already"):
        runner.launch(next_plan(1, 12))


def test_a_launch_before_the_last_plan_is_sampled_is_refused() -> None:
    runner = FakeRunner(CONFIG, depth=2)
    runner.launch(first_plan())
    with pytest.raises(RunnerFailed, match="step 1 is launched before step 0 is sampled"):
        runner.launch(next_plan(1, 12))


def test_sampling_out_of_order_or_twice_is_refused() -> None:
    runner = FakeRunner(CONFIG, depth=2)
    with pytest.raises(RunnerFailed, match="step 0 is sampled"):
        runner.sample(0, None)
    runner.launch(first_plan())
    with pytest.raises(RunnerFailed, match="step 1 is sampled"):
        runner.sample(1, None)
    runner.sample(0, None)
    with pytest.raises(RunnerFailed, match="step 0 is sampled"):
        runner.sample(0, None)


def test_collecting_nothing_or_before_sampling_is_refused() -> None:
    runner = FakeRunner(CONFIG)
    with pytest.raises(RunnerFailed, match="nothing is in flight"):
        runner.collect()
    runner.launch(first_plan())
    with pytest.raises(RunnerFailed, match="before it is sampled"):
        runner.collect()


def test_more_rows_than_slots_are_refused() -> None:
    with pytest.raises(RunnerFailed, match="9 rows for 8 slots"):
        FakeRunner(CONFIG).launch(next_plan(0, 0, slots=9))


def test_a_closed_runner_is_unusable() -> None:
    runner = FakeRunner(CONFIG)
    runner.close()
    for call in (runner.load, runner.collect, lambda: runner.launch(first_plan()), lambda: runner.export_blocks([])):
        with pytest.raises(RunnerFailed, match="closed"):
            call()


def test_a_plan_without_rows_only_moves_blocks() -> None:
    runner = FakeRunner(CONFIG)
    result = run(runner, plan(0, freed=[1, 2]))
    assert result.tokens.tolist() == [] and result.elapsed_s == CONFIG.profile.c0_s


def test_a_step_costs_what_its_rows_weigh_whatever_the_plan_says() -> None:
    profile = CostProfile(c0_s=1.0, c_in_s=10.0, c_out_s=100.0, c_kv_s=1000.0, c_att_s=10000.0)
    runner = FakeRunner(CONFIG, profile=profile)
    run(runner, first_plan())
    rows: list[Row] = [(0, 12, 1, True), (1, 0, 8, False)]
    result = run(runner, plan(1, rows, begun=[begin(1, PROMPT, [9, 10, 11])]))
    assert result.elapsed_s == 1.0 + 10.0 * 8 + 100.0 + 1000.0 * (13 + 8) + 10000.0 * 8 * 8


def test_speed_and_profile_may_drift() -> None:
    runner = FakeRunner(CONFIG, profile=CostProfile(1.0, 0.0, 0.0, 0.0, 0.0), speed=2.0)
    assert run(runner, first_plan()).elapsed_s == 2.0
    runner.speed = 0.5
    assert run(runner, next_plan(1, 12)).elapsed_s == 0.5
    runner.profile = CostProfile(3.0, 0.0, 0.0, 0.0, 0.0)
    assert run(runner, next_plan(2, 13)).elapsed_s == 1.5


def test_jitter_is_bounded_and_repeats_with_its_seed() -> None:
    def costs(seed: int) -> list[float]:
        runner = FakeRunner(CONFIG, profile=CostProfile(1.0, 0.0, 0.0, 0.0, 0.0), jitter=0.1, seed=seed)
        return [run(runner, plan(step)).elapsed_s for step in range(50)]

    assert costs(1) == costs(1) != costs(2)
    assert all(0.9 <= cost <= 1.1 for cost in costs(1)) and len(set(costs(1))) > 40


def test_plans_in_flight_are_ready_one_after_another() -> None:
    clock = Hand()
    runner = FakeRunner(CONFIG, profile=CostProfile(1.0, 0.0, 0.0, 0.0, 0.0), depth=2, clock=clock)
    assert runner.next_ready_s == math.inf
    clock.time_s = 10.0
    runner.launch(first_plan())
    runner.sample(0, None)
    clock.time_s = 10.25
    runner.launch(next_plan(1, 12))
    assert runner.next_ready_s == 11.0
    clock.time_s = 11.0
    runner.collect()
    assert runner.next_ready_s == 12.0
    runner.sample(1, None)
    runner.collect()
    clock.time_s = 20.0
    runner.launch(next_plan(2, 13))
    assert runner.next_ready_s == 21.0


def test_real_time_waits_until_the_step_is_done() -> None:
    runner = FakeRunner(CONFIG, profile=CostProfile(0.02, 0.0, 0.0, 0.0, 0.0), sleep=True)
    began_s = time.monotonic()
    run(runner, first_plan())
    run(runner, next_plan(1, 12))
    assert time.monotonic() - began_s >= 0.04


def test_blocks_move_between_runners() -> None:
    here, there = FakeRunner(CONFIG), FakeRunner(CONFIG)
    first = run(here, first_plan()).tokens.tolist()
    there.import_blocks([50, 20, 30], here.export_blocks([0, 1, 2]))
    moved = begin(4, PROMPT + first, [50, 20, 30, 9], num_computed=12, num_prompt=12)
    assert generate(there, moved, 4) == here.truth(PROMPT, 5)[1:]


def test_without_cells_ends_come_by_script_and_no_token_is_eos() -> None:
    runner = FakeRunner(CONFIG, cells=False)
    runner.script("r1", 0, 3)
    tokens = [run(runner, first_plan(slots=2)).tokens.tolist()]
    tokens += [run(runner, next_plan(step, 11 + step, slots=2)).tokens.tolist() for step in range(1, 4)]
    assert [pair[1] for pair in tokens] == [1, 1, 0, 1]
    assert [pair[0] for pair in tokens] == [1, 1, 1, 1]


def test_without_cells_a_row_that_does_not_sample_has_no_token() -> None:
    runner = FakeRunner(CONFIG, cells=False)
    rows: list[Row] = [(0, 0, 8, False), (1, 0, 12, True)]
    result = run(runner, plan(0, rows, begun=[begin(0, PROMPT, []), begin(1, PROMPT, [])]))
    assert result.tokens.tolist() == [-1, 1]
    assert result.elapsed_s > CONFIG.profile.c0_s


def test_without_cells_masks_hold() -> None:
    runner = FakeRunner(CONFIG, cells=False)
    run(runner, first_plan(slots=2))
    result = run(runner, next_plan(1, 12, slots=2, masked=[0, 1]), masks({1: {44}}))
    assert result.tokens.tolist() == [-1, 44]
    assert result.statuses.tolist() == [RowStatus.MASK, RowStatus.OK]


def test_without_cells_there_are_no_blocks_to_move() -> None:
    with pytest.raises(InvalidInput):
        FakeRunner(CONFIG, cells=False).export_blocks([1])


def test_a_vocabulary_of_ends_is_refused() -> None:
    with pytest.raises(InvalidInput, match="eos_ids"):
        FakeRunner(replace(CONFIG, vocab_size=2, eos_ids=(0, 1)))
    with pytest.raises(InvalidInput, match="eos_probability"):
        FakeRunner(replace(CONFIG, eos_ids=()), eos_probability=0.5)
