"""The least-work choice among replicas."""

import numpy as np
import pytest

from headrace.router.pick import DOWN, pick, score

pytestmark = pytest.mark.unit


def test_the_least_loaded_is_picked_and_a_tie_goes_to_the_first() -> None:
    assert pick([score(2.0), score(0.5), score(0.5)]) == 1
    assert pick(np.array([score(2.0), score(3.0), score(0.5)])) == 2


def test_of_equal_work_the_fewest_sequences_decide_and_of_unequal_they_do_not() -> None:
    assert pick([score(0.0, 2), score(0.0, 3), score(0.0, 1)]) == 2
    assert pick([score(0.1, 0), score(0.09, 1000)]) == 1


def test_what_is_down_is_never_picked() -> None:
    assert pick([DOWN, score(9.0)]) == 1
    assert pick([DOWN, DOWN]) is None
    assert pick([]) is None
