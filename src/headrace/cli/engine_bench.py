"""`headrace bench engine`: a load of random prompts through the engine and the model, and where the time went.

Owns loads, clocks and figures. All requests are there at the start, greedy, without an end of their own.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.core.request import Request, SamplingParams, Tier

if TYPE_CHECKING:
    from headrace.cli.local import LocalModel
    from headrace.cli.step_trace import StepTrace
    from headrace.core.event import StepFrame

_PATIENCE_S = 1e6
_MOST_REQUESTS = 100_000


class Load(Struct, frozen=True):
    """`requests` prompts, lengths uniform between the bounds."""

    name: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]


NAMED = {
    "prefill": Load("prefill", 4, (512, 512), (1, 1)),
    "decode1": Load("decode1", 1, (16, 16), (128, 128)),
    "decode8": Load("decode8", 8, (16, 16), (128, 128)),
    "decode16": Load("decode16", 16, (16, 16), (128, 128)),
    "decode32": Load("decode32", 32, (16, 16), (128, 128)),
    "single": Load("single", 1, (128, 128), (256, 256)),
    "batch64": Load("batch64", 64, (128, 128), (256, 256)),
    "batch256": Load("batch256", 256, (128, 128), (256, 256)),
    "mixed256": Load("mixed256", 256, (100, 1024), (100, 1024)),
}


class Split(Struct, frozen=True):
    """Seconds of all steps: making and applying plans, the forward pass, waiting for it, sampling, handing out."""

    plan_s: float
    launch_s: float
    wait_s: float
    sample_s: float
    emit_s: float


class Percentiles(Struct, frozen=True):
    p50: float
    p95: float
    p99: float


class EngineFigures(Struct, frozen=True):
    load: Load
    seconds: float
    steps: int
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Percentiles
    itl_s: Percentiles | None
    preemptions: int
    split: Split


def parse_load(text: str) -> Load:
    """A name, or REQUESTS:PROMPT:OUTPUT where a length is N or LOW-HIGH."""
    if text in NAMED:
        return NAMED[text]
    try:
        requests, prompt, output = text.split(":")
        load = Load(text, int(requests), _span(prompt), _span(output))
    except ValueError:
        names = ", ".join(NAMED)
        raise InvalidInput(f"{text[:80]!r} is no load: {names}, or REQUESTS:PROMPT:OUTPUT", param="--load") from None
    if not 1 <= load.requests <= _MOST_REQUESTS or min(load.prompt[0], load.output[0]) < 1:
        raise InvalidInput(f"{text[:80]!r}: every number of a load must be at least 1", param="--load")
    return load


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    bounds = (int(low), int(high or low))
    if bounds[0] > bounds[1]:
        raise ValueError
    return bounds


@dataclass(slots=True)
class _Tally:
    """When each sequence was given which of its tokens."""

    started_s: float
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: int = 0

    def take(self, frame: StepFrame) -> None:
        now_s = time.perf_counter()
        for number in frame.numbers.tolist():
            before_s = self.last_s.get(number)
            if before_s is None:
                self.first_s[number] = now_s - self.started_s
            else:
                self.gaps_s.append(now_s - before_s)
            self.last_s[number] = now_s
        self.tokens += len(frame.numbers)
        self.ended += len(frame.ended)


def run_load(local: LocalModel, load: Load, seed: int = 0, trace: StepTrace | None = None) -> EngineFigures:
    """Everything is submitted, then the clock starts with the first turn. A `trace` is told of every turn."""
    engine, times = local.engine, local.times
    requests = make_requests(load, local.config.vocab_size, local.config.context_len, seed)
    before = (times.steps, times.launch_s, times.sample_s, times.wait_s, engine.num_preemptions)
    for request in requests:
        engine.submit(request, local.clock.now_s())
    tally = _Tally(time.perf_counter())
    turns_s = emit_s = 0.0
    while not engine.idle:
        since_s = time.perf_counter()
        frame = engine.turn(local.clock.now_s())
        turned_s = time.perf_counter()
        tally.take(frame)
        told_s = time.perf_counter()
        turns_s += turned_s - since_s
        emit_s += told_s - turned_s
        if trace is not None:
            trace.turn(since_s, turned_s, told_s)
    seconds = time.perf_counter() - tally.started_s
    if tally.ended != len(requests):
        raise InvalidInput(f"{len(requests) - tally.ended} sequences did not end", param="--load")
    prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    launch_s, sample_s, wait_s = (
        times.launch_s - before[1],
        times.sample_s - before[2],
        times.wait_s - before[3],
    )
    return EngineFigures(
        load=load,
        seconds=seconds,
        steps=times.steps - int(before[0]),
        prompt_tokens=prompt_tokens,
        output_tokens=tally.tokens,
        output_tokens_per_s=tally.tokens / seconds,
        total_tokens_per_s=(tally.tokens + prompt_tokens) / seconds,
        ttft_s=_percentiles(list(tally.first_s.values())),
        itl_s=_percentiles(tally.gaps_s) if tally.gaps_s else None,
        preemptions=engine.num_preemptions - int(before[4]),
        split=Split(turns_s - launch_s - sample_s - wait_s, launch_s, wait_s, sample_s, emit_s),
    )


def make_requests(load: Load, vocab_size: int, context_len: int, seed: int) -> list[Request]:
    """Prompts share nothing, so that the prefix cache cannot flatter."""
    chance = random.Random(seed)
    if load.prompt[1] + load.output[1] > context_len:
        raise InvalidInput(f"the load needs a context of {load.prompt[1] + load.output[1]}", param="--load")
    return [
        Request(
            request_id=f"{load.name}-{index}",
            tenant="bench",
            prompt_ids=tuple(chance.choices(range(vocab_size), k=chance.randint(*load.prompt))),
            max_tokens=chance.randint(*load.output),
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            tier=Tier.BATCH,
            ttft_target_s=_PATIENCE_S,
            queue_timeout_s=_PATIENCE_S,
        )
        for index in range(load.requests)
    ]


def _percentiles(values: list[float]) -> Percentiles:
    return Percentiles(*(float(value) for value in np.percentile(values, [50, 95, 99])))
