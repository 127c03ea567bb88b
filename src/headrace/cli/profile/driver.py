"""Drives an engine step by step and times its steps by a clock. Knows what a step computed, not what it means."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.errors import RunnerFailed
from headrace.core.event import Outcome, StepFrame
from headrace.core.plan import Work
from headrace.core.ports import Clock
from headrace.core.request import Request
from headrace.engine.loop import Engine


@dataclass(slots=True, frozen=True)
class TimedStep:
    """`seconds` since the step before it ended, or since something was submitted to an idle engine: the engine's own
    work and everything else that a token waits for is in it."""

    work: Work
    seconds: float
    frame: StepFrame


class Driver:
    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._works: deque[Work] = deque()
        self._since_s = clock.now_s()

    @property
    def num_preemptions(self) -> int:
        return self._engine.num_preemptions

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """To an idle engine."""
        assert not self._works, "what was submitted before is still at work"
        self._since_s = self._clock.now_s()
        return self._engine.submit_all(requests, self._since_s)

    def step(self) -> TimedStep | None:
        """Fill the pipeline and wait for the oldest step; None when nothing can run. RunnerFailed if a row fails."""
        while self._engine.begin(self._clock.now_s()):
            plan = self._engine.last_plan
            assert plan is not None
            self._works.append(plan.work)
        if not self._works:
            return None
        self._engine.wait()
        frame = self._engine.end(self._clock.now_s())
        now_s = self._clock.now_s()
        step = TimedStep(self._works.popleft(), now_s - self._since_s, frame)
        self._since_s = now_s
        for ended in frame.ended:
            if ended.outcome is Outcome.FAILED:
                raise RunnerFailed(f"a sequence failed: {ended.message or ended.reason}")
        return step

    def clear(self, numbers: Sequence[int]) -> None:
        """Abort what is left of these, and let what is in flight land."""
        for number in numbers:
            self._engine.abort(number, self._clock.now_s())
        while self.step() is not None:
            pass
        self._engine.take_events(self._clock.now_s())
