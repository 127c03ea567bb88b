"""A device without memory for a step gets smaller ones: no token changes, nothing leaks, nobody pays for what was refused."""

import random

import pytest

from headrace.core.errors import RunnerFailed
from headrace.core.event import Outcome
from headrace.engine.room import StepRoom
from headrace.runner.faults import FaultRates, Faults
from tests.builders import Rig, engine_config, prompt, request

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def crowd(rig: Rig, count: int = 6, *, prompt_len: int = 20, output: int = 12) -> list[int]:
    return [rig.submit(request(f"r{i}", prompt_len + i, output, tenant="ab"[i % 2])) for i in range(count)]


def tokens_of(rig: Rig) -> list[int]:
    return [int(plan.counts.sum()) for plan in rig.plans]


@DEPTHS
@pytest.mark.parametrize("step", [0, 1, 5])
def test_a_step_without_room_is_taken_again_in_smaller_ones(depth: int, step: int) -> None:
    faults = Faults()
    faults.run_out(step, 3)
    rig = Rig(engine_config(slots=8), depth=depth, faults=faults)
    crowd(rig)
    rig.run()
    assert rig.engine.num_refused_plans > 0 and rig.engine.num_preemptions == 0
    assert all(ended.outcome is Outcome.FINISHED for ended in rig.ended.values())
    assert [plan.step for plan in rig.plans] == list(range(len(rig.plans)))
    assert int(rig.plans[step].counts.sum()) <= 3
    rig.assert_true()


@DEPTHS
def test_whoever_has_no_turn_in_a_short_step_gets_one_in_the_next(depth: int) -> None:
    faults = Faults()
    rig = Rig(engine_config(slots=8), depth=depth, faults=faults)
    numbers = crowd(rig, 4, prompt_len=4, output=40)
    while min(len(rig.tokens[number]) for number in numbers) < 4:
        rig.step()
    faults.run_out(lambda _: True, 2)
    rig.run()
    short = tokens_of(rig)[-20:]
    assert max(short) <= 2
    ends = [rig.end_times[number] for number in numbers]
    assert max(ends) - min(ends) < 0.25 * max(ends)
    rig.assert_true()


@DEPTHS
def test_prompts_come_to_their_turn_beside_rows_that_fill_a_short_step(depth: int) -> None:
    faults = Faults()
    rig = Rig(engine_config(slots=8), depth=depth, faults=faults)
    running = crowd(rig, 4, prompt_len=4, output=60)
    while min(len(rig.tokens[number]) for number in running) < 4:
        rig.step()
    faults.run_out(lambda _: True, 2)
    late = rig.submit(request("late", 8, 2))
    rig.run()
    assert rig.end_times[late] < min(rig.end_times[number] for number in running)
    rig.assert_true()


def test_the_refused_is_charged_to_nobody() -> None:
    faults = Faults()
    rig = Rig(engine_config(slots=8), faults=faults)
    crowd(rig)
    rig.step()
    levels: list[dict[str, float]] = []

    def is_first(_: int) -> bool:
        """Asked at every launch."""
        levels.append(rig.engine.service_levels())
        return len(levels) == 1

    faults.run_out(is_first, 0)
    rig.step()
    assert len(levels) > 1 and levels[0] == levels[1] != rig.engine.service_levels()


@DEPTHS
def test_a_sequence_that_fits_into_no_step_ends_alone(depth: int) -> None:
    faults = Faults()
    rig = Rig(engine_config(slots=8), depth=depth, faults=faults)
    numbers = crowd(rig)
    while len(rig.tokens[numbers[2]]) < 3:
        rig.step()
    faults.outgrow(numbers[2])
    rig.run()
    end = rig.ended[numbers[2]]
    assert (end.outcome, end.reason) == (Outcome.FAILED, "out_of_room") and "memory" in end.message
    assert all(rig.ended[number].outcome is Outcome.FINISHED for number in numbers if number != numbers[2])
    rig.assert_true()
    # The others are not held short for what was not their doing.
    rig.submit(request("next", 40, 2))
    rig.run()
    assert tokens_of(rig)[-2] == 40


def test_what_has_no_room_beside_the_step_in_flight_waits_for_its_end() -> None:
    faults = Faults()
    rig = Rig(engine_config(slots=8), depth=2, faults=faults)
    faults.run_out(lambda _: rig.engine.in_flight > 0, 0)
    crowd(rig)
    rig.run()
    assert rig.engine.num_refused_plans > 10
    assert all(ended.outcome is Outcome.FINISHED for ended in rig.ended.values())
    assert not rig.engine._scheduler.room.is_short, "alone, every step had room"
    rig.assert_true()


def test_with_room_for_nothing_a_request_ends_and_then_the_device_is_given_up() -> None:
    """Others may have one with room: what is left can go there."""
    faults = Faults()
    rig = Rig(faults=faults)
    crowd(rig, 3)
    faults.run_out(0, 0)
    with pytest.raises(RunnerFailed, match="no memory for a step of one token"):
        rig.run()
    assert [ended.reason for ended in rig.ended.values()] in ([], ["out_of_room"])


def test_who_finds_no_room_alone_ends_and_the_next_is_served() -> None:
    faults = Faults()
    rig = Rig(faults=faults)
    (lost,) = crowd(rig, 1)
    faults.run_out(0, 0)
    rig.run()
    assert rig.ended[lost].reason == "out_of_room"
    rig.runner.faults = None
    after = rig.submit(request("after", 8, 5))
    rig.run()
    assert rig.ended[after].outcome is Outcome.FINISHED
    rig.assert_true()


@DEPTHS
def test_who_waits_for_room_can_leave(depth: int) -> None:
    """Aborted, paused and withdrawn between a refusal and the next try; deadlines hold too."""
    faults = Faults()
    rig = Rig(engine_config(slots=8), depth=depth, faults=faults)
    numbers = crowd(rig)
    faults.run_out(lambda step: step < 6, 2)
    rig.step()
    rig.engine.abort(numbers[0], rig.now_s)
    rig.engine.pause(numbers[1], rig.now_s)
    rig.engine.abort(numbers[5], rig.now_s)
    rig.run()
    rig.engine.resume(numbers[1], rig.now_s)
    rig.run()
    assert len(rig.ended) == len(numbers)
    rig.assert_true()


@DEPTHS
@pytest.mark.parametrize("seed", range(6))
def test_chance_may_refuse_any_launch(depth: int, seed: int) -> None:
    """Little memory for KV too, shared prompts, aborts and unforeseen ends: every stream is what it would have been."""
    random_ = random.Random(seed)
    faults = Faults(FaultRates(room=0.3), seed=seed)
    rig = Rig(engine_config(slots=6, blocks=24), depth=depth, faults=faults)
    numbers: list[int] = []
    for i in range(24):
        ids = prompt(12, i % 3) + prompt(random_.randint(1, 20), 100 + i)
        made = request(f"r{i}", ids=ids, max_tokens=random_.randint(1, 16), tenant="abc"[i % 3])
        numbers.append(rig.submit(made, output=random_.choice([None, 3])))
        for _ in range(random_.randint(0, 3)):
            rig.step()
        if i % 7 == 3:
            rig.engine.abort(random_.choice(numbers), rig.now_s)
    rig.run()
    assert rig.engine.num_refused_plans > 5 and len(rig.ended) == len(numbers)
    rig.assert_true()


def test_the_bound_falls_at_once_and_rises_slowly() -> None:
    room = StepRoom(64)
    assert room.tokens == 64
    assert room.refused(40) and room.tokens == 20
    assert room.refused(15) and room.tokens == 7
    seen = []
    while room.is_short:
        room.launched()
        seen.append(room.tokens)
    assert seen[0] == 7 and sorted(set(seen)) == [7, 14, 28, 56, 64] and len(seen) >= 4 * 32
    assert not room.refused(1) and room.tokens == 1


def test_half_of_a_short_step_is_left_to_prompts() -> None:
    room = StepRoom(64)
    room.refused(17)
    assert (room.rows(is_awaited=False), room.rows(is_awaited=True)) == (8, 4)
    room.refused(2)
    assert room.rows(is_awaited=True) == 1
