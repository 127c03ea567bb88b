"""Sees steps that hang. A wrapped runner notes which step is the oldest in flight; another thread looks at it.

Owns the bound: max(2 s, 4 x predicted), of time in which those who compute had the cores they asked for. What is done about a
hung step is not known here.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from headrace.core.errors import OutOfRoom
from headrace.core.plan import Masks, Plan, StepResult
from headrace.core.ports import Clock, Runner
from headrace.worker.vigil import Vigil

log = logging.getLogger("headrace.worker")

LOOK_S = 0.25
_LEAST_S = 2.0
_FACTOR = 4.0
# Whoever computes in circles waits for cores, too, where others want them.
_MOST_EXCUSED_S = 30.0


class WatchedRunner:
    """Meets the contract of `Runner` by passing every call on; `oldest` may be read by any thread."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._in_flight: deque[tuple[int, float]] = deque()
        # Step, predicted seconds, and when the device could begin it.
        self.oldest: tuple[int, float, float] | None = None

    @property
    def depth(self) -> int:
        return self._runner.depth

    def age_s(self, now_s: float) -> float:
        oldest = self.oldest
        return 0.0 if oldest is None else max(0.0, now_s - oldest[2])

    def load(self) -> None:
        self._runner.load()

    def warm_up(self) -> None:
        self._runner.warm_up()

    def launch(self, plan: Plan) -> None:
        self._in_flight.append((plan.step, plan.predicted_s))
        if len(self._in_flight) == 1:
            self._begin_oldest()
        try:
            self._runner.launch(plan)
        except OutOfRoom as error:
            log.warning("step %d is tried again in smaller ones: %s", plan.step, error.message)
            self._in_flight.pop()
            if not self._in_flight:
                self.oldest = None
            raise

    def sample(self, step: int, masks: Masks | None) -> None:
        self._runner.sample(step, masks)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        self._in_flight.popleft()
        self._begin_oldest()
        return result

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        return self._runner.export_blocks(blocks)

    def import_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        self._runner.import_blocks(blocks, payload)

    def close(self) -> None:
        self._runner.close()

    def _begin_oldest(self) -> None:
        self.oldest = (*self._in_flight[0], self._clock.now_s()) if self._in_flight else None


class Watchdog:
    def __init__(self, interval_s: float, waited_s: Callable[[], float]) -> None:
        """`waited_s`: how long threads that compute have waited for cores, all taken together. Asked only of a step that is
        seen again."""
        self._vigil = Vigil(interval_s)
        self._waited_s = waited_s
        self._seen: tuple[int, float, float] | None = None
        self._excused_s = 0.0
        self._last_waited_s: float | None = None

    def look(self, oldest: tuple[int, float, float] | None, now_s: float) -> str:
        """Why the oldest step counts as hung, or nothing."""
        before_s = self._vigil.watched_s
        watched_s = self._vigil.look(now_s)
        if oldest is not self._seen:
            self._seen = oldest
            self._vigil.restart()
            self._excused_s, self._last_waited_s = 0.0, None
            return ""
        if oldest is None:
            return ""
        self._excuse(watched_s - before_s)
        step, predicted_s, _ = oldest
        bound_s = max(_LEAST_S, _FACTOR * predicted_s)
        is_hung = watched_s - min(self._excused_s, _MOST_EXCUSED_S) > bound_s
        return f"step {step} has run for more than {bound_s:.1f} s" if is_hung else ""

    def _excuse(self, passed_s: float) -> None:
        """Of what passed since the last look, what its threads waited for a core: one of them is enough to hold up a step."""
        waited_s = self._waited_s()
        if self._last_waited_s is not None:
            self._excused_s += min(max(waited_s - self._last_waited_s, 0.0), passed_s)
        self._last_waited_s = waited_s
