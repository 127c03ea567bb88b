"""Kernels on a CUDA card: checked against float64, then timed, as shares of what the memory or the tensor cores allow.

Run from the repository's root: PYTHONPATH=src python benchmarks/gpu/kernels.py [--json PATH] [--only WORD ...] [--sweep]
`--sweep` also times other configurations than those the product chooses, as a table.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_checks import all_checks, draws_of
from kernel_rig import BANDWIDTH, BLOCK_SIZE, FLOPS, Pages, normal, offsets_of, poisoned, seconds, tiles_of

from headrace.runner.cuda.kernels.activation import silu_mul
from headrace.runner.cuda.kernels.decode_attention import DecodeConfig, DecodeScratch, decode_attention, decode_config
from headrace.runner.cuda.kernels.fresh_attention import fresh_attention, fresh_rows
from headrace.runner.cuda.kernels.norms import add_rms_norm
from headrace.runner.cuda.kernels.prefill_attention import (
    PrefillConfig,
    PrefillScratch,
    prefill_attention,
    prefill_config,
    spread_over,
)
from headrace.runner.cuda.kernels.rotary_write import rotary_write
from headrace.runner.cuda.kernels.row_product import row_product
from headrace.runner.cuda.kernels.sampling import sample
from headrace.runner.cuda.kernels.scan import Scan
from headrace.runner.cuda.kernels.streamed_attention import TileQueue, streamed_attention, streamed_rows
from headrace.runner.cuda.kernels.streamed_decode import (
    StretchScratch,
    can_stream_decode,
    is_worth_streaming_decode,
    streamed_decode,
    streamed_decode_turned,
)
from headrace.runner.cuda.kernels.streamed_product import can_stream
from headrace.runner.cuda.kernels.turned_attention import turned_attention
from headrace.runner.cuda.layout import MOST_ROUNDS

Row = dict[str, Any]
# rows, context, heads, key heads, head size
DECODES = (
    (64, 4096, 32, 8, 128),
    (64, 4096, 16, 8, 128),
    (256, 800, 16, 8, 128),
    (256, 800, 9, 3, 64),
    (256, 256, 16, 8, 128),
    (64, 256, 16, 8, 128),
    (1, 256, 16, 8, 128),
    (1, 256, 9, 3, 64),
    (1, 4096, 32, 8, 128),
    (1, 131072, 32, 8, 128),
)
# chunks, tokens of each, positions before it, heads, key heads, head size
PREFILLS = (
    (1, 8192, 0, 32, 8, 128),
    (4, 2048, 0, 32, 8, 128),
    (1, 2048, 30000, 32, 8, 128),
    (1, 64, 60000, 32, 8, 128),
    (1, 32, 60000, 16, 8, 128),
    (1, 1024, 0, 16, 8, 128),
    (1, 8192, 0, 9, 3, 64),
)


def decode_launches(
    rows: int, context: int, heads: int, kv_heads: int, dim: int
) -> Callable[[DecodeConfig | StretchScratch], Row]:
    size = 2 * 2 * rows * context * kv_heads * dim
    # As many layers as a model has, or as many as the cache does not hold.
    layers = max(2, min(28, math.ceil(256e6 / size)))
    pages = Pages.make([context] * rows, kv_heads, dim, layers=layers)
    q, out = normal(rows, heads, dim), poisoned(rows, heads, dim)
    slots = torch.randperm(rows, device="cuda").int()

    def measure(way: DecodeConfig | StretchScratch) -> Row:
        def launch(layer: int) -> Callable[[], None]:
            cells = (pages.keys[layer], pages.values[layer])
            args = (out, q, *cells, pages.tables, slots, pages.lengths, dim**-0.5)
            if isinstance(way, StretchScratch):
                return partial(streamed_decode_turned, *args, way)
            return partial(decode_attention, *args, scratch)

        if isinstance(way, DecodeConfig):
            scratch = DecodeScratch.make(rows, heads, kv_heads, dim, way, "cuda")
        took = seconds([launch(layer) for layer in range(layers)])
        return {"us": took * 1e6, "share": size / BANDWIDTH / took}

    return measure


def bench_decode(sweep: bool) -> Iterator[Row]:
    for shape in DECODES:
        rows, context, heads, kv_heads, dim = shape
        measure = decode_launches(*shape)
        name = f"decode {rows} x {context}, {heads}/{kv_heads}x{dim}"
        yield {"name": name, **measure(decode_config(rows, kv_heads))}
        if may_stream(*shape):
            scratch = StretchScratch.make(heads, kv_heads, dim, tile_queue(torch.device("cuda")))
            yield {"name": "  streamed", **measure(scratch)}
        if not sweep:
            continue
        found = []
        for tile, warps, stages in (
            (64, 4, 3),
            (64, 4, 5),
            (64, 4, 7),
            (128, 4, 3),
            (128, 8, 5),
            (32, 4, 5),
            (32, 2, 7),
        ):
            for splits in decode_cuts(rows, context, kv_heads):
                config = DecodeConfig(splits, splits, context, tile, warps, stages)
                found.append(
                    {"name": f"  tile {tile} warps {warps} stages {stages} splits {splits}", **measure(config)}
                )
        yield from sorted(found, key=lambda row: row["us"])[:6]


def may_stream(rows: int, context: int, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether an engine on this card streams such rows."""
    is_able = can_stream(torch.device("cuda")) and can_stream_decode(heads, kv_heads, dim)
    return is_able and is_worth_streaming_decode(rows, kv_heads)


def decode_cuts(rows: int, context: int, kv_heads: int) -> list[int]:
    """Splits around one, two, four and eight programs to a multiprocessor."""
    wanted = {triton.next_power_of_2(max(1, n * 132 // (rows * kv_heads))) for n in (1, 2, 4, 8)}
    most = max(1, context // 32)
    return sorted({min(splits, most, 256) for splits in wanted})


def prefill_launches(
    chunks: int, count: int, before: int, heads: int, kv_heads: int, dim: int
) -> Callable[[PrefillConfig], Row]:
    counts, prior = [count] * chunks, [before] * chunks
    pages = Pages.make([before + count] * chunks, kv_heads, dim)
    q, out = normal(chunks * count, heads, dim), poisoned(chunks * count, heads, dim)
    slots = torch.arange(chunks, dtype=torch.int32, device="cuda")
    offsets, ahead = offsets_of(counts), torch.tensor(prior, dtype=torch.int32, device="cuda")
    work = prefill_work(chunks, count, before, heads, dim)

    def measure(config: PrefillConfig) -> Row:
        spread = spread_over(kv_heads)
        tiles = tiles_of(counts, prior, config.tokens(heads, kv_heads), spread)
        scratch = PrefillScratch.make(MOST_ROUNDS * spread, kv_heads, dim, config, "cuda")
        args = (out, q, pages.keys[0], pages.values[0], pages.tables, slots, offsets, ahead, tiles, dim**-0.5, config)
        took = seconds([partial(prefill_attention, *args, scratch)])
        return {"us": took * 1e6, "tflops": work / took / 1e12, "share": work / took / FLOPS}

    return measure


def fresh_time(chunks: int, count: int, heads: int, kv_heads: int, dim: int) -> Row:
    counts, tokens = [count] * chunks, chunks * count
    qkv, q, out = normal(tokens, (heads + 2 * kv_heads) * dim), normal(tokens, heads, dim), poisoned(tokens, heads, dim)
    tile_rows = streamed_rows(heads, kv_heads, dim) if can_stream(q.device) else 0
    tiles = tiles_of(counts, [0] * chunks, tile_rows or fresh_rows(heads, kv_heads, dim, q.device))
    args = (out, q, qkv, offsets_of(counts), tiles, dim**-0.5)
    if tile_rows:
        took = seconds([partial(streamed_attention, *args, tile_queue(q.device))])
    else:
        took = seconds([partial(fresh_attention, *args)])
    work = prefill_work(chunks, count, 0, heads, dim)
    return {"name": "  from its own rows", "us": took * 1e6, "tflops": work / took / 1e12, "share": work / took / FLOPS}


def tile_queue(card: torch.device) -> TileQueue:
    return TileQueue.make(torch.cuda.get_device_properties(card).multi_processor_count, card)


def prefill_work(chunks: int, count: int, before: int, heads: int, dim: int) -> float:
    return 4 * dim * heads * chunks * (count * before + count * (count + 1) / 2)


def bench_prefill(sweep: bool) -> Iterator[Row]:
    for shape in PREFILLS:
        chunks, count, before, heads, kv_heads, dim = shape
        measure = prefill_launches(*shape)
        name = f"prefill {chunks} x {count} after {before}, {heads}/{kv_heads}x{dim}"
        yield {"name": name, **measure(prefill_config(dim))}
        if not before and fresh_rows(heads, kv_heads, dim, torch.device("cuda")):
            yield fresh_time(chunks, count, heads, kv_heads, dim)
        if not sweep:
            continue
        found = []
        for rows, tile, warps, stages in (
            (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 8, 5),
            (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 4, 3), (128, 32, 4, 5),
        ):  # fmt: skip
            try:
                measured = measure(PrefillConfig(rows, tile, warps, stages))
            except triton.runtime.errors.OutOfResources:
                continue
            found.append({"name": f"  rows {rows} tile {tile} warps {warps} stages {stages}", **measured})
        yield from sorted(found, key=lambda row: row["us"])
        if not before:
            yield from peers(chunks, count, heads, kv_heads, dim)


def peers(chunks: int, count: int, heads: int, kv_heads: int, dim: int) -> Iterator[Row]:
    """torch's own attention over keys and values that lie together."""
    work = prefill_work(chunks, count, 0, heads, dim)
    q = normal(chunks, heads, count, dim)
    k, v = normal(chunks, kv_heads, count, dim), normal(chunks, kv_heads, count, dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    for backend in (torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        try:
            with torch.nn.attention.sdpa_kernel(backend):
                took = seconds([partial(attend, q, k, v, is_causal=True, enable_gqa=True)])
        except RuntimeError as error:
            print(f"  {backend.name}: {str(error)[:80]}")
            continue
        yield {
            "name": f"  torch {backend.name}",
            "us": took * 1e6,
            "tflops": work / took / 1e12,
            "share": work / took / FLOPS,
        }


def bench_rows(sweep: bool) -> Iterator[Row]:
    for rows in (1, 64, 256, 8192):
        for width, inner in ((1024, 3072), (4096, 14336)):
            x, residual, out = normal(rows, width), normal(rows, width), poisoned(rows, width)
            weight = normal(width)
            took = seconds([partial(add_rms_norm, x, residual, weight, 1e-5, out)])
            size = 2 * rows * width * 4
            yield {"name": f"add+norm {rows} x {width}", "us": took * 1e6, "share": size / took / BANDWIDTH}
            gate_up, act = normal(rows, 2 * inner), poisoned(rows, inner)
            took = seconds([partial(silu_mul, gate_up, act)])
            size = 2 * rows * inner * 3
            yield {"name": f"silu*mul {rows} x {inner}", "us": took * 1e6, "share": size / took / BANDWIDTH}
        for heads, kv_heads, dim, normed in ((16, 8, 128, True), (32, 8, 128, False)):
            qkv = normal(rows, (heads + 2 * kv_heads) * dim)
            keys = poisoned(rows // BLOCK_SIZE + 1, kv_heads, BLOCK_SIZE, dim)
            values, q_out = keys.clone(), poisoned(rows, heads, dim)
            positions = torch.arange(rows, dtype=torch.int32, device="cuda")
            cells = torch.arange(rows, device="cuda")
            angles = torch.rand(rows, dim // 2, device="cuda")
            norm = normal(dim) if normed else None
            took = seconds(
                [partial(rotary_write, qkv, positions, cells, angles, angles, norm, norm, 1e-6, q_out, keys, values)]
            )
            size = 2 * 2 * qkv.numel()
            yield {
                "name": f"rotary+write {rows} x {heads}/{kv_heads}",
                "us": took * 1e6,
                "share": size / took / BANDWIDTH,
            }


# model, height, width, what is done besides the product
ROWS = (
    ("0.6B", 4096, 1024, "normed"),
    ("0.6B", 1024, 2048, "adds"),
    ("0.6B", 3072, 1024, "gated"),
    ("0.6B", 1024, 3072, "adds"),
    ("8B", 6144, 4096, "normed"),
    ("8B", 4096, 4096, "adds"),
    ("8B", 14336, 4096, "gated"),
    ("8B", 4096, 14336, "adds"),
)
# rows, context, heads, key heads, head size, norms of queries and keys
TURNED = (
    (1, 192, 16, 8, 128, True),
    (64, 192, 16, 8, 128, True),
    (256, 192, 16, 8, 128, True),
    (64, 192, 32, 8, 128, False),
    (256, 192, 32, 8, 128, False),
    (64, 4096, 16, 8, 128, True),
    (64, 4096, 32, 8, 128, False),
)


def bench_fused(sweep: bool) -> Iterator[Row]:
    """What several operations take in one launch; in the line below, what they take apart."""
    for model, height, width, kind in ROWS:
        lines, size = height * (2 if kind == "gated" else 1), 2 * width * height * (2 if kind == "gated" else 1)
        weights = [normal(lines, width) for _ in range(max(2, math.ceil(256e6 / size)))]
        row, out, wide, norm = normal(1, width), normal(1, height), normal(1, lines), normal(width)
        does = {"norm": None if kind == "adds" else norm, "adds": kind == "adds", "gated": kind == "gated"}
        took = seconds([partial(row_product, row, weight, out, eps=1e-6, **does) for weight in weights])
        name = f"row product {model} {height} x {width} {kind}"
        yield {"name": name, "us": took * 1e6, "share": size / took / BANDWIDTH}
        took = seconds([partial(torch.mm, row, weight.t(), out=wide) for weight in weights])
        yield {"name": "  the library's product alone", "us": took * 1e6, "share": size / took / BANDWIDTH}
    for shape in TURNED:
        yield from turned_times(*shape)


def turned_times(rows: int, context: int, heads: int, kv_heads: int, dim: int, normed: bool) -> Iterator[Row]:
    size = 2 * 2 * rows * context * kv_heads * dim
    layers = max(2, min(28, math.ceil(256e6 / size)))
    pages = Pages.make([context] * rows, kv_heads, dim, layers=layers)
    config = decode_config(rows, kv_heads, 8192)
    scratch = DecodeScratch.make(rows, heads, kv_heads, dim, config, "cuda")
    qkv, q, out = normal(rows, (heads + 2 * kv_heads) * dim), normal(rows, heads, dim), poisoned(rows, heads, dim)
    angles, norm = torch.rand(context, dim // 2, device="cuda"), normal(dim) if normed else None
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    positions = pages.lengths - 1
    cells = pages.tables[:, (context - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE

    def joined(layer: int) -> None:
        turned_attention(
            out, qkv, angles, angles, norm, norm, 1e-6, pages.keys[layer], pages.values[layer], pages.tables, slots,
            pages.lengths, dim**-0.5, scratch,
        )  # fmt: skip

    def apart(layer: int) -> None:
        keys, values = pages.keys[layer], pages.values[layer]
        rotary_write(qkv, positions, cells, angles, angles, norm, norm, 1e-6, q, keys, values)
        decode_attention(out, q, keys, values, pages.tables, slots, pages.lengths, dim**-0.5, scratch)

    def streamed(layer: int) -> None:
        keys, values = pages.keys[layer], pages.values[layer]
        turns = (qkv, angles, angles, norm, norm, 1e-6)
        streamed_decode(out, *turns, keys, values, pages.tables, slots, pages.lengths, dim**-0.5, stretches)

    def streamed_apart(layer: int) -> None:
        keys, values = pages.keys[layer], pages.values[layer]
        rotary_write(qkv, positions, cells, angles, angles, norm, norm, 1e-6, q, keys, values)
        streamed_decode_turned(out, q, keys, values, pages.tables, slots, pages.lengths, dim**-0.5, stretches)

    ways = [(f"turned {rows} x {context}, {heads}/{kv_heads}x{dim}", joined), ("  apart", apart)]
    if may_stream(rows, context, heads, kv_heads, dim):
        stretches = StretchScratch.make(heads, kv_heads, dim, tile_queue(out.device))
        ways += [("  streamed", streamed), ("  streamed, apart", streamed_apart)]
    for name, launch in ways:
        took = seconds([partial(launch, layer) for layer in range(layers)])
        yield {"name": name, "us": took * 1e6, "share": size / BANDWIDTH / took}


def bench_sampling(sweep: bool) -> Iterator[Row]:
    vocab = 151936
    for rows in (1, 64, 256):
        tokens = torch.empty(rows, dtype=torch.int32, device="cuda")
        statuses = torch.empty(rows, dtype=torch.uint8, device="cuda")
        slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        room = Scan.make(rows, vocab, "cuda")
        for name, spread, settings in (
            ("greedy", 3.0, (0.0, 0, 1.0, 0.0)),
            ("temperature 1", 3.0, (1.0, 0, 1.0, 0.0)),
            ("0.6, top-k 20, top-p 0.95", 3.0, (0.6, 20, 0.95, 0.0)),
            ("min-p 0.05", 3.0, (1.0, 0, 1.0, 0.05)),
            ("top-p 0.9, narrow", 6.0, (0.7, 0, 0.9, 0.0)),
            ("top-p 0.9, wide", 1.0, (1.0, 0, 0.9, 0.0)),
            ("top-k 500, top-p 0.9", 3.0, (1.0, 500, 0.9, 0.0)),
        ):
            logits = (torch.randn(rows, vocab, device="cuda") * spread).bfloat16()
            draws = draws_of(rows, *settings)
            took = seconds([partial(sample, logits, slots, draws, tokens, statuses, room)])
            share = 2 * logits.numel() / took / BANDWIDTH
            yield {"name": f"sample {rows} x {vocab}: {name}", "us": took * 1e6, "share": share}
        if sweep:
            took = seconds([partial(logits.argmax, -1)])
            yield {"name": f"  torch argmax {rows}", "us": took * 1e6, "share": 2 * logits.numel() / took / BANDWIDTH}


def say(row: Row) -> None:
    rate = f"{row['tflops']:7.0f} TFLOP/s" if "tflops" in row else ""
    print(f"{row['name']:58s} {row['us']:10.1f} us {100 * row['share']:6.1f} % {rate}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=["checks", "decode", "prefill", "rows", "fused", "sampling"])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, Triton {triton.__version__}")
    report: Row = {"card": card, "torch": torch.__version__, "triton": triton.__version__, "checks": [], "times": []}
    failed = 0
    if "checks" in asked.only:
        for name, error, tolerance in all_checks(asked.seed):
            good = error <= tolerance
            failed += not good
            report["checks"].append({"name": name, "error": error, "tolerance": tolerance, "ok": good})
            print(f"{'ok  ' if good else 'FAIL'} {name:58s} {error:.2e}", flush=True)
    sections = {
        "decode": bench_decode,
        "prefill": bench_prefill,
        "rows": bench_rows,
        "fused": bench_fused,
        "sampling": bench_sampling,
    }
    for word, bench in sections.items():
        if word in asked.only:
            begin = time.perf_counter()
            for row in bench(asked.sweep):
                report["times"].append(row)
                say(row)
            print(f"({word}: {time.perf_counter() - begin:.0f} s)", flush=True)
            torch.cuda.empty_cache()
        if asked.json:
            asked.json.write_text(json.dumps(report, indent=1))
    print(f"{failed} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
