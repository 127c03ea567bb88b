import random

import pytest

from headrace.core.ids import are_below, packed

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_all_ids_are_looked_at_however_many_they_are(count: int) -> None:
    chance = random.Random(count)
    good = (*(chance.randrange(100) for _ in range(count - 1)), 99)
    assert are_below(good, 100)
    assert are_below(list(good), 100)
    for wrong in (-1, 100, 2**31, 2**32 + 5, -(2**63), 2**63, 2**64, 2**64 + 5, -(2**64)):
        place = chance.randrange(count)
        assert not are_below((*good[:place], wrong, *good[place + 1 :]), 100)


def test_no_ids_are_within_every_vocabulary() -> None:
    assert are_below((), 1)


def test_packed_ids_are_the_ids() -> None:
    ids = (5, -1, 2**40, 0)
    assert packed(ids).tolist() == list(ids)


def test_ids_that_may_change_are_packed_each_time() -> None:
    ids = [1, 2, 3]
    assert packed(ids).tolist() == [1, 2, 3]
    ids[0] = 7
    assert packed(ids).tolist() == [7, 2, 3]


def test_ids_are_kept_for_one_more_look() -> None:
    ids = (4, 5, 6)
    first = packed(ids)
    assert packed(ids) is first
    assert packed(ids) is not first
    assert packed((7, 8)).tolist() == [7, 8]
    assert packed(ids).tolist() == [4, 5, 6]
