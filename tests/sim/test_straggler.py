"""A short reply never waits for a long one, and a freed slot is used in the very next step."""

import pytest

from tests.builders import Rig, engine_config, request


def _shorts_beside(long_tokens: int, depth: int) -> tuple[list[int], list[float]]:
    """Steps and seconds from admission to end of 31 five-token replies beside one long one."""
    config = engine_config(slots=32, blocks=4000, context_len=6000)
    rig = Rig(config, depth=depth, checked=False)
    rig.submit(request("long", 16, long_tokens))
    shorts = [rig.submit(request(f"s{i}", 16, 5)) for i in range(31)]
    admitted: dict[int, int] = {}
    started_s: dict[int, float] = {}
    steps: dict[int, int] = {}
    while len(steps) < 31:
        frame = rig.step()
        for planned in rig.plans[-depth:]:
            for start in planned.begun:
                admitted.setdefault(start.number, planned.step)
                started_s.setdefault(start.number, rig.now_s)
        for event in frame.ended:
            steps[event.number] = frame.step - admitted[event.number] + 1
    rig.run()
    rig.assert_true()
    return [steps[number] for number in shorts], [rig.end_times[number] for number in shorts]


@pytest.mark.parametrize("depth", [1, 2])
def test_short_replies_end_within_their_own_five_steps(depth: int) -> None:
    steps, _ = _shorts_beside(500, depth)
    assert steps == [5] * 31


@pytest.mark.parametrize("depth", [1, 2])
def test_the_long_ones_length_does_not_move_the_shorts_p99(depth: int) -> None:
    ends = {length: sorted(_shorts_beside(length, depth)[1])[30] for length in (50, 500, 5000)}
    one_step_s = 0.0132
    assert max(ends.values()) - min(ends.values()) < one_step_s


@pytest.mark.parametrize("depth", [1, 2])
def test_a_slot_freed_by_length_is_used_in_the_next_step(depth: int) -> None:
    rig = Rig(engine_config(slots=1), depth=depth)
    first = rig.submit(request("first", 4, 3))
    second = rig.submit(request("second", 4, 3))
    rig.run()
    began = {start.number: planned.step for planned in rig.plans for start in planned.begun}
    assert began == {first: 0, second: 3}
    rig.assert_true()


@pytest.mark.parametrize(("depth", "later"), [(1, 1), (2, 2)])
def test_a_slot_freed_by_an_unforeseen_stop_is_used_one_plan_later_per_depth(depth: int, later: int) -> None:
    rig = Rig(engine_config(slots=1), depth=depth)
    rig.submit(request("first", 4, 30), output=3)
    second = rig.submit(request("second", 4, 3))
    rig.run()
    began = {start.number: planned.step for planned in rig.plans for start in planned.begun}
    assert began[second] == 2 + later
    rig.assert_true()
