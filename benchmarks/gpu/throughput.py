"""Output tokens per second of the engine on a CUDA card: the GPU table of PERFORMANCE, with random weights, no network.

usage: python benchmarks/gpu/throughput.py [--shapes 0.6b,8b,135m] [--loads mixed256,batch64,batch256,single,ttft] [--json PATH]
       python benchmarks/gpu/throughput.py --dtype fp8 --shapes 8b --loads single,batch64
       python benchmarks/gpu/throughput.py --deterministic --shapes 0.6b,8b --loads mixed256,batch64,single
The engine and the runner are the real ones; weights are random, decoding is greedy, nobody ends early. Prints where each
step's time went: the device's own time, and the host's for planning, launching, waiting and handing out. With fp8, and with
exact rows, every load runs in plain bf16 first, and the ratio is printed. `--profile` tells of loads where the device's
time goes by kernel, in some steps after their prompts are computed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import to_builtins
from msgspec.structs import replace

from headrace.cli import engine_bench
from headrace.cli.console import leave
from headrace.cli.engine_bench import NAMED, Load, make_requests, run_load
from headrace.cli.operators import watch_operators
from headrace.core.clock import SystemClock
from headrace.core.config import EngineConfig
from headrace.core.plan import Plan, StepResult
from headrace.engine.loop import Engine
from headrace.runner.cuda.exact_ops import ExactOps
from headrace.runner.cuda.lane import CudaLane
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.triton_ops import TritonOps
from headrace.runner.cuda.weights import random_weights
from headrace.weights.shape import ModelShape
from headrace.worker.timed import TimedRunner
from headrace.worker.warmup import CARD_SCENES, measure_profile

SHAPES = {
    "0.6b": ModelShape(
        "qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e-6, 1e6, qk_norm=True, tied_embeddings=True
    ),
    "8b": ModelShape("llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072, 1e-5, 5e5),
    "135m": ModelShape("llama", 576, 30, 9, 3, 64, 1536, 49152, 8192, 1e-5, 1e5, tied_embeddings=True),
}
# PERFORMANCE: (floor, vLLM 0.24, to reach), output tokens/s on one H200.
KNOWN = {
    ("0.6b", "mixed256"): (35_500, 24_700, 30_000),
    ("0.6b", "batch64"): (83_900, 18_700, 40_000),
    ("0.6b", "batch256"): (116_000, 29_500, 65_000),
    ("0.6b", "single"): (3_450, 463, 1_400),
    ("8b", "mixed256"): (13_900, 10_400, 11_800),
    ("8b", "batch64"): (13_800, 9_430, 11_500),
    ("8b", "batch256"): (32_500, 18_200, 24_000),
    ("8b", "single"): (280, 202, 240),
    ("135m", "mixed256"): (173_000, 24_800, 45_000),
    ("135m", "single"): (15_300, 442, 1_800),
}
# Milliseconds to the first token of one prompt: (vLLM, to reach).
TTFT = {("0.6b", 1024): (25, 8), ("0.6b", 7000): (43, 20), ("8b", 1024): (36, 8), ("8b", 7000): (176, 130)}
# How a load is run.
PLAIN, EXACT = "bf16", "bf16, exact rows"
_CONTEXT = 8192
_SLOTS = 256
_STEP_TOKENS = 8192
_TRIES = 9
# Between requests that are alone.
_PAUSE_S = 0.05
# Of a load's tokens, prompts included, those computed before its steps are traced, and how many are.
_UNTRACED = 0.75
_TRACED_STEPS = 64


class Watched(TimedRunner):
    """Adds up the device's own time, of steps of decode rows alone and of the others."""

    def __init__(self, runner: CudaRunner, clock: SystemClock) -> None:
        super().__init__(runner, clock)
        self.clear()
        self._kinds: list[bool] = []

    def clear(self) -> None:
        self.device_s = {True: 0.0, False: 0.0}
        self.steps = {True: 0, False: 0}
        self.prefilled = 0

    def launch(self, plan: Plan) -> None:
        self._kinds.append(plan.work.prefill_tokens == 0)
        self.prefilled += plan.work.prefill_tokens
        super().launch(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        kind = self._kinds.pop(0)
        self.device_s[kind] += result.elapsed_s
        self.steps[kind] += 1
        return result


def open_runner(
    shape: ModelShape, say: Any, exact: bool = False, context: int = _CONTEXT, *, fp8: bool = False
) -> tuple[CudaRunner, EngineConfig, float]:
    since_s = time.perf_counter()
    context = min(context, shape.context_len)
    config = EngineConfig(
        slots=_SLOTS,
        blocks=_SLOTS * context // 16,
        block_size=16,
        context_len=context,
        vocab_size=shape.vocab_size,
        eos_ids=(),
        max_step_tokens=_STEP_TOKENS,
        max_queue_s=1e6,
    )
    lane = CudaLane()
    ops = (ExactOps if exact else TritonOps)(shape, _SLOTS, lane.device)
    runner = CudaRunner(config, shape, random_weights(), ops, lane, fp8=fp8)
    runner.fit()
    for line in runner.notes:
        say(f"  {line}")
    fitted_s = time.perf_counter() - since_s
    free = torch.cuda.mem_get_info()[0]
    runner.warm_up()
    ready_s = time.perf_counter() - since_s
    say(
        f"  fitted after {fitted_s:.1f} s, ready after {ready_s:.1f} s, {runner.num_graphs} graphs in {(free - torch.cuda.mem_get_info()[0]) >> 20} MiB"
    )
    config = replace(runner.config, profile=measure_profile(runner, runner.config, CARD_SCENES))
    return runner, config, ready_s


def measure(name: str, load: Load, runner: CudaRunner, config: EngineConfig) -> dict[str, Any]:
    clock = SystemClock()
    watched = Watched(runner, clock)
    engine = Engine(config, watched)
    local = SimpleNamespace(engine=engine, times=watched.times, config=config, clock=clock)
    # An idle engine proves its accounts, every ten seconds at most: before the clock starts.
    engine.turn(clock.now_s())
    gc.collect()
    gc.freeze()
    figures = run_load(local, load)  # type: ignore[arg-type]
    per_step = {key: 1e3 * value / figures.steps for key, value in to_builtins(figures.split).items()}
    device_s = sum(watched.device_s.values())
    return {
        "shape": name,
        "load": load.name,
        "tokens_per_s": figures.output_tokens_per_s,
        "seconds": figures.seconds,
        "steps": figures.steps,
        "decode_steps": watched.steps[True],
        "prefill_tokens": watched.prefilled,
        "device_share": device_s / figures.seconds,
        "decode_step_ms": 1e3 * watched.device_s[True] / max(1, watched.steps[True]),
        "mixed_step_ms": 1e3 * watched.device_s[False] / max(1, watched.steps[False]),
        "mixed_s": watched.device_s[False],
        "host_ms_per_step": per_step,
        "ttft_s": to_builtins(figures.ttft_s),
        "itl_s": to_builtins(figures.itl_s),
        "preemptions": figures.preemptions,
    }


def compare(row: dict[str, Any]) -> str:
    known = KNOWN.get((row["shape"], row["load"]))
    host = row["host_ms_per_step"]
    text = f"{row['shape']:5s} {row['load']:9s} {row['tokens_per_s']:9.0f} tok/s"
    if known:
        floor, peer, reach = known
        row.update(floor=floor, vllm=peer, reach=reach)
        rate = row["tokens_per_s"]
        text += f" {rate / floor:5.0%} of floor {rate / peer:5.2f}x vLLM {'met' if rate >= reach else 'MISSED'} {reach}"
    return (
        f"{text} | device {row['device_share']:.0%}, decode {row['decode_step_ms']:.3f} ms x {row['decode_steps']}, mixed"
        f" {row['mixed_step_ms']:.2f} ms x {row['steps'] - row['decode_steps']} | plan {host['plan_s']:.3f} launch"
        f" {host['launch_s']:.3f} sample {host['sample_s']:.3f} wait {host['wait_s']:.3f} emit {host['emit_s']:.3f}"
    )


def first_tokens(name: str, runner: CudaRunner, config: EngineConfig, say: Any) -> list[dict[str, Any]]:
    """Of one prompt after another, each alone and new to the engine; the clock starts before it is submitted."""
    rows, clock = [], SystemClock()
    watched = Watched(runner, clock)
    engine = Engine(config, watched)
    gc.collect()
    gc.freeze()
    for tokens in (1024, 7000):
        tried, device = [], []
        for number in range(_TRIES):
            load = Load(f"ttft{tokens}-{number}", 1, (tokens, tokens), (2, 2))
            (request,) = make_requests(load, config.vocab_size, config.context_len, seed=tokens + number)
            time.sleep(_PAUSE_S)
            # An idle engine proves its accounts, every ten seconds at most: before the clock starts.
            engine.turn(clock.now_s())
            watched.clear()
            since_s = time.perf_counter()
            engine.submit(request, clock.now_s())
            while not len(engine.turn(clock.now_s()).numbers):
                assert not engine.idle, "the prompt ended without a token"
            tried.append(time.perf_counter() - since_s)
            device.append(watched.device_s[False])
            while not engine.idle:
                engine.turn(clock.now_s())
        row = {"shape": name, "load": f"ttft{tokens}", "ttft_ms": 1e3 * statistics.median(tried)}
        row["device_ms"] = 1e3 * statistics.median(device)
        known = TTFT.get((name, tokens))
        say(
            f"{name:5s} first token after {tokens} prompt tokens: {row['ttft_ms']:.2f} ms, {row['device_ms']:.2f} of them"
            f" the device's (vLLM, reach: {known})"
        )
        rows.append(row)
    return rows


def trace(name: str, load: Load, runner: CudaRunner, config: EngineConfig, say: Any) -> dict[str, Any]:
    """Where the device's time goes, by kernel."""
    local = SimpleNamespace(runner=runner, config=config, clock=SystemClock(), device="cuda")
    requests = engine_bench.make_requests(load, config.vocab_size, config.context_len, seed=0)
    times = watch_operators(local, requests, None, passed=_UNTRACED, turns=_TRACED_STEPS)  # type: ignore[arg-type]
    say(f"{name} {load.name}: {times.turns} steps, {times.seconds:.3f} s of the device's")
    for kernel in times.operators:
        each_us = 1e6 * kernel.self_s / kernel.calls
        say(
            f"  {1e3 * kernel.self_s:9.2f} ms {kernel.calls:7d} x {each_us:8.1f} us {kernel.share:5.1%}  {kernel.name[:70]}"
        )
    return {"shape": name, "load": f"profile of {load.name}", "kernels": to_builtins(times)}


def run_shape(name: str, options: argparse.Namespace, kind: str, say: Any) -> list[dict[str, Any]]:
    say(f"{name}, {kind}: {SHAPES[name]}")
    runner, config, ready_s = open_runner(SHAPES[name], say, kind == EXACT, fp8=kind == "fp8")
    rows = [{"shape": name, "load": "start", "ready_s": ready_s, "profile": to_builtins(config.profile)}]
    # A small load first: the engine's own first steps are slow.
    measure(name, Load("warm", 8, (64, 64), (16, 16)), runner, config)
    for load in filter(None, options.loads.split(",")):
        if load == "ttft":
            rows += first_tokens(name, runner, config, say)
            continue
        rows.append(measure(name, NAMED[load], runner, config))
        say(compare(rows[-1]))
    for load in filter(None, options.profile.split(",")):
        rows.append(trace(name, NAMED[load], runner, config, say))
    runner.close()
    del runner
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    return [row | {"kind": kind} for row in rows]


def say_ratios(rows: list[dict[str, Any]], say: Any) -> None:
    """Of each load in fp8, or with exact rows, to the same in plain bf16: tokens, and the device's time of a decode step."""
    found = {(row["shape"], row["load"], row["kind"]): row for row in rows if "tokens_per_s" in row}
    for (shape, load, kind), row in found.items():
        if kind != PLAIN:
            peer = found[shape, load, PLAIN]
            row["ratio_to_bf16"] = row["tokens_per_s"] / peer["tokens_per_s"]
            row["decode_ratio_to_bf16"] = peer["decode_step_ms"] / row["decode_step_ms"]
            say(
                f"{shape:5s} {load:9s} {kind} {row['ratio_to_bf16']:.2f}x {PLAIN}; a decode step"
                f" {row['decode_ratio_to_bf16']:.2f}x: {peer['decode_step_ms']:.3f} -> {row['decode_step_ms']:.3f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="0.6b,8b,135m")
    parser.add_argument("--loads", default="mixed256,batch64,batch256,single,ttft")
    parser.add_argument("--profile", default="", help="loads to trace by kernel")
    parser.add_argument("--deterministic", action="store_true", help="also with exact rows")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    takes = {"shapes": [*SHAPES], "loads": [*NAMED, "ttft"], "profile": [*NAMED]}
    for flag, names in takes.items():
        if unknown := {*getattr(options, flag).split(",")} - {*names} - ({""} if flag != "shapes" else set()):
            parser.error(f"--{flag} takes {', '.join(names)}, not {', '.join(sorted(unknown))}")
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": options.commit,
        "rows": [],
    }

    def say(line: str) -> None:
        print(line, flush=True)

    for name in options.shapes.split(","):
        for kind in (PLAIN, *(["fp8"] if options.dtype == "fp8" else []), *([EXACT] if options.deterministic else [])):
            report["rows"] += run_shape(name, options, kind, say)
        say_ratios([row for row in report["rows"] if row["shape"] == name], say)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1))
    if options.profile:
        leave()


if __name__ == "__main__":
    main()
