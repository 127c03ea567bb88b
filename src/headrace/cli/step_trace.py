"""Where each turn of an engine's loop went, span by span, and that as a Chrome trace (chrome://tracing, Perfetto).

Owns the spans and the file's format. A turn is cut where the engine calls its runner: what lies before the wait for a
step is planning, what follows it is applying; handing out comes last. Times are seconds of one monotonic clock.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.core.plan import Masks, Plan, StepResult, Work
from headrace.core.ports import Clock, Runner
from headrace.worker.timed import TimedRunner

PARTS = ("plan", "launch", "sample", "wait", "apply", "emit")
# A trace that a browser still opens.
MOST_TURNS = 20_000
_LOOP, _FLIGHT = 1, 2

Mark = Callable[[str], AbstractContextManager[Any]]


def no_mark(name: str) -> AbstractContextManager[Any]:
    return nullcontext()


class Span(Struct, frozen=True):
    name: str
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class TracedRunner(TimedRunner):
    """Keeps the span of every call since they were last taken. `mark` shows calls to another profiler as well."""

    def __init__(self, runner: Runner, clock: Clock, mark: Mark = no_mark) -> None:
        super().__init__(runner, clock)
        self._mark = mark
        self._calls: list[Span] = []
        self._launched: dict[int, tuple[float, Work]] = {}
        self._landed: list[tuple[int, Work, Span]] = []

    def launch(self, plan: Plan) -> None:
        since_s = self._clock.now_s()
        with self._mark("headrace: launch"):
            super().launch(plan)
        self._keep("launch", since_s)
        self._launched[plan.step] = (since_s, plan.work)

    def sample(self, step: int, masks: Masks | None) -> None:
        since_s = self._clock.now_s()
        with self._mark("headrace: sample"):
            super().sample(step, masks)
        self._keep("sample", since_s)

    def collect(self) -> StepResult:
        since_s = self._clock.now_s()
        with self._mark("headrace: wait"):
            result = super().collect()
        self._keep("wait", since_s)
        begun_s, work = self._launched.pop(result.step)
        self._landed.append((result.step, work, Span("in flight", begun_s, self._clock.now_s())))
        return result

    def take(self) -> tuple[list[Span], list[tuple[int, Work, Span]]]:
        """The calls and the steps that landed since the last time."""
        taken = self._calls, self._landed
        self._calls, self._landed = [], []
        return taken

    def _keep(self, name: str, since_s: float) -> None:
        self._calls.append(Span(name, since_s, self._clock.now_s()))


@dataclass(slots=True)
class StepTrace:
    """The turns of one load. Sums cover all of them, spans the first `MOST_TURNS`."""

    runner: TracedRunner
    totals_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    num_turns: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def turn(self, start_s: float, turned_s: float, end_s: float) -> None:
        """One turn of the loop, just over: from its start until the engine was done, and until all was handed out."""
        calls, landed = self.runner.take()
        parts = [*cut(calls, start_s, turned_s), Span("emit", turned_s, end_s)]
        for part in parts:
            self.totals_s[part.name] += part.seconds
        self.num_turns += 1
        if self.num_turns > MOST_TURNS:
            return
        steps = [step for step, _, _ in landed]
        name = f"step {steps[0]}" if steps else "no step"
        work = landed[0][1] if landed else None
        self.events.append(_event(Span(name, start_s, end_s), _LOOP, work))
        self.events += [_event(part, _LOOP) for part in parts if part.seconds > 0.0]
        self.events += [
            _event(Span(f"step {step} in flight", span.start_s, span.end_s), _FLIGHT + step % self.runner.depth, work)
            for step, work, span in landed
        ]

    def write(self, path: Path, title: str) -> None:
        names = {_LOOP: "the engine's loop"}
        names |= {_FLIGHT + index: f"steps in flight {index + 1}" for index in range(self.runner.depth)}
        about = [_name("process_name", 0, title), *(_name("thread_name", tid, name) for tid, name in names.items())]
        write_trace(path, [*about, *self.events])


def cut(calls: Sequence[Span], start_s: float, end_s: float) -> Iterator[Span]:
    """The calls with what lies between them: no moment of the turn is left out, and none counts twice."""
    now_s, own = start_s, "plan"
    for call in calls:
        yield Span(own, now_s, call.start_s)
        yield call
        now_s, own = call.end_s, "apply" if call.name == "wait" else own
    yield Span(own, now_s, end_s)


def write_trace(path: Path, events: Sequence[dict[str, Any]]) -> None:
    try:
        path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise InvalidInput(f"--profile: {path}: {error.strerror or error}", param="--profile") from None


def _event(span: Span, track: int, work: Work | None = None) -> dict[str, Any]:
    """Complete events; times are microseconds."""
    times = {"ts": span.start_s * 1e6, "dur": span.seconds * 1e6}
    return {"name": span.name, "ph": "X", "pid": 1, "tid": track, **times, "args": {} if work is None else work}


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}
