"""Where an engine's time goes: runners that keep watch over the calls to another one.

What is left of a turn after launch, sample and wait is planning and applying.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.plan import Masks, Plan, StepResult, Work
from headrace.core.ports import Clock, Runner


@dataclass(slots=True)
class StepTimes:
    """Seconds spent in each part of all steps so far."""

    steps: int = 0
    launch_s: float = 0.0
    sample_s: float = 0.0
    wait_s: float = 0.0


class TimedRunner:
    """Meets the contract of `Runner` by passing every call on."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self.times = StepTimes()

    @property
    def depth(self) -> int:
        return self._runner.depth

    def load(self) -> None:
        self._runner.load()

    def warm_up(self) -> None:
        self._runner.warm_up()

    def launch(self, plan: Plan) -> None:
        since_s = self._clock.now_s()
        self._runner.launch(plan)
        self.times.launch_s += self._clock.now_s() - since_s

    def sample(self, step: int, masks: Masks | None) -> None:
        since_s = self._clock.now_s()
        self._runner.sample(step, masks)
        self.times.sample_s += self._clock.now_s() - since_s

    def collect(self) -> StepResult:
        since_s = self._clock.now_s()
        result = self._runner.collect()
        self.times.wait_s += self._clock.now_s() - since_s
        self.times.steps += 1
        return result

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        return self._runner.export_blocks(blocks)

    def import_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        self._runner.import_blocks(blocks, payload)

    def close(self) -> None:
        self._runner.close()


class NotedRunner(TimedRunner):
    """For a few steps: notes in `seen` what each of them was, and how long it took."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        super().__init__(runner, clock)
        self.seen: list[tuple[Work, float]] = []
        self._in_flight: deque[Work] = deque()

    def launch(self, plan: Plan) -> None:
        super().launch(plan)
        self._in_flight.append(plan.work)

    def collect(self) -> StepResult:
        result = super().collect()
        self.seen.append((self._in_flight.popleft(), result.elapsed_s))
        return result
