"""Failures of a CUDA card, provoked: its memory is taken away while requests run, its driver is asked how it is, and a
kernel never ends. Random weights, no network.

usage: PYTHONPATH=src python benchmarks/gpu/failures.py [--only room,nvml,hang] [--shape 135m] [--json PATH]
What is wrong is said as `WRONG`, and makes the exit status 1. `--device cpu` proves the program itself, tiny, with errors
that are made up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from load_rig import GREEDY, PATIENT_S, Bench, Drive
from msgspec.structs import replace

from headrace.cluster.replicas import Replicas
from headrace.core.clock import SystemClock
from headrace.core.config import EngineConfig
from headrace.core.errors import NotFound
from headrace.core.messages import SubmitPart, WorkerCard
from headrace.core.plan import Plan, StepResult
from headrace.core.request import Request, SamplingParams
from headrace.engine.loop import Engine
from headrace.runner.cuda import prompt_scores
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.torch import sampler_scores
from headrace.transport.memory import MemoryNetwork
from headrace.worker.host import EXIT_HUNG, WorkerHost
from headrace.worker.mounting import MountedModel
from headrace.worker.nvml import find_device, words
from headrace.worker.timed import TimedRunner

SECTIONS = ("room", "nvml", "hang")
Row = dict[str, Any]
_MIB = 1 << 20
_LITTLE = 48 * _MIB
_HANG_S = 2.0
# Longer than anybody waits: hours of any card's clock.
_SPIN_CYCLES = 10**14


def check_room(bench: Bench, shape: str) -> Row:
    """The same crowd with the card's memory free, nearly and wholly taken, and free again."""
    with bench.open(shape, exact=True, context=4096) as (runner, config):
        crowd = _crowd(config, 8 if bench.quick else 96)
        truth = _told(runner, config, crowd, bench, "with room")[0]
        wrong = [f"{name} has no room from the start" for name, (_, end) in truth.items() if end != "length"]
        row: Row = {"requests": len(crowd)}
        for name, left in (("little", _LITTLE), ("none", 0), ("with room again", None)):
            with _short_of_memory(bench, left):
                before = _times_out_of_memory(bench)
                found, refused = _told(runner, config, crowd, bench, name)
                missed = _times_out_of_memory(bench) - before
            short = {name for name, (_, end) in found.items() if end == "out_of_room"}
            differ = [name for name in found.keys() - short if found[name] != truth[name]]
            wrong += [f"{name}: {each} was told something else" for each in differ]
            plain = {request.request_id for request in crowd if request.request_id.startswith("plain")}
            if short & plain or (short and name != "none"):
                wrong.append(f"{name}: {sorted(short)} failed for want of memory")
            if name == "none" and not (missed or refused or short):
                wrong.append("nothing ran out of memory although there was none: this proves nothing")
            row[name] = {
                "times_out_of_memory": missed,
                "plans_refused": refused,
                "failed_alone": len(short),
                "equal": len(found) - len(short),
            }
    row["wrong"] = wrong
    said = {name: row[name]["failed_alone"] for name in ("little", "none", "with room again")}
    row["text"] = f"{len(crowd)} requests; failed alone, all others as with room: {said}"
    return row


def _times_out_of_memory(bench: Bench) -> int:
    """How often torch could not give what it was asked for, since it began to count."""
    return 0 if bench.quick else torch.cuda.memory_stats()["num_ooms"]


def _crowd(config: EngineConfig, count: int) -> list[Request]:
    """Half of them sampled by graphs alone, half odd."""
    chance = np.random.default_rng(5)
    drawn = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)
    kinds = (
        ("plain greedy", GREEDY),
        ("scores", replace(GREEDY, logprobs=5)),
        ("plain drawn", drawn),
        ("penalties", replace(drawn, presence_penalty=0.5, repetition_penalty=1.1)),
        ("plain drawn too", drawn),
        ("prompt scores", replace(GREEDY, prompt_logprobs=2)),
    )
    requests = []
    for index in range(count):
        name, sampling = kinds[index % len(kinds)]
        prompt = tuple(chance.integers(0, config.vocab_size, int(chance.integers(20, 200))).tolist())
        requests.append(
            Request(
                f"{name} {index}",
                f"tenant {index % 3}",
                prompt,
                max_tokens=24,
                sampling=replace(sampling, seed=index),
                ttft_target_s=PATIENT_S,
                queue_timeout_s=PATIENT_S,
            )
        )
    return requests


def _told(
    runner: CudaRunner, config: EngineConfig, crowd: list[Request], bench: Bench, name: str
) -> tuple[dict[str, tuple[list[int], str]], int]:
    """Tokens and reason of the end of every request, and how many plans found no memory."""
    drive = Drive(Engine(config, runner))
    seconds = drive.run([(0.0, request) for request in crowd])
    drive.engine.check()
    bench.say(f"  {name}: {seconds:.1f} s, {drive.engine.num_refused_plans} plans refused")
    found = {
        stream.request.request_id: (stream.tokens, stream.ended.reason if stream.ended is not None else "never")
        for stream in drive.streams.values()
    }
    return found, drive.engine.num_refused_plans


@contextmanager
def _short_of_memory(bench: Bench, left: int | None) -> Iterator[None]:
    """All of the card but `left` bytes is taken; None: nothing is."""
    if left is None:
        yield
    elif bench.quick:
        with _choosy_scores(2 if left else 0):
            yield
    else:
        torch.cuda.empty_cache()
        ballast = []
        for size in (1 << 30, 64 * _MIB, 2 * _MIB):
            while torch.cuda.mem_get_info()[0] >= left + size:
                try:
                    ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        bench.say(f"  {torch.cuda.mem_get_info()[0] / _MIB:.0f} MiB of the card are left")
        try:
            yield
        finally:
            ballast.clear()
            torch.cuda.empty_cache()


@contextmanager
def _choosy_scores(most: int) -> Iterator[None]:
    """On a CPU: prompts that find memory to be scored so many rows at a time."""
    score = sampler_scores.score

    def choosy(logits: torch.Tensor, *more: Any) -> Any:
        if len(logits) > most:
            raise torch.OutOfMemoryError("made up")
        return score(logits, *more)

    with patch.object(prompt_scores, "score", choosy):
        yield


def check_nvml(bench: Bench, shape: str) -> Row:
    if bench.quick:
        return {"wrong": [], "text": "there is no card to ask"}
    properties = torch.cuda.get_device_properties(0)
    try:
        device = find_device(f"GPU-{properties.uuid}")
    except NotFound as error:
        return {"wrong": [], "text": f"NOT PROVEN: {error.message}"}
    took_s = []
    for _ in range(20):
        since_s = time.perf_counter()
        health = device.read()
        took_s.append(time.perf_counter() - since_s)
    wrong = [] if health.name == properties.name and not health.fault else [f"it says {words(health)}"]
    free, total = torch.cuda.mem_get_info()
    if health.memory_used_bytes is None or abs(health.memory_used_bytes - (total - free)) > 2 << 30:
        wrong.append(f"{total - free} bytes are used, and NVML says {health.memory_used_bytes}")
    slowest_ms = 1e3 * max(took_s)
    return {
        "wrong": wrong,
        "slowest_ms": slowest_ms,
        "text": f"{words(health)}; a reading takes {slowest_ms:.1f} ms at most",
    }


def check_hang(bench: Bench, shape: str) -> Row:
    """A worker in a process of its own; what counts begins when its kernel does."""
    device = "cpu" if bench.quick else "cuda"
    command = [sys.executable, __file__, "--device", device, "--shape", shape, "--child"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        spun_s = None
        for line in child.stdout:
            bench.say(f"  worker: {line.rstrip()}")
            if line.startswith("spinning"):
                spun_s = time.perf_counter()
        code = child.wait()
    after_s = float("nan") if spun_s is None else time.perf_counter() - spun_s
    wrong = [] if code == EXIT_HUNG else [f"the worker left with {code}, not with {EXIT_HUNG}"]
    if not after_s < _HANG_S + 10.0:
        wrong.append(f"it was gone {after_s:.1f} s after its kernel hung")
    # The driver has taken the kernel from the card with its process.
    if not bench.quick and int(torch.ones(1 << 20, device="cuda").sum()) != 1 << 20:
        wrong.append("the card computes nothing afterwards")
    return {"wrong": wrong, "seconds": after_s, "text": f"gone with {code} {after_s:.1f} s after its kernel hung"}


class _Spinning(TimedRunner):
    """Puts a kernel that never ends before a step, once told to; without a card the wait never ends."""

    is_told = False

    def __init__(self, runner: CudaRunner, on_card: bool) -> None:
        super().__init__(runner, SystemClock())
        self._card = runner._lane if on_card else None

    def launch(self, plan: Plan) -> None:
        if self.is_told:
            print("spinning", flush=True)
            if self._card is not None:
                with self._card.scope():
                    torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
        super().launch(plan)

    def collect(self) -> StepResult:
        if self.is_told and self._card is None:
            threading.Event().wait()
        return super().collect()


class _Sink:
    def __init__(self) -> None:
        self.told = asyncio.Event()

    def take(self, replica: str, frame: Any) -> None:
        if frame.ended:
            self.told.set()

    def lost(self, replica: str, keys: Any, *, is_dead: bool = True) -> None:
        print(f"lost {list(keys)}", flush=True)


def live_and_hang(bench: Bench, shape: str) -> None:
    """The worker of `check_hang`: serves one request, and hangs in the next."""
    with bench.open(shape, context=2048) as (runner, config):
        spinning = _Spinning(runner, not bench.quick)
        mounted = MountedModel(spinning, config, version="v", fingerprint="f", is_measured=True)
        asyncio.run(_serve(spinning, mounted))


async def _serve(spinning: _Spinning, mounted: MountedModel) -> None:
    network, sink, is_ready = MemoryNetwork(), _Sink(), asyncio.Event()

    def changed(replica: Any) -> None:
        print(replica.state, flush=True)
        if replica.is_ready:
            is_ready.set()

    replicas = Replicas(network, {"m": ["worker"]}, sink, SystemClock(), on_change=changed)
    host = WorkerHost(WorkerCard("m 0", "m", 0, os.getpid(), 1), lambda _: mounted, network, "worker")
    await replicas.start()
    async with host.embedded():
        await is_ready.wait()
        for key in (1, 2):
            sink.told.clear()
            made = Request(f"r{key}", "t", (1, 2, 3), max_tokens=8, sampling=GREEDY)
            replicas.of("m")[0].submit(SubmitPart((key,), made))
            await asyncio.wait_for(sink.told.wait(), 60.0)
            print(f"request {key} is told", flush=True)
            spinning.is_told = True


CHECKS: dict[str, Callable[[Bench, str], Row]] = {"room": check_room, "nvml": check_nvml, "hang": check_hang}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help="internal: the worker that hangs")
    asked = parser.parse_args()
    bench = Bench(asked.device == "cpu")
    if asked.child:
        live_and_hang(bench, asked.shape)
        return 0
    rows = {}
    for name in asked.only.split(","):
        bench.say(name)
        rows[name] = row = CHECKS[name](bench, asked.shape)
        bench.say(f"  {row['text']}")
        for line in row["wrong"]:
            bench.say(f"  WRONG {line}")
    if asked.json is not None:
        card = "cpu" if bench.quick else torch.cuda.get_device_name(0)
        asked.json.write_text(json.dumps({"card": card, "rows": rows}, indent=1))
    return int(any(row["wrong"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
