"""Memory is given back when nobody waits, and only when there may be something to give back."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from headrace.cli.sweep import Sweep, settled


class Ring:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """It comes only when it is called."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def rings(count: int) -> "weakref.ref[Ring]":
    made = [Ring() for _ in range(count)]
    return weakref.ref(made[0])


def test_garbage_goes_when_it_was_idle_twice_in_a_row() -> None:
    sweep, first = Sweep(), rings(2000)
    assert not sweep.tick(True) and first() is not None
    assert sweep.tick(True) and first() is None


def test_while_somebody_waits_nothing_is_swept() -> None:
    sweep, _ = Sweep(), rings(2000)
    assert [sweep.tick(is_idle) for is_idle in (True, False, True, True)] == [False, False, False, True]


def test_what_was_seen_at_work_is_swept_whatever_it_left() -> None:
    sweep = Sweep()
    assert [sweep.tick(is_idle) for is_idle in (True, True, False, True, True, True)] == [False] * 4 + [True, False]


def test_it_is_not_swept_again_before_something_was_done() -> None:
    sweep, _ = Sweep(), rings(2000)
    assert [sweep.tick(True) for _ in range(4)] == [False, True, False, False]
    rings(2000)
    assert sweep.tick(True)


def test_what_outlived_a_collection_is_swept_as_well() -> None:
    sweep, ring = Sweep(), Ring()
    gc.collect(0)
    first = weakref.ref(ring)
    del ring
    assert not sweep.tick(True) and first() is not None
    assert sweep.tick(True) and first() is None


def test_what_is_alive_when_it_settles_is_looked_through_again_only_afterwards() -> None:
    before, ring = gc.get_threshold(), rings(1)
    with settled(1234, 5, 6):
        assert gc.get_threshold() == (1234, 5, 6) and ring() is None  # it was garbage already
        alive = Ring()
        inner = weakref.ref(alive)
        with settled(99):
            del alive
            gc.collect()
            assert inner() is not None and gc.get_threshold()[0] == 99
        gc.collect()
        assert inner() is None and gc.get_threshold() == (1234, 5, 6)
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
