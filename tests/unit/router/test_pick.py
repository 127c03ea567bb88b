"""The choice among replicas: room first, then the least work."""

import numpy as np
import pytest

from headrace.core.event import EngineLoad
from headrace.router.pick import DOWN, pick, room, score

pytestmark = pytest.mark.unit


def test_the_least_loaded_is_picked_and_a_tie_goes_to_the_first() -> None:
    assert pick([score(2.0), score(0.5), score(0.5)]) == 1
    assert pick(np.array([score(2.0), score(3.0), score(0.5)])) == 2


def test_of_equal_work_the_fewest_sequences_decide_and_of_unequal_they_do_not() -> None:
    assert pick([score(0.0, 2), score(0.0, 3), score(0.0, 1)]) == 2
    assert pick([score(0.1, 0), score(0.09, 1000)]) == 1


def test_room_is_worth_more_than_little_work_where_one_waits() -> None:
    assert pick([score(0.001, 6), score(30.0, 31, waits=False), score(0.0005, 4)]) == 1
    assert pick(np.array([score(0.001, 6), score(30.0, 31, waits=False), DOWN])) == 1


def test_work_decides_among_those_with_room() -> None:
    assert pick([score(0.3, waits=False), score(0.2, 9, waits=False), score(0.2, 8, waits=False)]) == 2
    assert pick([score(0.1, 0, waits=False), score(0.09, 1000, waits=False)]) == 1


def test_a_wait_is_in_seconds_so_that_others_can_be_weighed_against_it() -> None:
    saved_s = 0.2
    assert pick([score(0.1) - saved_s, score(5.0, waits=False)]) == 0
    assert pick([score(0.3) - saved_s, score(5.0, waits=False)]) == 1


def load(*, waiting: int = 0, free_slots: int = 4, free_blocks: int = 60) -> EngineLoad:
    return EngineLoad(0.0, 0.0, waiting, 4 - free_slots, free_slots, free_blocks, 60 - free_blocks, 60)


def test_there_is_room_where_newcomers_find_slots_and_blocks_after_who_waits() -> None:
    assert room(load()) == 60
    assert room(load(free_blocks=7)) == 7
    assert room(load(free_slots=0)) == 0
    assert room(load(free_slots=1, waiting=1)) == 0
    assert room(load(free_slots=2, waiting=1)) == 30


def test_there_is_room_for_all_newcomers_or_for_none() -> None:
    assert room(load(), newcomers=4) == 15
    assert room(load(), newcomers=5) == 0
    assert room(load(waiting=1), newcomers=4) == 0


def test_what_is_down_is_never_picked() -> None:
    assert pick([DOWN, score(9.0)]) == 1
    assert pick([DOWN, DOWN]) is None
    assert pick([]) is None
