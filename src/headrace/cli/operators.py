"""Which of torch's operators, or of a card's kernels, a step's time goes to: torch's own profiler over a few turns.

Owns which turns are watched and the sums by name. The profiler slows what it watches: shares mean more than times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from headrace.cli.step_trace import TracedRunner
from headrace.engine.loop import Engine

if TYPE_CHECKING:
    from headrace.cli.local import LocalModel
    from headrace.core.ports import Clock
    from headrace.core.request import Request

# So many turns are watched, from where this share of a load's tokens was computed: where it is at its fullest.
WATCHED_TURNS = 8
MIDDLE = 0.4
_MOST_OPERATORS = 15
_OURS = "headrace: "


class Operator(Struct, frozen=True):
    """`self_s`: without what it called, over all turns watched."""

    name: str
    calls: int
    self_s: float
    share: float


class OperatorTimes(Struct, frozen=True):
    """`of`: what shares are shares of, and how many seconds that was."""

    turns: int
    of: str
    seconds: float
    operators: tuple[Operator, ...]


def watch_operators(
    local: LocalModel,
    requests: Sequence[Request],
    path: Path | None,
    *,
    passed: float = MIDDLE,
    turns: int = WATCHED_TURNS,
) -> OperatorTimes:
    """Run the load again as far as it takes, from where a share of its tokens is `passed`, and write the profiler's Chrome
    trace to `path`, our own calls marked in it."""
    from torch.profiler import ProfilerActivity, profile, record_function

    runner = TracedRunner(local.runner, local.clock, record_function)
    engine = Engine(local.config, runner)
    numbers = engine.submit_all(requests, local.clock.now_s())
    pass_by(passed, engine, runner, requests, local.clock)
    is_card = local.device == "cuda"
    watched = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if is_card else [ProfilerActivity.CPU]
    watched_turns = 0
    with profile(activities=watched, acc_events=True) as seen:
        since_s = time.perf_counter()
        while watched_turns < turns and not engine.idle:
            with record_function(f"{_OURS}turn"):
                engine.turn(local.clock.now_s())
            watched_turns += 1
        seconds = time.perf_counter() - since_s
    for number in numbers:
        engine.abort(number, local.clock.now_s())
    while not engine.idle:
        engine.turn(local.clock.now_s())
    if path is not None:
        seen.export_chrome_trace(str(path))
    return sum_operators(seen.key_averages(), watched_turns, seconds, on_card=is_card)


def pass_by(share: float, engine: Engine, runner: TracedRunner, requests: Sequence[Request], clock: Clock) -> None:
    """Turn until that share of the load's tokens is computed; at least once, so that the first step's own delays are over."""
    wanted = share * sum(len(request.prompt_ids) + (request.max_tokens or 0) for request in requests)
    computed = 0
    while computed < wanted and not engine.idle:
        engine.turn(clock.now_s())
        _, landed = runner.take()
        computed += sum(work.prefill_tokens + work.decode_rows for _, work, _ in landed)


def sum_operators(events: Sequence[Any], turns: int, seconds: float, *, on_card: bool) -> OperatorTimes:
    """On a card by its kernels' time, of all that they took; torch counts it for the operator that launched one as well,
    which is left out. Else by time in the calling thread, of all that passed: helper threads work beside it, and what
    is left of the time is Python's."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    counted = [
        event
        for event in events
        if not event.key.startswith(_OURS) and (not on_card or event.device_type == DeviceType.CUDA)
    ]
    micros = {
        event.key: float(event.self_device_time_total if on_card else event.self_cpu_time_total) for event in counted
    }
    calls = {event.key: int(event.count) for event in counted}
    whole_s = sum(micros.values()) / 1e6 if on_card else seconds
    order = sorted(micros, key=lambda name: -micros[name])[:_MOST_OPERATORS]
    operators = tuple(
        Operator(name, calls[name], micros[name] / 1e6, micros[name] / 1e6 / max(whole_s, 1e-12))
        for name in order
        if micros[name] > 0.0
    )
    return OperatorTimes(turns, "the device's time" if on_card else "the time that passed", whole_s, operators)
