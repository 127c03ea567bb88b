# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Products of some rows with a matrix and what lies between them: norms, gates, sums with the residual, in one launch each.

A norm's factor is common to its row: whoever writes a row leaves the row times the norm's weights, and the squares of
what it wrote; whoever reads it sums the squares and scales its own sums. So no launch waits for whole rows. Where rows
are few, programs would be too: columns are split among them, and the last to finish adds up the parts, in order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.runner.cuda.kernels.early import await_inputs, let_next_start, starts_early
from headrace.runner.cuda.products import LARGE
from headrace.runner.cuda.squares import Squares

MOST_ROWS = 256
# Of shared memory that a program may need; later cards of other kinds have half as much.
FUSED_BYTES = 200 << 10
# From so many elements on a library's products are the faster ones, the launches that are spared included: of many rows,
# and of any number.
_MANY_ROWS = 128
_MIDDLING = 1 << 22
_TICKETS = 4096
_PIECES = 1 << 20


class FusedConfig(Struct, frozen=True):
    """Tiles of `rows` times `lines` of the matrix (pairs of them, where it is gated), `span` columns at a time; `splits`
    programs share the columns of a tile."""

    rows: int
    lines: int
    span: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


def is_worth_fusing(rows: int, largest: int) -> bool:
    """Whether products of so many rows are, in a model whose largest matrix of a layer has so many elements."""
    return largest < LARGE and 1 < rows <= (_MANY_ROWS if largest >= _MIDDLING else MOST_ROWS)


def fused_config(rows: int, height: int, width: int, *, gated: bool) -> FusedConfig:
    """Measured on an H200 for hidden sizes of 1024: some hundred programs, however few the rows are."""
    low, few = height < 2048, rows <= 16
    if few:
        tall, lines, splits = 16, 32, 4 if low or gated else 2
    elif rows <= 64:
        tall, lines, splits = (64, 16, 4) if low else (64, 32, 1)
    elif rows <= _MANY_ROWS:
        tall, lines, splits = (64, 32, 2) if low else (64, 64, 1)
    else:
        tall, lines, splits = 64, 64, 1 if gated or not low else 2
    span = 64 if width % 128 else 128
    # A part begins where a tile does.
    splits = splits if width % (splits * span) == 0 else 1
    return FusedConfig(tall, lines, span, splits, num_stages=6 if few and not gated else 4)


@dataclass(slots=True, frozen=True)
class FusedScratch:
    """What programs that share a tile leave for the last of them. `tickets` are zero between launches."""

    pieces: Tensor
    tickets: Tensor

    @classmethod
    def make(cls, device: torch.device) -> "FusedScratch":
        return cls(
            torch.empty(_PIECES, dtype=torch.float32, device=device),
            torch.zeros(_TICKETS, dtype=torch.int32, device=device),
        )


def start_rows(
    ids: Tensor, embeddings: Tensor, norm: Tensor, residual: Tensor, scaled: Tensor, squares: Squares
) -> None:
    """`residual` [rows, width] becomes the lines of `embeddings` that `ids` name; `scaled` and `squares` are for the
    first norm. Not started early: kernels after it read what the slots' update wrote before they wait for anybody."""
    rows, width = residual.shape
    padded = triton.next_power_of_2(width)
    early = starts_early(residual.device)
    squares.parts = 1
    _start[(rows,)](
        ids,
        embeddings,
        norm,
        residual,
        scaled,
        squares.sums,
        width=width,
        padded=padded,
        early=early,
        num_warps=min(8, max(1, padded // 512)),
    )


def fused_product(
    rows: Tensor,
    weight: Tensor,
    out: Tensor,
    config: FusedConfig,
    scratch: FusedScratch,
    *,
    squares: Squares | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    norm: Tensor | None = None,
    scaled: Tensor | None = None,
    left: Squares | None = None,
) -> None:
    """`rows` [n, width], of a norm whose `squares` are given, times `weight` [height, width], plus `bias`, into `out`
    [n, height]. `gated`: `weight` [2 height, width], gates first, and `out` is silu(gate) * up. With `norm`: `out` is
    raised by it, and `scaled` and `left` are for that norm, which comes next."""
    (count, width), height = rows.shape, out.shape[1]
    assert weight.shape == ((2 if gated else 1) * height, width) and weight.is_contiguous()
    assert config.splits == 1 or width % (config.splits * config.span) == 0
    assert not (gated and (norm is not None or bias is not None))
    adds = norm is not None and scaled is not None and left is not None
    grid = (triton.cdiv(height, config.lines), triton.cdiv(count, config.rows), config.splits)
    if config.splits > 1:
        needed = grid[0] * grid[1] * grid[2] * config.rows * config.lines * (2 if gated else 1)
        assert scratch.pieces.numel() >= needed and scratch.tickets.numel() >= grid[0] * grid[1]
    if adds:
        assert left is not None and grid[0] <= len(left.sums)
        left.parts = grid[0]
    early = starts_early(rows.device)
    sums = squares.sums if squares is not None else scratch.pieces
    _fused[grid](
        TensorDescriptor(rows, [filled(rows, config.rows), width], list(rows.stride()), [config.rows, config.span]),
        TensorDescriptor.from_tensor(weight, [config.lines, config.span]),
        out if bias is None else bias,
        out,
        norm if adds else out,
        scaled if adds else out,
        sums,
        left.sums if left is not None else scratch.pieces,
        scratch.pieces,
        scratch.tickets,
        eps,
        count,
        out.stride(0),
        squares.sums.stride(0) if squares is not None else 0,
        left.sums.stride(0) if left is not None else 0,
        squares.parts if squares is not None else 0,
        width=width,
        height=height,
        most_parts=triton.next_power_of_2(squares.parts) if squares is not None else 0,
        biased=bias is not None,
        gated=gated,
        adds=adds,
        tall=config.rows,
        wide=config.lines,
        span=config.span,
        splits=config.splits,
        early=early,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=early,
    )


def filled(rows: Tensor, tall: int) -> int:
    """How many rows to fetch tiles of `tall` from, so that none is cut off where there is memory behind the rows: what lies
    there is anything, and its sums are not kept. Cut off tiles are fetched at a fraction of the speed (H200)."""
    behind = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset() - rows.shape[1]
    return min(1 + behind // rows.stride(0), -(-len(rows) // tall) * tall)


@triton.jit
def _start(
    ids, embeddings, norm, residual, scaled, squares, width: tl.constexpr, padded: tl.constexpr, early: tl.constexpr
):
    let_next_start(early)
    i = tl.arange(0, padded)
    held = i < width
    factor = tl.load(norm + i, mask=held, other=0.0).to(tl.float32)
    await_inputs(early)
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(embeddings + tl.load(ids + row).to(tl.int64) * width + i, mask=held, other=0.0)
    value = line.to(tl.float32)
    tl.store(residual + row * width + i, line, mask=held)
    tl.store(scaled + row * width + i, (value * factor).to(scaled.dtype.element_ty), mask=held)
    tl.store(squares + row, tl.sum(value * value, 0))


@triton.jit(do_not_specialize=["count", "squares_stride", "left_stride", "parts"])
def _fused(
    rows,
    weight,
    bias,
    out,
    norm,
    scaled,
    squares,
    left,
    pieces,
    tickets,
    eps,
    count,
    out_stride,
    squares_stride,
    left_stride,
    parts,
    width: tl.constexpr,
    height: tl.constexpr,
    most_parts: tl.constexpr,
    biased: tl.constexpr,
    gated: tl.constexpr,
    adds: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    span: tl.constexpr,
    splits: tl.constexpr,
    early: tl.constexpr,
):
    let_next_start(early)
    stretch: tl.constexpr = width // splits
    column, split = tl.program_id(0), tl.program_id(2)
    r = tl.program_id(1) * tall + tl.arange(0, tall)
    c = column * wide + tl.arange(0, wide)
    first = tl.program_id(1) * tall
    total = tl.zeros([tall, wide], tl.float32)
    other = tl.zeros([tall, wide], tl.float32)
    await_inputs(early)
    for at in range(split * stretch, split * stretch + stretch, span):
        x = rows.load([first, at])
        total = tl.dot(x, weight.load([column * wide, at]).T, total)
        if gated:
            other = tl.dot(x, weight.load([height + column * wide, at]).T, other)
    is_last = True
    if splits > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + column
        inside = tl.arange(0, tall)[:, None] * wide + tl.arange(0, wide)[None, :]
        size: tl.constexpr = tall * wide
        each: tl.constexpr = size * 2 if gated else size
        home = pieces + (tile * splits).to(tl.int64) * each + inside
        tl.store(home + split * each, total)
        if gated:
            tl.store(home + split * each + size, other)
        # Every thread's part is written before one of them says so.
        tl.debug_barrier()
        is_last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(tickets + tile, 0)
            total = tl.zeros([tall, wide], tl.float32)
            other = tl.zeros([tall, wide], tl.float32)
            for part in tl.static_range(splits):
                total += tl.load(home + part * each, cache_modifier=".cg")
                if gated:
                    other += tl.load(home + part * each + size, cache_modifier=".cg")
    if is_last:
        if most_parts > 0:
            p = tl.arange(0, most_parts)
            seen = (p < parts)[:, None] & (r < count)[None, :]
            sums = tl.load(squares + p[:, None] * squares_stride + r[None, :], mask=seen, other=0.0)
            factor = tl.rsqrt(tl.sum(sums, 0) / width + eps)[:, None]
            total *= factor
            other *= factor
        if gated:
            total = total / (1.0 + tl.exp(-total)) * other
        if biased:
            total += tl.load(bias + c, mask=c < height, other=0.0).to(tl.float32)[None, :]
        held = (r < count)[:, None] & (c < height)[None, :]
        place = r.to(tl.int64)[:, None] * out_stride + c[None, :]
        if adds:
            total += tl.load(out + place, mask=held, other=0.0).to(tl.float32)
        stored = total.to(out.dtype.element_ty)
        tl.store(out + place, stored, mask=held)
        if adds:
            value = stored.to(tl.float32)
            by = tl.load(norm + c, mask=c < height, other=0.0).to(tl.float32)
            tl.store(scaled + place, (value * by[None, :]).to(scaled.dtype.element_ty), mask=held)
            tl.store(left + column * left_stride + r, tl.sum(tl.where(held, value * value, 0.0), 1), mask=r < count)
