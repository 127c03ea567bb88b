"""The engine's loop: plans in flight, masks, aborts, pauses, where time went, one end for each sequence."""

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import pytest

from headrace.core.config import EngineConfig, TenantConfig
from headrace.core.errors import InvalidInput, NotFound, RunnerFailed
from headrace.core.event import Outcome
from headrace.core.plan import Masks
from headrace.core.request import Admission, Request, SamplingParams, Tier
from headrace.engine.loop import Engine
from headrace.engine.sequence import Phase
from headrace.runner.fake import FakeRunner
from headrace.runner.faults import Faults
from tests.builders import Rig, engine_config, prompt, request

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
VOCAB = 1000


def allowed_after(said: Sequence[int]) -> Collection[int]:
    """About one id in seven, which ones depends on the last token and how many there were."""
    last = said[-1] if said else 3
    return range((last * 5 + len(said)) % 7 + 1, VOCAB, 7)


class Grammar:
    """A mask source that knows only what it was told; `silent` sequences get no mask."""

    def __init__(self, rule: Callable[[Sequence[int]], Collection[int]] = allowed_after) -> None:
        self.rule = rule
        self.said: dict[int, list[int]] = {}
        self.silent: set[int] = set()
        self.asked: list[int] = []

    def masks(self, rows: Sequence[int], numbers: Sequence[int]) -> Masks:
        self.asked += numbers
        pairs = [(row, number) for row, number in zip(rows, numbers, strict=True) if number not in self.silent]
        bits = np.zeros((len(pairs), 32 * 32), np.uint8)
        for place, (_, number) in enumerate(pairs):
            bits[place, list(self.rule(self.said.get(number, [])))] = 1
        words = np.packbits(bits, axis=1, bitorder="little").view("<u4")
        return Masks(np.array([row for row, _ in pairs], np.int32), words.astype(np.uint32))

    def advance(self, number: int, token: int) -> None:
        self.said.setdefault(number, []).append(token)


def masked(name: str, length: int = 8, max_tokens: int = 12, **others: object) -> Request:
    return request(name, length, max_tokens, sampling=SamplingParams(seed=4, masked=True), **others)  # type: ignore[arg-type]


def masked_truth(rig: Rig, number: int, rule: Callable[[Sequence[int]], Collection[int]] = allowed_after) -> list[int]:
    made = rig.requests[number]
    assert made.max_tokens is not None
    return rig.runner.truth(made.prompt_ids, made.max_tokens, seed=4, request_id=made.request_id, masks=rule)


@DEPTHS
def test_masked_streams_obey_their_masks_beside_plain_ones(depth: int) -> None:
    rig = Rig(engine_config(slots=4, max_step_tokens=16), depth=depth, masks=Grammar())
    bound = [rig.submit(masked(f"m{index}", 5 + 3 * index)) for index in range(4)]
    plain = [rig.submit(request(f"p{index}", 5 + 2 * index)) for index in range(4)]
    rig.run()
    assert all(rig.tokens[number] == masked_truth(rig, number) for number in bound)
    assert all(rig.tokens[number] == rig.truth(number) for number in plain)
    for number in bound:
        said = rig.tokens[number]
        assert all(token in allowed_after(said[:index]) for index, token in enumerate(said))


@DEPTHS
def test_masks_follow_a_stream_through_pauses_and_preemption(depth: int) -> None:
    rig = Rig(engine_config(slots=4, blocks=12), depth=depth, masks=Grammar())
    numbers = [rig.submit(masked(f"m{index}", 8, 30)) for index in range(5)]
    for step in range(400):
        if rig.engine.idle:
            break
        if step % 5 == 1:
            rig.plan()
            rig.engine.pause(numbers[step % 4], rig.now_s)
        if step % 5 == 3:
            for number in numbers:
                rig.engine.resume(number, rig.now_s)
        rig.step()
    for number in numbers:
        rig.engine.resume(number, rig.now_s)
    rig.run()
    assert rig.engine.num_preemptions > 0
    assert all(rig.tokens[number] == masked_truth(rig, number) for number in numbers)


@DEPTHS
def test_a_row_without_a_mask_fails_alone(depth: int) -> None:
    grammar = Grammar()
    rig = Rig(depth=depth, masks=grammar)
    numbers = [rig.submit(masked(name)) for name in "xyz"]
    rig.step()
    rig.step()
    grammar.silent.add(numbers[1])
    rig.run()
    assert (rig.ended[numbers[1]].outcome, rig.ended[numbers[1]].reason) == (Outcome.FAILED, "mask")
    for number in numbers:
        assert rig.tokens[number] == masked_truth(rig, number)[: len(rig.tokens[number])]
    assert [len(rig.tokens[number]) for number in (numbers[0], numbers[2])] == [12, 12]
    assert 2 <= len(rig.tokens[numbers[1]]) <= 3


@DEPTHS
def test_a_mask_that_allows_nothing_fails_its_row_alone(depth: int) -> None:
    def dead_end(said: Sequence[int]) -> Collection[int]:
        return () if len(said) == 5 else allowed_after(said)

    rig = Rig(depth=depth, masks=Grammar(dead_end))
    number, other = rig.submit(masked("x")), rig.submit(request("y"))
    rig.run()
    assert rig.ended[number].reason == "mask" and len(rig.tokens[number]) == 5
    assert rig.tokens[other] == rig.truth(other)


@DEPTHS
def test_without_a_mask_source_only_masked_rows_fail(depth: int) -> None:
    rig = Rig(depth=depth)
    number, other = rig.submit(masked("x")), rig.submit(request("y"))
    rig.run()
    assert rig.ended[number].reason == "mask" and rig.tokens[number] == []
    assert rig.tokens[other] == rig.truth(other)


@DEPTHS
def test_no_mask_is_asked_for_what_has_ended(depth: int) -> None:
    grammar = Grammar()
    rig = Rig(depth=depth, masks=grammar)
    number = rig.submit(masked("x"))
    rig.step()
    rig.plan()
    rig.engine.abort(number, rig.now_s)
    asked = len(grammar.asked)
    rig.run()
    assert len(grammar.asked) == asked
    assert rig.engine.load().used_blocks == 0


def _waiting(rig: Rig, number: int) -> None:
    assert not rig.plans


def _prefill(rig: Rig, number: int) -> None:
    rig.step()


def _decode(rig: Rig, number: int) -> None:
    while len(rig.tokens[number]) < 3:
        rig.step()


def _launched(rig: Rig, number: int) -> None:
    _decode(rig, number)
    rig.plan()


def _paused(rig: Rig, number: int) -> None:
    _decode(rig, number)
    rig.engine.pause(number, rig.now_s)


def _resumed(rig: Rig, number: int) -> None:
    _paused(rig, number)
    rig.engine.resume(number, rig.now_s)


def _leaving(rig: Rig, number: int) -> None:
    while number in [int(held) for held in rig.engine.slot_numbers] or not rig.plans:
        if rig.plan() is None:
            rig.step()


PHASES = [
    (_waiting, Phase.WAITING),
    (_prefill, Phase.RUNNING),
    (_decode, Phase.RUNNING),
    (_launched, Phase.RUNNING),
    (_paused, Phase.PAUSED),
    (_resumed, Phase.WAITING),
    (_leaving, Phase.LEAVING),
]


@DEPTHS
@pytest.mark.parametrize(("reach", "phase"), PHASES)
def test_an_abort_frees_slot_and_blocks_within_one_step(
    reach: Callable[[Rig, int], None], phase: Phase, depth: int
) -> None:
    rig = Rig(engine_config(slots=4, blocks=1024, max_step_tokens=24), depth=depth)
    number = rig.submit(request("x", length=40, max_tokens=8, tier=Tier.BATCH))
    reach(rig, number)
    assert rig.engine.phase_of(number) is phase
    known = len(rig.tokens[number])
    assert rig.engine.abort(number, rig.now_s)
    assert number not in rig.engine.slot_numbers
    for _ in range(max(1, rig.engine.in_flight)):
        rig.step()
    assert (rig.ended[number].outcome, rig.ended[number].reason) == (Outcome.ABORTED, "aborted")
    assert rig.engine.load().used_blocks == 0
    assert len(rig.tokens[number]) == known
    assert not rig.engine.abort(number, rig.now_s)


@DEPTHS
def test_an_aborted_sequences_slot_goes_to_the_next(depth: int) -> None:
    rig = Rig(engine_config(slots=1), depth=depth)
    first, second = (rig.submit(request(name, max_tokens=50)) for name in "xy")
    rig.step()
    rig.engine.abort(first, rig.now_s)
    planned = rig.plan()
    assert planned is not None and [start.number for start in planned.begun] == [second]
    rig.run()
    rig.assert_true()


def test_nobody_knows_what_was_never_there() -> None:
    rig = Rig()
    for act in (rig.engine.abort, rig.engine.withdraw, rig.engine.pause, rig.engine.resume):
        assert not act(7, 0.0)
    with pytest.raises(NotFound):
        rig.engine.phase_of(7)


@DEPTHS
@pytest.mark.parametrize("block_size", [0, 4])
@pytest.mark.parametrize("at", range(6))
def test_a_pause_changes_no_token(depth: int, block_size: int, at: int) -> None:
    rig = Rig(engine_config(slots=2, max_step_tokens=10), depth=depth)
    number = rig.submit(request("x", length=18, max_tokens=8, block_size=block_size))
    rig.submit(request("y", length=5, max_tokens=20))
    for _ in range(at):
        rig.step()
    assert rig.engine.pause(number, rig.now_s) and not rig.engine.pause(number, rig.now_s)
    assert number not in rig.engine.slot_numbers
    rig.run()
    assert number not in rig.ended and rig.engine.load().used_blocks == 0
    assert rig.engine.resume(number, rig.now_s) and not rig.engine.resume(number, rig.now_s)
    rig.run()
    rig.assert_true()


@DEPTHS
@pytest.mark.parametrize("block_size", [0, 4])
@pytest.mark.parametrize("at", range(6))
def test_a_pause_that_ends_at_once_changes_no_token(depth: int, block_size: int, at: int) -> None:
    """At depth 2 its rows are still in flight when it may run again."""
    rig = Rig(engine_config(slots=2, max_step_tokens=10), depth=depth)
    number = rig.submit(request("x", length=18, max_tokens=8, block_size=block_size))
    for _ in range(at):
        rig.step()
    rig.plan()
    rig.engine.pause(number, rig.now_s)
    rig.engine.resume(number, rig.now_s)
    rig.run()
    rig.assert_true()


def test_a_resumed_sequence_stands_before_those_that_never_ran() -> None:
    rig = Rig(engine_config(slots=1, ageing_s=1e-3))
    first, second = (rig.submit(request(name, max_tokens=9)) for name in "xy")
    rig.step()
    rig.engine.pause(first, rig.now_s)
    rig.engine.resume(first, rig.now_s)
    planned = rig.plan()
    assert planned is not None and [start.number for start in planned.begun] == [first]
    rig.run()
    assert rig.end_times[first] < rig.end_times[second]


def test_a_paused_sequence_gives_its_slot_to_others() -> None:
    rig = Rig(engine_config(slots=1))
    paused, other = (rig.submit(request(name)) for name in "xy")
    rig.step()
    rig.engine.pause(paused, rig.now_s)
    rig.run()
    assert rig.ended[other].outcome is Outcome.FINISHED and rig.engine.idle
    assert rig.engine.phase_of(paused) is Phase.PAUSED


def test_what_is_leaving_cannot_be_paused() -> None:
    rig = Rig()
    number = rig.submit(request("x", max_tokens=1))
    rig.plan()
    assert not rig.engine.pause(number, rig.now_s)
    rig.run()
    rig.assert_true()


def total_s(rig: Rig, number: int) -> float:
    waits = rig.ended[number].waits
    parts = [getattr(waits, name) for name in waits.__struct_fields__]
    assert min(parts) >= -1e-12
    return math.fsum(parts)


@DEPTHS
def test_the_parts_of_a_stay_sum_to_it_when_it_finishes(depth: int) -> None:
    rig = Rig(engine_config(slots=3, blocks=14, max_step_tokens=10), depth=depth)
    arrivals: dict[int, float] = {}
    for index in range(14):
        made = request(f"r{index}", 5 + index, 12, tenant="ab"[index % 2], tier=Tier(index % 4), block_size=4)
        arrivals[rig.submit(made, output=12 - index % 3)] = rig.now_s
        rig.step()
    rig.run()
    assert rig.engine.num_preemptions > 0
    for number, arrival_s in arrivals.items():
        assert total_s(rig, number) == pytest.approx(rig.end_times[number] - arrival_s, rel=1e-9)
    waits = [ended.waits for ended in rig.ended.values()]
    for name in ("wait_capacity_s", "prefill_s", "decode_s", "preempted_s"):
        assert sum(getattr(one, name) for one in waits) > 0.0, name


@DEPTHS
@pytest.mark.parametrize("reach", [reach for reach, _ in PHASES])
def test_the_parts_of_a_stay_sum_to_it_when_it_is_aborted(reach: Callable[[Rig, int], None], depth: int) -> None:
    rig = Rig(engine_config(slots=4, blocks=1024, max_step_tokens=24), depth=depth)
    rig.clock.time_s = 1.25
    number = rig.submit(request("x", length=40, max_tokens=8, tier=Tier.BATCH))
    reach(rig, number)
    rig.clock.time_s += 0.003
    rig.engine.abort(number, rig.now_s)
    rig.take(rig.engine.take_events(rig.now_s))
    assert total_s(rig, number) == pytest.approx(rig.now_s - 1.25, rel=1e-9)


@DEPTHS
def test_time_paused_is_told_apart(depth: int) -> None:
    rig = Rig(engine_config(slots=1), depth=depth)
    number = rig.submit(request("x", max_tokens=6))
    rig.engine.pause(number, rig.now_s)
    rig.clock.time_s += 2.0
    rig.engine.resume(number, rig.now_s)
    rig.step()
    rig.step()
    rig.engine.pause(number, rig.now_s)
    rig.run()
    rig.clock.time_s += 3.0
    rig.engine.resume(number, rig.now_s)
    rig.run()
    assert rig.ended[number].waits.paused_s == pytest.approx(5.0, abs=0.05)
    assert total_s(rig, number) == pytest.approx(rig.end_times[number], rel=1e-9)
    rig.assert_true()


def test_a_wait_for_slots_is_capacity_and_a_wait_for_others_is_fairness() -> None:
    rig = Rig(engine_config(slots=1))
    rig.submit(request("first", max_tokens=10, tenant="a"))
    rig.step()
    rig.engine.observe_service("z", 100.0)
    last = rig.submit(request("last", max_tokens=2, tenant="z"))
    for index in range(5):
        rig.submit(request(f"a{index}", max_tokens=1, tenant="a"))
    rig.run()
    waits = rig.ended[last].waits
    assert waits.wait_capacity_s > 0.0 and waits.wait_fairness_s > 0.0
    alone = Rig(engine_config(slots=1))
    alone.submit(request("first", max_tokens=10))
    second = alone.submit(request("second", max_tokens=2))
    alone.run()
    assert alone.ended[second].waits.wait_fairness_s == 0.0
    assert alone.ended[second].waits.wait_capacity_s == pytest.approx(0.1, rel=0.2)


@DEPTHS
def test_as_many_plans_are_in_flight_as_the_runner_takes(depth: int) -> None:
    rig = Rig(depth=depth)
    rig.submit(request("x", max_tokens=10))
    planned = [rig.plan() for _ in range(3)]
    assert [plan is not None for plan in planned] == [True, depth == 2, False]
    assert rig.engine.in_flight == depth


def test_a_turn_is_one_iteration_of_a_worker() -> None:
    config = engine_config()
    engine = Engine(config, FakeRunner(config, depth=2))
    number = engine.submit(request("x", max_tokens=5), 0.0)
    frames = []
    while not engine.idle:
        frames.append(engine.turn(0.0))
    tokens = [event.token for frame in frames for event in frame.events()]
    assert tokens == FakeRunner(config).truth(request("x").prompt_ids, 5, seed=request("x").sampling.seed)
    assert [ended.number for frame in frames for ended in frame.ended] == [number]
    assert engine.turn(0.0).step == -1


def test_ends_that_no_step_brought_are_told_in_the_next_frame() -> None:
    rig = Rig()
    number = rig.submit(request("x"))
    rig.engine.abort(number, rig.now_s)
    assert not rig.engine.idle
    told = [[ended.number for ended in rig.engine.take_events(rig.now_s).ended] for _ in range(2)]
    assert told == [[number], []]


def test_load_says_what_a_router_needs() -> None:
    rig = Rig(engine_config(slots=2, blocks=32))
    for name in "xyz":
        rig.submit(request(name, length=8, max_tokens=6))
    waiting = rig.engine.load()
    assert (waiting.waiting, waiting.running, waiting.free_slots, waiting.used_blocks) == (3, 0, 2, 0)
    assert waiting.queue_s > 0.0 and waiting.running_s == 0.0
    rig.step()
    busy = rig.engine.load()
    assert (busy.waiting, busy.running, busy.free_slots, busy.used_blocks) == (1, 2, 0, 4)
    assert 0.0 < busy.queue_s < waiting.queue_s and busy.running_s > 0.0
    assert busy.free_blocks + busy.used_blocks == busy.total_blocks == 32
    rig.run()
    idle = rig.engine.load()
    assert (idle.queue_s, idle.running_s, idle.waiting, idle.running, idle.free_blocks) == (0.0, 0.0, 0, 0, 32)


def test_an_engine_that_could_not_run_is_not_made() -> None:
    config = EngineConfig(slots=0)
    with pytest.raises(InvalidInput, match=r"engine\.slots"):
        Engine(config, FakeRunner(engine_config()))


@pytest.mark.parametrize("at", ["launch", "collect"])
def test_the_death_of_the_device_is_told(at: str) -> None:
    faults = Faults()
    faults.die(2, at=at)
    rig = Rig(faults=faults)
    rig.submit(request("x"))
    with pytest.raises(RunnerFailed):
        rig.run()
    assert rig.plans[-1].step <= 2


@DEPTHS
def test_tokens_under_load_are_the_tokens_alone(depth: int) -> None:
    """Chunks, a shared prefix, guaranteed and elastic, memory too small for all."""
    rig = Rig(engine_config(slots=6, blocks=26, max_step_tokens=20), depth=depth)
    base = prompt(9, 1)
    for index in range(30):
        ids = base + prompt(1 + index % 7, index) if index % 3 else prompt(5 + index, index)
        admission = Admission(index % 5 == 0)
        made = request(
            f"r{index}", ids=ids, max_tokens=5 + index % 20, block_size=4, admission=admission, tenant="ab"[index % 2]
        )
        rig.submit(made, output=3 + index % 9 if index % 2 else None)
    rig.run()
    assert rig.engine.num_preemptions > 0
    assert sum(ended.counters.prompt_cached for ended in rig.ended.values()) > 0
    assert all(ended.outcome is Outcome.FINISHED for ended in rig.ended.values())
    rig.assert_true()


def test_a_step_that_was_waited_for_ends_when_it_was_done() -> None:
    rig = Rig()
    number = rig.submit(request("a", 8, 2))
    assert rig.plan() is not None
    rig.clock.time_s = 0.5
    rig.engine.wait()
    rig.engine.wait()
    rig.take(rig.engine.end(0.5))
    rig.run()
    assert rig.ended[number].waits.prefill_s == pytest.approx(0.5)
    rig.assert_true()


def test_tenants_that_clash_are_refused_and_change_nothing() -> None:
    rig = Rig(engine_config(slots=2, tenants=[TenantConfig("a", max_slots=0, max_blocks=0)]))
    with pytest.raises(InvalidInput):
        rig.engine.set_tenants((TenantConfig("a", reserved_slots=3),))
    with pytest.raises(InvalidInput, match="guaranteed"):
        rig.submit(request("one", admission=Admission.GUARANTEED))
    rig.engine.set_tenants(())
    rig.submit(request("two", admission=Admission.GUARANTEED))
    rig.run()
    assert rig.engine.take_service().keys() == {"a"}
    assert rig.engine.take_service() == {}
