"""The least-work router."""

import pytest

from headrace.sim.router import LeastWork

pytestmark = pytest.mark.unit


def test_the_least_loaded_is_picked_and_a_tie_goes_to_the_first() -> None:
    router = LeastWork(3)
    assert router.pick() is None
    for replica, work_s in enumerate((2.0, 0.5, 0.5)):
        router.report(replica, work_s)
    assert router.pick() == 1
    router.report(1, 3.0)
    assert router.pick() == 2
    router.report(2, 0.0, sequences=3)
    router.report(0, 0.0, sequences=2)
    assert router.pick() == 0


def test_a_removed_replica_is_not_picked_until_it_reports() -> None:
    router = LeastWork(2)
    router.report(0, 0.0)
    router.report(1, 9.0)
    router.remove(0)
    assert router.pick() == 1 and router.num_up == 1
    router.remove(1)
    assert router.pick() is None
    router.report(0, 0.0)
    assert router.pick() == 0
