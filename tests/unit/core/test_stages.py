"""Stages sum to wall time, whatever the clock does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.stages import Stage, StageClock

MOVES = st.lists(st.tuples(st.sampled_from(Stage), st.floats(0.0, 1e6)), max_size=30)


def test_each_stage_gets_the_time_it_owned() -> None:
    clock = StageClock(Stage.RECEIVE, 10.0)
    clock.enter(Stage.PREFILL, 11.5)
    clock.enter(Stage.DECODE, 12.0)
    clock.enter(Stage.PREFILL, 13.0)
    assert clock.close(17.0) == {Stage.RECEIVE: 1.5, Stage.PREFILL: 4.5, Stage.DECODE: 1.0}


def test_a_clock_that_goes_back_counts_as_still() -> None:
    clock = StageClock(Stage.RECEIVE, 10.0)
    clock.enter(Stage.PREFILL, 8.0)
    clock.enter(Stage.DECODE, 9.0)
    assert clock.close(12.0) == {Stage.RECEIVE: 0.0, Stage.PREFILL: 0.0, Stage.DECODE: 2.0}


@given(MOVES)
def test_stages_sum_to_wall_time_even_when_the_clock_goes_back(moves: list[tuple[Stage, float]]) -> None:
    clock = StageClock(Stage.RECEIVE, 5.0)
    for stage, now_s in moves:
        clock.enter(stage, now_s)
    seconds = clock.close(2.0)
    assert all(spent >= 0.0 for spent in seconds.values())
    latest_s = max([5.0, *(now_s for _, now_s in moves)])
    assert sum(seconds.values()) == pytest.approx(latest_s - 5.0, rel=1e-9, abs=1e-6)


def test_closing_twice_adds_nothing_twice() -> None:
    clock = StageClock(Stage.ROUTE, 0.0)
    assert clock.close(3.0) == clock.close(3.0) == {Stage.ROUTE: 3.0}
