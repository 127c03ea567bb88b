# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Products of some rows with a matrix as fast as a card's memory gives the matrix, and what lies between products in the
same launch, as `fused_product` has it.

A matrix does not depend on the launch before: a program fetches its first tiles of it while that one ends, waits, and
only then fetches the rows that belong to them. What its last sums need is read beside the first tiles, too. Written in
Gluon, which says when a tile is fetched, for the tensor cores of compute capability 9.0 alone. The interpreter does not
know it: `benchmarks/gpu/kernels.py` checks it.
"""

import torch
import triton
from msgspec import Struct
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.runner.cuda.kernels.early import capability
from headrace.runner.cuda.kernels.fused_product import filled
from headrace.runner.cuda.kernels.rings import barriers, fetch
from headrace.runner.cuda.products import LARGE
from headrace.runner.cuda.squares import Squares

# Gluon changes with every Triton: it was compiled with these.
_TRITONS = ("3.6", "3.7", "3.8", "3.9")
# Of shared memory, for a program that has a multiprocessor to itself, and for one of two.
_ROOM, _HALF_ROOM = 222_000, 110_000
# Programs that keep a card's memory busy, and more than it runs one by one.
_ENOUGH, _MANY = 90, 132
_MOST_STAGES = 9
# Numbers that it can multiply.
_KINDS = (torch.bfloat16, torch.float8_e4m3fn)
# Bytes of a line that a tile has, or twice as many; and elements that a line has whole multiples of.
_SPAN_BYTES = 128
_SPAN = 64
# What is faster so than by a library (H200): rows of large matrices, and of others in models that have none.
_FEW_ROWS = 64
_LARGE_ROWS = (*range(2, _FEW_ROWS + 1), *range(113, 129))
_MOST_ROWS = 256
# In wider models, and in narrower ones, it was not measured.
_WIDTHS = range(1024, 4097)


class StreamedConfig(Struct, frozen=True):
    """Tiles of `rows` times `lines` of the matrix (pairs of them, where it is gated), `span` columns at a time, of which
    `num_stages` are fetched or waited for."""

    rows: int
    lines: int
    span: int
    num_stages: int

    @property
    def num_warps(self) -> int:
        return self.rows // 16


def can_stream(device: torch.device) -> bool:
    is_known = triton.__version__.rpartition(".")[0] in _TRITONS
    return is_known and device.type == "cuda" and capability(device) == (9, 0)


def is_worth_streaming(rows: int, widths: tuple[int, ...], largest: int) -> bool:
    """Whether products of so many rows are, in a model whose matrices have these widths, the hidden size first, and the
    largest of a layer so many elements."""
    is_fit = widths[0] in _WIDTHS and not any(width % _SPAN for width in widths)
    return is_fit and (rows in _LARGE_ROWS if largest >= LARGE else 1 < rows <= _MOST_ROWS)


def is_worth_streaming_alone(rows: int, weight: Tensor) -> bool:
    """Whether one product is, which nothing is joined to."""
    is_fit = weight.dtype in _KINDS and weight.shape[1] % (_SPAN_BYTES // weight.itemsize) == 0
    return is_fit and 1 < rows <= _FEW_ROWS and weight.numel() >= LARGE


def streamed_config(rows: int, height: int, width: int, *, gated: bool, itemsize: int = 2) -> StreamedConfig:
    """Measured on an H200 for hidden sizes of 1024 and 4096."""
    is_large = height * width * (2 if gated else 1) >= LARGE
    tall = 128 if is_large and rows > _FEW_ROWS else 64
    upright = -(-rows // tall)
    # Each tile of lines leaves a sum of squares, and more than 128 of them would take registers that products need.
    lines, least = 64 if gated else 128, 16 if height <= 2048 else 32
    while lines > least and -(-height // lines) * upright < _ENOUGH:
        lines //= 2
    room = _HALF_ROOM if -(-height // lines) * upright > _MANY else _ROOM
    span = _SPAN_BYTES // itemsize
    line_bytes = (tall + (2 if gated else 1) * lines) * itemsize
    if width % (2 * span) == 0 and room >= (2 if rows <= _FEW_ROWS else 3) * (2 * span) * line_bytes:
        span *= 2
    return StreamedConfig(tall, lines, span, min(room // (span * line_bytes), width // span, _MOST_STAGES))


def streamed_product(
    rows: Tensor,
    weight: Tensor,
    out: Tensor,
    config: StreamedConfig,
    *,
    squares: Squares | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    scaled: Tensor | None = None,
    left: Squares | None = None,
    scale: Tensor | None = None,
) -> None:
    """As `fused_product`. `rows` and `weight` in eight bits have a `scale` [1], by which their product is multiplied."""
    (count, width), height = rows.shape, out.shape[1]
    assert weight.shape == ((2 if gated else 1) * height, width) and weight.is_contiguous()
    assert width % config.span == 0 and width // config.span >= config.num_stages
    assert rows.dtype == weight.dtype and rows.dtype in _KINDS
    assert not (gated and (norm is not None or bias is not None or scale is not None))
    adds = norm is not None and scaled is not None and left is not None
    grid = (triton.cdiv(height, config.lines), triton.cdiv(count, config.rows))
    if adds:
        assert left is not None and grid[0] <= len(left.sums)
        left.parts = grid[0]
    _streamed[grid](
        _tiled(rows, filled(rows, config.rows), config.rows, config.span),
        _tiled(weight, len(weight), config.lines, config.span),
        out if scale is None else scale,
        out if bias is None else bias,
        out,
        norm if adds else out,
        scaled if adds else out,
        squares.sums if squares is not None else out,
        left.sums if left is not None else out,
        eps,
        count,
        out.stride(0),
        squares.sums.stride(0) if squares is not None else 0,
        left.sums.stride(0) if left is not None else 0,
        squares.parts if squares is not None else 0,
        width=width,
        height=height,
        most_parts=triton.next_power_of_2(squares.parts) if squares is not None else 0,
        is_scaled=scale is not None,
        biased=bias is not None,
        gated=gated,
        adds=adds,
        tall=config.rows,
        wide=config.lines,
        span=config.span,
        stages=config.num_stages,
        num_warps=config.num_warps,
        launch_pdl=True,
    )


def _tiled(matrix: Tensor, count: int, lines: int, span: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([lines, span], gl.bfloat16 if matrix.itemsize == 2 else gl.float8e4nv)
    return TensorDescriptor(matrix, [count, matrix.shape[1]], list(matrix.stride()), [lines, span], layout)


@gluon.jit(do_not_specialize=["count", "squares_stride", "left_stride", "parts"])
def _streamed(
    rows,
    weight,
    scale,
    bias,
    out,
    norm,
    scaled,
    squares,
    left,
    eps,
    count,
    out_stride,
    squares_stride,
    left_stride,
    parts,
    width: gl.constexpr,
    height: gl.constexpr,
    most_parts: gl.constexpr,
    is_scaled: gl.constexpr,
    biased: gl.constexpr,
    gated: gl.constexpr,
    adds: gl.constexpr,
    tall: gl.constexpr,
    wide: gl.constexpr,
    span: gl.constexpr,
    stages: gl.constexpr,
    num_warps: gl.constexpr,
):
    gdc_launch_dependents()
    itemsize: gl.constexpr = rows.dtype.primitive_bitwidth // 8
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, wide, 32 // itemsize])
    column = gl.program_id(0)
    first, line = gl.program_id(1) * tall, column * wide
    r = first + gl.arange(0, tall, gl.SliceLayout(1, layout))
    c = line + gl.arange(0, wide, gl.SliceLayout(0, layout))
    held = (r < count)[:, None] & (c < height)[None, :]
    place = r.to(gl.int64)[:, None] * out_stride + c[None, :]
    xs = gl.allocate_shared_memory(rows.dtype, [stages, tall, span], rows.layout)
    ws = gl.allocate_shared_memory(rows.dtype, [stages, wide, span], weight.layout)
    us = ws
    if gated:
        us = gl.allocate_shared_memory(rows.dtype, [stages, wide, span], weight.layout)
    full = barriers(stages, 1)
    fence_async_shared()
    for stage in gl.static_range(stages):
        _fetch_lines(weight, ws, us, full, line, height, stage * span, stage, True, tall, wide, span, gated)
    if is_scaled:
        scaling = gl.load(scale)
    if biased:
        added = gl.load(bias + c, mask=c < height, other=0.0).to(gl.float32)
    if adds:
        by = gl.load(norm + c, mask=c < height, other=0.0).to(gl.float32)
    # All before this is no other launch's.
    gdc_wait()
    for stage in gl.static_range(stages):
        fetch(rows, [first, stage * span], full.index(stage), xs.index(stage))
    if most_parts > 0:
        factor = _factors(squares, squares_stride, first, count, parts, eps, width, most_parts, tall, num_warps)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, layout))[:, None]
    if adds:
        before = gl.load(out + place, mask=held, other=0.0)
    nothing = gl.zeros([tall, wide], gl.float32, layout)
    total, other = nothing, warpgroup_mma_init(nothing)
    if itemsize == 2:
        total = warpgroup_mma_init(nothing)
    stage, phase, last = 0, 0, stages - 1
    for step in range(width // span):
        mbarrier.wait(full.index(stage), phase)
        x, w = xs.index(stage), ws.index(stage).permute((1, 0))
        if itemsize == 1:
            # The longer a sum in the tensor cores, the more it loses where its numbers have eight bits.
            part = warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)
            total += warpgroup_mma_wait(0, deps=(part,))
        elif gated:
            total = warpgroup_mma(x, w, total, is_async=True)
            other = warpgroup_mma(x, us.index(stage).permute((1, 0)), other, is_async=True)
            total, other = warpgroup_mma_wait(2, deps=(total, other))
            total, other = warpgroup_mma_init(total), warpgroup_mma_init(other)
        else:
            total = warpgroup_mma(x, w, total, is_async=True)
            total = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(total,)))
        # The tiles of the step before have been read: theirs is the place that is fetched into.
        at = (step - 1 + stages) * span
        is_ahead = (step > 0) & (at < width)
        _fetch_lines(weight, ws, us, full, line, height, at, last, is_ahead, tall, wide, span, gated)
        fetch(rows, [first, at], full.index(last), xs.index(last), pred=is_ahead)
        last = stage
        stage += 1
        if stage == stages:
            stage = 0
            phase ^= 1
    sums = total
    if itemsize == 2:
        sums = warpgroup_mma_wait(0, deps=(total,))
    if is_scaled:
        sums *= scaling
    if most_parts > 0:
        sums *= factor
    if gated:
        beside = warpgroup_mma_wait(0, deps=(other,))
        if most_parts > 0:
            beside *= factor
        sums = sums / (1.0 + gl.exp(-sums)) * beside
    if biased:
        sums += added[None, :]
    if adds:
        sums += before.to(gl.float32)
    stored = sums.to(out.dtype.element_ty)
    gl.store(out + place, stored, mask=held)
    if adds:
        value = stored.to(gl.float32)
        gl.store(scaled + place, (value * by[None, :]).to(scaled.dtype.element_ty), mask=held)
        gl.store(left + column * left_stride + r, gl.sum(gl.where(held, value * value, 0.0), 1), mask=r < count)


@gluon.jit
def _fetch_lines(
    weight,
    ws,
    us,
    full,
    line,
    height,
    at,
    stage,
    is_ahead,
    tall: gl.constexpr,
    wide: gl.constexpr,
    span: gl.constexpr,
    gated: gl.constexpr,
):
    """A tile of the matrix, or both of a pair; `full` waits for one of the rows as well."""
    lines: gl.constexpr = 2 * wide if gated else wide
    itemsize: gl.constexpr = weight.dtype.primitive_bitwidth // 8
    mbarrier.expect(full.index(stage), (tall + lines) * span * itemsize, pred=is_ahead)
    fetch(weight, [line, at], full.index(stage), ws.index(stage), pred=is_ahead)
    if gated:
        fetch(weight, [height + line, at], full.index(stage), us.index(stage), pred=is_ahead)


@gluon.jit
def _factors(
    squares,
    stride,
    first,
    count,
    parts,
    eps,
    width: gl.constexpr,
    most_parts: gl.constexpr,
    tall: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Of the rows' norm."""
    spread: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])
    r = first + gl.arange(0, tall, gl.SliceLayout(0, spread))
    p = gl.arange(0, most_parts, gl.SliceLayout(1, spread))
    seen = (p < parts)[:, None] & (r < count)[None, :]
    sums = gl.load(squares + p[:, None] * stride + r[None, :], mask=seen, other=0.0)
    return gl.rsqrt(gl.sum(sums, 0) / width + eps)
