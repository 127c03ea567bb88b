"""What a load's own steps would take with nothing but their matrix products, each by the fastest way that is known here, and
attention at what the card's memory and tensor cores reach: no norms, gates, sampling, launches or host.

usage: PYTHONPATH=src python benchmarks/gpu/bounds.py [--shapes 8b] [--loads mixed256,batch64,batch256] [--json PATH]
Beside each figure that `throughput.py` misses: how much of what is missing lies in the products themselves. Ways are those of
both libraries and our own, streamed and by clusters, the latter with the gate or the sum that is joined to them; times are taken
in bursts, at clocks that a whole load does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kernel_rig import BANDWIDTH, FLOPS, normal, seconds
from layer_sweep import sizes_of
from throughput import KNOWN, SHAPES, TTFT, Watched, open_runner

from headrace.cli.engine_bench import NAMED, Load, run_load
from headrace.core.clock import SystemClock
from headrace.core.config import EngineConfig
from headrace.core.plan import Plan
from headrace.engine.loop import Engine
from headrace.runner.cuda.buckets import row_buckets, token_buckets
from headrace.runner.cuda.kernels.clustered_product import (
    clustered_gate,
    clustered_sum,
    gate_width,
    is_worth_summing,
)
from headrace.runner.cuda.kernels.clusters import can_cluster
from headrace.runner.cuda.kernels.crossed_product import crossed_gate, crossed_parts, crossed_sums, is_worth_crossing
from headrace.runner.cuda.kernels.streamed_product import (
    is_worth_streaming,
    is_worth_streaming_alone,
    streamed_config,
    streamed_product,
)
from headrace.runner.cuda.products import library_product
from headrace.runner.cuda.runner import CudaRunner
from headrace.weights.shape import ModelShape

# Of each matrix so many that no cache holds them from one product to the next.
_COPIES = 4
_MOST_ROWS, _MOST_TOKENS = 256, 8192
_PROMPTS = (1024, 7000)


class Noted(Watched):
    """Notes of every step its tokens, samples, positions read, and pairs of queries and keys of its chunks."""

    def __init__(self, runner: CudaRunner, clock: SystemClock) -> None:
        super().__init__(runner, clock)
        self.noted: list[tuple[int, int, int, int]] = []

    def launch(self, plan: Plan) -> None:
        starts, counts = plan.starts.astype(int), plan.counts.astype(int)
        pairs = ((counts > 1) * counts * (2 * starts + counts + 1) // 2).sum()
        self.noted.append((int(counts.sum()), int(plan.samples.sum()), int((starts + counts).sum()), int(pairs)))
        super().launch(plan)


class Products:
    """Seconds of the products of one layer by tokens, and of the head by samples; between measured sizes those of the lower."""

    def __init__(self, shape: ModelShape) -> None:
        matrices = [(2 * height if gated else height, width) for height, width, gated in sizes_of(shape).values()]
        rows = row_buckets(_MOST_ROWS)
        self._sizes = sorted({*rows, *token_buckets(_MOST_TOKENS, shared=True), *_PROMPTS})
        self._layer = [sum(fastest_s(size, *matrix) for matrix in matrices) for size in self._sizes]
        self._rows = list(rows)
        self._head = [fastest_s(size, shape.vocab_size, shape.hidden_size) for size in rows]

    def layer_s(self, tokens: int) -> float:
        return self._layer[bisect_right(self._sizes, tokens) - 1]

    def head_s(self, samples: int) -> float:
        return self._head[bisect_right(self._rows, samples) - 1] if samples else 0.0


def fastest_s(rows: int, height: int, width: int) -> float:
    """Of one product among others of its size."""
    read, out = normal(rows, width), normal(rows, height)
    weights = [normal(height, width) for _ in range(_COPIES)]
    times = [
        seconds([partial(multiply, read, weight, out) for weight in weights]) for multiply in _ways(read, weights[0])
    ]
    return min(times)


def _ways(rows: torch.Tensor, weight: torch.Tensor) -> Iterator[Callable[..., None]]:
    usual = torch.backends.cuda.preferred_blas_library()
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        yield lambda read, matrix, out: library_product(read, matrix, None, out)
    torch.backends.cuda.preferred_blas_library(usual)
    height, width = weight.shape
    if is_worth_streaming(len(rows), (width,), height * width) or is_worth_streaming_alone(len(rows), weight):
        config = streamed_config(len(rows), *weight.shape, gated=False)
        yield lambda read, matrix, out: streamed_product(read, matrix, out, config)
    clusters = torch.cuda.get_device_properties(rows.device).multi_processor_count // 2
    if not can_cluster(rows.device):
        return
    if is_worth_crossing(rows, weight, clusters):
        yield lambda read, matrix, out: crossed_gate(read, matrix, _narrow(out))
    if number := crossed_parts(rows, weight, clusters):
        parts = torch.empty(number, len(rows), len(weight), device="cuda")
        yield lambda read, matrix, out: crossed_sums(read, matrix, parts)
    if wide := gate_width(rows, weight, clusters):
        yield lambda read, matrix, out: clustered_gate(read, matrix, _narrow(out), wide, clusters)
    if is_worth_summing(rows, weight, clusters):
        yield lambda read, matrix, out: clustered_sum(read, matrix, out, clusters)


def _narrow(out: torch.Tensor) -> torch.Tensor:
    """Room for half of its columns."""
    return out.view(-1)[: out.numel() // 2].view(len(out), -1)


def step_s(shape: ModelShape, products: Products, tokens: int, samples: int, positions: int, pairs: int) -> float:
    kept_bytes = 4 * shape.num_kv_heads * shape.head_dim * shape.num_layers
    work = 4 * pairs * shape.num_heads * shape.head_dim * shape.num_layers
    multiplied_s = shape.num_layers * products.layer_s(tokens) + products.head_s(samples)
    return multiplied_s + positions * kept_bytes / BANDWIDTH + work / FLOPS


def run(name: str, load: Load, runner: CudaRunner, config: EngineConfig, products: Products) -> dict[str, Any]:
    clock = SystemClock()
    noted = Noted(runner, clock)
    engine = Engine(config, noted)
    engine.turn(clock.now_s())
    gc.collect()
    figures = run_load(SimpleNamespace(engine=engine, times=noted.times, config=config, clock=clock), load)  # type: ignore[arg-type]
    bound_s = sum(step_s(SHAPES[name], products, *step) for step in noted.noted)
    rate = figures.output_tokens_per_s
    row = {
        "shape": name,
        "load": load.name,
        "tokens_per_s": rate,
        "bound_tokens_per_s": rate * figures.seconds / bound_s,
    }
    reach = KNOWN[name, load.name][2]
    said = f"{rate:9,.0f} tok/s, {row['bound_tokens_per_s']:9,.0f} by products and attention alone, to reach {reach:,}"
    print(f"{name:5s} {load.name:9s} {said}", flush=True)
    return row | {"reach": reach, "steps": len(noted.noted)}


def first_token(name: str, tokens: int, products: Products) -> dict[str, Any]:
    bound_s = step_s(SHAPES[name], products, tokens, 1, tokens, tokens * (tokens + 1) // 2)
    reach = TTFT[name, tokens][1]
    said = f"{1e3 * bound_s:.1f} ms by products and attention alone, to reach {reach}"
    print(f"{name:5s} first token after {tokens}: {said}", flush=True)
    return {"shape": name, "load": f"ttft{tokens}", "bound_ms": 1e3 * bound_s, "reach": reach}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="0.6b,8b")
    parser.add_argument("--loads", default="mixed256,batch64,batch256")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": options.commit,
    }
    report |= {"python": sys.version.split()[0], "rows": []}
    for name in options.shapes.split(","):
        with torch.inference_mode():
            products = Products(SHAPES[name])
        torch.cuda.empty_cache()
        report["rows"] += [first_token(name, tokens, products) for tokens in _PROMPTS]
        runner, config, _ = open_runner(SHAPES[name], lambda line: None)
        for load in options.loads.split(","):
            report["rows"].append(run(name, NAMED[load], runner, config, products))
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
