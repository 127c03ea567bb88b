"""A worker's state only goes forward, and its beats tell what it gave."""

import pytest

from headrace.core.messages import WorkerState
from headrace.worker.lifecycle import Lifecycle
from tests.unit.worker.rig import card


def test_each_change_of_state_is_heard_once() -> None:
    life, heard = Lifecycle(card()), []
    life.listen(lambda: heard.append(life.state))
    for state in (WorkerState.VERIFYING, WorkerState.READY, WorkerState.READY, WorkerState.DRAINING):
        life.enter(state)
    assert heard == [WorkerState.VERIFYING, WorkerState.READY, WorkerState.DRAINING]


def test_there_is_no_way_back() -> None:
    life = Lifecycle(card())
    life.enter(WorkerState.DRAINING)
    with pytest.raises(AssertionError):
        life.enter(WorkerState.READY)
    life.enter(WorkerState.FAILED, "why")
    with pytest.raises(AssertionError):
        life.enter(WorkerState.GONE)
    assert life.note == "why"


def test_progress_starts_anew_with_each_state() -> None:
    life = Lifecycle(card())
    life.report(7.0, "weights")
    assert (life.beat(0.0, {}).progress, life.beat(0.0, {}).note) == (1.0, "weights")
    life.enter(WorkerState.VERIFYING)
    assert (life.beat(0.0, {}).progress, life.beat(0.0, {}).note) == (0.0, "")


def test_service_is_told_once() -> None:
    life = Lifecycle(card())
    life.serve({"a": 1.0, "b": 2.0})
    life.serve({"a": 0.5})
    beat = life.beat(0.25, life.take_service())
    assert beat.service == {"a": 1.5, "b": 2.0} and beat.step_age_s == 0.25
    assert life.take_service() == {}
