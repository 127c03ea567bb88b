"""Time is booked to the call it was spent in, and calls arrive as they were made."""

import pytest

from headrace.core.plan import Plan, StepResult
from headrace.engine.cost import CostModel
from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from headrace.worker.timed import NotedRunner, TimedRunner
from tests.builders import engine_config, request


class _Hands:
    """A clock that only its owner moves."""

    time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


class _Slow(FakeRunner):
    hands = _Hands()

    def launch(self, plan: Plan) -> None:
        self.hands.time_s += 1.0
        super().launch(plan)

    def sample(self, step: int, masks: object) -> None:
        self.hands.time_s += 0.25
        super().sample(step, None)

    def collect(self) -> StepResult:
        self.hands.time_s += 3.0
        return super().collect()


def test_every_part_of_a_step_is_told_apart() -> None:
    config = engine_config()
    timed = TimedRunner(_Slow(config), _Slow.hands)
    engine = Engine(config, timed)
    engine.submit(request("x", 8, 4), 0.0)
    while not engine.idle:
        engine.turn(_Slow.hands.now_s())
    times = timed.times
    assert (times.steps, times.launch_s, times.sample_s, times.wait_s) == (4, 4.0, 1.0, 12.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_is_noted_with_its_work_and_its_time(depth: int) -> None:
    config = engine_config()
    noted = NotedRunner(FakeRunner(config, depth=depth), _Hands())
    engine = Engine(config, noted)
    engine.submit(request("x", 8, 4), 0.0)
    while not engine.idle:
        engine.turn(0.0)
    assert [(work.prefill_tokens, work.decode_rows) for work, _ in noted.seen][:4] == [(8, 0), (0, 1), (0, 1), (0, 1)]
    cost = CostModel(config.profile)
    assert [seconds for _, seconds in noted.seen] == [pytest.approx(cost.predict(work)) for work, _ in noted.seen]
