"""The CPU runner's linear layers and paged attention against what this processor's memory and arithmetic reach.

Owns the sizes that are measured. Weights and KV are so many that caches do not hold them, as in a model; peaks are
measured by the plainest work there is: reading or copying a large array, and one large product of floats and of integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from headrace.cli.kernels.roofline import Figures, Peaks, Timer, judge
from headrace.runner.torch.attention import Attention
from headrace.runner.torch.int4 import Int4Linear
from headrace.runner.torch.int8 import Int8Linear
from headrace.runner.torch.kernels import KERNELS, LARGEST, with_margin
from headrace.runner.torch.kv_cache import KvCache
from headrace.runner.torch.linear import Fp32Linear, Linear
from headrace.runner.torch.planes import RowPlanes
from headrace.runner.torch.probe import Choice

if TYPE_CHECKING:
    from headrace.weights.shape import ModelShape

_BLOCK = 16
_TRIES = 8


class ProcessorSizes(Struct, frozen=True):
    """Rows of products; (rows, context) of single tokens; (tokens, positions before them) of chunks."""

    rows: tuple[int, ...] = (1, 8, 32, 256)
    decodes: tuple[tuple[int, int], ...] = ((1, 4096), (8, 1024), (32, 512))
    chunks: tuple[tuple[int, int], ...] = ((256, 0), (256, 3840))
    cold_bytes: int = 96 << 20
    peak_bytes: int = 128 << 20
    peak_width: int = 1024


def measure_peaks(choice: Choice, sizes: ProcessorSizes, timer: Timer) -> Peaks:
    """The best of several tries; of reading and copying, the faster. Integers by the kernel chosen for them."""
    wide = torch.ones(sizes.peak_bytes // 4)
    other = torch.zeros_like(wide)
    width = sizes.peak_width
    square = torch.randn(width, width)
    product = torch.empty_like(square)
    matrix = KERNELS[choice.recipe.kernel](with_margin(square.clamp(-1.0, 1.0).mul(LARGEST).round().to(torch.int8)))
    integers = RowPlanes(width, width, 1).split(square)[0]
    read_s = min(timer([wide.sum]) for _ in range(_TRIES))
    copy_s = min(timer([partial(other.copy_, wide)]) for _ in range(_TRIES))
    product_s = min(timer([partial(torch.mm, square, square, out=product)]) for _ in range(_TRIES))
    integer_s = min(timer([partial(matrix.multiply, integers)]) for _ in range(_TRIES))
    return Peaks(
        bytes_per_s=max(sizes.peak_bytes / read_s, 2 * sizes.peak_bytes / copy_s),
        flops_per_s=2 * width**3 / product_s,
        integer_per_s=2 * width**3 / integer_s,
    )


def measure_processor(shape: ModelShape, choice: Choice, sizes: ProcessorSizes, peaks: Peaks, timer: Timer) -> Figures:
    with torch.inference_mode():
        yield from _linears(shape, choice, sizes, peaks, timer)
        yield from _decodes(shape, choice, sizes, peaks, timer)
        yield from _chunks(shape, choice, sizes, peaks, timer)


def _makers(choice: Choice, max_rows: int, width: int) -> dict[str, tuple[float, Callable[[torch.Tensor], Linear]]]:
    """Bytes of a weight, and how its layer is made, by dtype."""
    planes = {1: RowPlanes(max_rows, width, 1)}
    recipe = choice.recipe

    def planes_of(width: int, count: int) -> RowPlanes:
        return planes[count]

    makers: dict[str, tuple[float, Callable[[torch.Tensor], Linear]]] = {
        "fp32": (4.0, partial(Fp32Linear, min_rows=recipe.min_rows)),
        "int8": (1.0, partial(Int8Linear, kernel=recipe.kernel, planes_of=planes_of)),
    }
    if any(figure.name == "int4" and figure.micros for figure in choice.figures):
        makers["int4"] = (0.5 + 6 / 32, partial(Int4Linear, min_rows=recipe.min_rows, planes_of=planes_of))
    return makers


def _linears(shape: ModelShape, choice: Choice, sizes: ProcessorSizes, peaks: Peaks, timer: Timer) -> Figures:
    """The widest matrix of a layer, in every dtype."""
    width, height = shape.hidden_size, 2 * shape.intermediate_size
    for dtype, (weight_bytes, make) in _makers(choice, max(sizes.rows), width).items():
        whole = weight_bytes * width * height
        copies = [make(torch.randn(height, width)) for _ in range(max(2, math.ceil(sizes.cold_bytes / whole)))]
        for rows in sizes.rows:
            given = torch.randn(rows, width)
            took_s = timer([partial(each.project, given) for each in copies])
            moved = whole + 4 * rows * (width + height)
            size = f"{rows} x {width} x {height}"
            flops = 2 * rows * width * height
            yield judge(f"{dtype} linear", size, took_s, moved, flops, peaks, integer=dtype != "fp32")


def _attention(shape: ModelShape, choice: Choice, blocks: int, cold_bytes: int) -> tuple[Attention, KvCache]:
    """Over so many layers that caches do not hold what is read."""
    each = 8 * blocks * _BLOCK * shape.num_kv_heads * shape.head_dim
    shape = replace(shape, num_layers=max(2, math.ceil(cold_bytes / each)))
    cache = KvCache(shape, blocks, _BLOCK)
    cache.cells.normal_()
    return Attention(shape, cache, choice.cuts), cache


def _decodes(shape: ModelShape, choice: Choice, sizes: ProcessorSizes, peaks: Peaks, timer: Timer) -> Figures:
    for rows, context in sizes.decodes:
        own = -(-context // _BLOCK)
        attention, cache = _attention(shape, choice, rows * own, sizes.cold_bytes)
        columns = attention.cuts.length(context) // _BLOCK
        tables = np.full((rows, columns), cache.blocks, np.int64)
        tables[:, :own] = np.random.default_rng(0).permutation(rows * own).reshape(rows, own)
        group = attention.group(0, np.full(rows, context, np.int64), tables)
        queries = torch.randn(rows, shape.num_heads, shape.head_dim)
        took_s = timer([partial(attention.attend, layer, queries, [group], []) for layer in range(cache.num_layers)])
        moved = 8 * rows * context * shape.num_kv_heads * shape.head_dim
        flops = 4 * rows * context * shape.num_heads * shape.head_dim
        yield judge("decode attention", f"{rows} x {context}", took_s, moved, flops, peaks)


def _chunks(shape: ModelShape, choice: Choice, sizes: ProcessorSizes, peaks: Peaks, timer: Timer) -> Figures:
    for tokens, before in sizes.chunks:
        context = before + tokens
        own = -(-context // _BLOCK)
        attention, cache = _attention(shape, choice, own, sizes.cold_bytes)
        columns = attention.cuts.length(context) // _BLOCK
        table = np.full(columns, cache.blocks, np.int64)
        table[:own] = np.random.default_rng(0).permutation(own)
        chunk = attention.chunk(0, before, tokens, table)
        queries = torch.randn(tokens, shape.num_heads, shape.head_dim)
        took_s = timer([partial(attention.attend, layer, queries, [], [chunk]) for layer in range(cache.num_layers)])
        moved = 8 * context * shape.num_kv_heads * shape.head_dim
        flops = 4 * shape.num_heads * shape.head_dim * (tokens * before + tokens * (tokens + 1) / 2)
        yield judge("chunk attention", f"{tokens} after {before}", took_s, moved, flops, peaks)
