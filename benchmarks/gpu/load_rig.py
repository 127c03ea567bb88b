"""Runners of random weights for loads, and a drive: it brings requests to an engine in real time and notes what it says.

The drive proves on the way that every request is told its tokens in order and its end once. On a CPU the same runner
runs a tiny shape over the plain reference of its kernels: that proves the loads, not the figures.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from throughput import SHAPES
from throughput import open_runner as open_on_card

from headrace.core.clock import SystemClock
from headrace.core.config import EngineConfig
from headrace.core.errors import Refused
from headrace.core.event import Ended, Outcome, StepFrame
from headrace.core.hashing import chain_blocks, chain_root
from headrace.core.plan import Plan, StepResult
from headrace.core.request import Request, SamplingParams
from headrace.engine.loop import Engine
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.weights import random_weights
from headrace.weights.shape import ModelShape
from headrace.worker.timed import TimedRunner
from headrace.worker.warmup import SCENES, measure_profile

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
# Asked by whoever must not be refused: longer than any queue here.
PATIENT_S = 1e6
_QUICK = ModelShape("llama", 64, 2, 4, 2, 16, 96, 307, 4096, 1e-5, 1e4)
_QUICK_SLOTS, _QUICK_BLOCKS, _QUICK_STEP_TOKENS = 16, 800, 256
_NAP_S = 0.0005


@dataclass(slots=True, frozen=True)
class Bench:
    """Where loads run. `quick`: on a CPU, tiny."""

    quick: bool

    def say(self, line: str) -> None:
        print(line, flush=True)

    @contextmanager
    def open(self, name: str, *, exact: bool = False, context: int = 8192) -> Iterator[tuple[CudaRunner, EngineConfig]]:
        """A warm runner of that shape, and the configuration of an engine for it with its measured profile."""
        self.say(f"  opening {name}{', row-exact' if exact else ''}, context {context}")
        if self.quick:
            runner, config = _open_quick(context)
        else:
            runner, config, _ = open_on_card(SHAPES[name], self.say, exact, context)
        try:
            yield runner, config
        finally:
            runner.close()
            gc.unfreeze()
            gc.collect()
            if not self.quick:
                torch.cuda.empty_cache()


def _open_quick(context: int) -> tuple[CudaRunner, EngineConfig]:
    """In float32: sums in another order hardly ever change a token."""
    config = EngineConfig(
        slots=_QUICK_SLOTS,
        blocks=_QUICK_BLOCKS,
        block_size=16,
        context_len=min(context, _QUICK.context_len),
        vocab_size=_QUICK.vocab_size,
        eos_ids=(),
        max_step_tokens=_QUICK_STEP_TOKENS,
        max_queue_s=PATIENT_S,
    )
    runner = CudaRunner(config, _QUICK, random_weights(), ReferenceOps(), HostLane(), dtype=torch.float32)
    runner.load()
    return runner, replace(config, profile=measure_profile(runner, config, SCENES))


class ChunkWatch(TimedRunner):
    """Remembers how many prompt tokens each step computed, how long it was to take and took, and how many chunks ended
    before their prompt did."""

    def __init__(self, runner: CudaRunner) -> None:
        super().__init__(runner, SystemClock())
        self.chunks: list[int] = []
        # (tokens, positions they looked at, predicted ms, ms on the device)
        self.steps: list[tuple[int, int, float, float]] = []
        self.num_cut = 0
        self._plans: deque[Plan] = deque()

    def launch(self, plan: Plan) -> None:
        super().launch(plan)
        self._plans.append(plan)
        if plan.work.prefill_tokens:
            self.chunks.append(plan.work.prefill_tokens)
            self.num_cut += int(np.count_nonzero(~plan.samples))

    def collect(self) -> StepResult:
        result, plan = super().collect(), self._plans.popleft()
        if plan.work.prefill_tokens:
            times = round(1e3 * plan.predicted_s, 3), round(1e3 * result.elapsed_s, 3)
            self.steps.append((plan.work.prefill_tokens, plan.work.attended, *times))
        return result


@dataclass(slots=True)
class Stream:
    """What one request was told, and when. `due_s` is when its client sent it, be the engine busy or not."""

    request: Request
    due_s: float
    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    num_scores: int = 0
    num_prompt_scores: int = 0
    ended: Ended | None = None

    @property
    def ttft_s(self) -> float:
        return self.at_s[0] - self.due_s

    @property
    def is_whole(self) -> bool:
        """Finished by length, with every token of it."""
        count = len(self.request.replay_ids) + len(self.tokens)
        return self.ended is not None and self.ended.outcome is Outcome.FINISHED and count == self.request.max_tokens


class Drive:
    """`wrong` says in words what the engine told that it must not tell."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.streams: dict[int, Stream] = {}
        self.num_refused = 0
        self.wrong: list[str] = []
        self._clock = SystemClock()
        # An idle engine proves its accounts: now, not while a clock runs.
        engine.turn(self.now_s())
        gc.collect()
        gc.freeze()

    def now_s(self) -> float:
        return self._clock.now_s()

    def submit(self, request: Request, due_s: float | None = None) -> int | None:
        """The sequence's number; None when it was refused."""
        now_s = self.now_s()
        try:
            number = self.engine.submit(request, now_s)
        except Refused:
            self.num_refused += 1
            return None
        self.streams[number] = Stream(request, now_s if due_s is None else due_s)
        return number

    def turn(self) -> StepFrame:
        frame = self.engine.turn(self.now_s())
        now_s, streams = self.now_s(), self.streams
        rows = zip(frame.numbers.tolist(), frame.indices.tolist(), frame.tokens.tolist(), strict=True)
        for number, index, token in rows:
            stream = streams.get(number)
            if stream is None or stream.ended is not None:
                self.wrong.append(f"sequence {number} is told a token and has ended, or never was")
                continue
            if index != len(stream.request.replay_ids) + len(stream.tokens):
                self.wrong.append(f"sequence {number} is told token {index} after {len(stream.tokens)}")
            stream.tokens.append(token)
            stream.at_s.append(now_s)
        if frame.scores is not None:
            self._note_scores(frame)
        for ended in frame.ended:
            self._end(ended)
        return frame

    def run(self, arrivals: Sequence[tuple[float, Request]]) -> float:
        """Requests at their times, counted from now, until all have ended; returns how long that took."""
        began_s = self.now_s()
        coming = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        while coming or not self.engine.idle:
            now_s = self.now_s() - began_s
            while coming and coming[0][0] <= now_s:
                due_s, request = coming.popleft()
                self.submit(request, began_s + due_s)
            if self.engine.idle and coming:
                time.sleep(_NAP_S)
                continue
            self.turn()
        return self.now_s() - began_s

    def run_steps(self, stream: Stream, steps: int) -> None:
        """Until the stream has so many tokens more."""
        until = len(stream.tokens) + steps
        while len(stream.tokens) < until and stream.ended is None:
            self.turn()

    def _note_scores(self, frame: StepFrame) -> None:
        assert frame.scores is not None
        for number, position in zip(frame.scores.owners.tolist(), frame.scores.positions.tolist(), strict=True):
            stream = self.streams.get(number)
            if stream is None:
                self.wrong.append(f"sequence {number} is told a score and never was")
            elif position < len(stream.request.prompt_ids):
                stream.num_prompt_scores += 1
            else:
                stream.num_scores += 1

    def _end(self, ended: Ended) -> None:
        stream = self.streams.get(ended.number)
        if stream is None or stream.ended is not None:
            self.wrong.append(f"sequence {ended.number} ends twice, or never was")
            return
        stream.ended = ended
        if ended.outcome is Outcome.FAILED:
            self.wrong.append(f"sequence {ended.number} failed: {ended.reason} {ended.message}")


def gaps_s(streams: Sequence[Stream], after_s: float = 0.0, until_s: float = np.inf) -> NDArray[np.float64]:
    """Times between two tokens of a stream, of all streams, where the second came within the bounds."""
    found = []
    for stream in streams:
        at_s = np.array(stream.at_s)
        found.append(np.diff(at_s)[(at_s[1:] > after_s) & (at_s[1:] <= until_s)])
    return np.concatenate(found)


def percentiles_ms(values: Any) -> dict[str, float]:
    found = 1e3 * np.percentile(np.asarray(values), [50, 95, 99, 100])
    return dict(zip(("p50", "p95", "p99", "max"), found.round(3).tolist(), strict=True))


def hashed(request: Request, salt: bytes = b"salt") -> Request:
    """As its gateway would send it, so that it reads and feeds the prefix cache."""
    root = chain_root(salt=salt, version="version")
    return replace(request, prefix_root=root, block_hashes=chain_blocks(root, request.prompt_ids, 16))
