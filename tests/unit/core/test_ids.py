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
