# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""The product of one row with a matrix, and what lies around it: the norm before, the gate, bias or sum after.

A step of one row reads every weight once and computes next to nothing: a program reads some lines of the matrix whole,
its first part before the row is there. The norm's factor is common to the row, so that it is applied to sums; so is the
scale of a matrix in eight bits.
"""

import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from headrace.runner.cuda.kernels.early import await_inputs, let_next_start, starts_early


class RowConfig(Struct, frozen=True):
    """`lines` of the matrix (pairs of them, where it is gated) to a program, `span` columns at a time."""

    lines: int
    span: int
    num_warps: int = 4


def row_config(height: int, width: int, *, gated: bool) -> RowConfig:
    """Measured on an H200, for widths from 576 to 14336. Small matrices want many programs, large ones long reads."""
    span = min(1024, triton.next_power_of_2(width))
    if height * width >= 1 << 24:
        return RowConfig(8, span) if gated or width > height or height > width else RowConfig(4, span, 2)
    if gated:
        return RowConfig(2, span, 2 if height * width >= 1 << 20 else 4)
    small = height * width < 1 << 20
    if height > width:
        return RowConfig(8, span) if small else RowConfig(4, span, 1)
    is_long = width > 1024 if small else width % 2048 == 0
    return RowConfig(2, 2048, 4) if is_long else RowConfig(2, span, 2)


def row_product(
    row: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    adds: bool = False,
    gated: bool = False,
    scale: Tensor | None = None,
    config: RowConfig | None = None,
) -> None:
    """`row` [1, width] after RMSNorm by `norm`, where given; `weight` [height, width]; `out` [1, height] becomes the product
    plus `bias`, or is raised by it (`adds`). `gated`: `weight` [2 height, width], gates first, and `out` is
    silu(gate) * up. `scale` [1]: what `weight` is to be multiplied with."""
    height, width = out.shape[1], row.shape[1]
    assert row.shape[0] == 1 and weight.shape == ((2 if gated else 1) * height, width) and weight.is_contiguous()
    assert not (gated and (adds or bias is not None))
    config = config or row_config(height, width, gated=gated)
    early = starts_early(row.device)
    _row_product[(triton.cdiv(height, config.lines),)](
        row,
        row if norm is None else norm,
        weight,
        row if bias is None else bias,
        out,
        row if scale is None else scale,
        eps,
        width=width,
        height=height,
        lines=config.lines,
        span=config.span,
        normed=norm is not None,
        biased=bias is not None,
        adds=adds,
        gated=gated,
        scaled=scale is not None,
        early=early,
        num_warps=config.num_warps,
        launch_pdl=early,
    )


@triton.jit
def _row_product(
    row,
    norm,
    weight,
    bias,
    out,
    matrix_scale,
    eps,
    width: tl.constexpr,
    height: tl.constexpr,
    lines: tl.constexpr,
    span: tl.constexpr,
    normed: tl.constexpr,
    biased: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    scaled: tl.constexpr,
    early: tl.constexpr,
):
    let_next_start(early)
    n = tl.program_id(0) * lines + tl.arange(0, lines)
    k = tl.arange(0, span)
    steps: tl.constexpr = (width + span - 1) // span
    line = weight + n[:, None].to(tl.int64) * width + k[None, :]
    w = _part(line, n, k, 0, width, height, lines, span)
    if gated:
        u = _part(line + height * width, n, k, 0, width, height, lines, span)
    total = tl.zeros([lines, span], tl.float32)
    other = tl.zeros([lines, span], tl.float32)
    squares = tl.zeros([span], tl.float32)
    await_inputs(early)
    for step in tl.static_range(steps):
        at = step * span + k
        x = tl.load(row + at, mask=at < width, other=0.0).to(tl.float32)
        if normed:
            squares += x * x
            x *= tl.load(norm + at, mask=at < width, other=0.0).to(tl.float32)
        held = w
        if step + 1 < steps:
            w = _part(line, n, k, (step + 1) * span, width, height, lines, span)
        total += held.to(tl.float32) * x[None, :]
        if gated:
            lifted = u
            if step + 1 < steps:
                u = _part(line + height * width, n, k, (step + 1) * span, width, height, lines, span)
            other += lifted.to(tl.float32) * x[None, :]
    value = tl.sum(total, 1)
    scale = 1.0
    if normed:
        scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    if scaled:
        scale *= tl.load(matrix_scale)
    value *= scale
    if gated:
        value = value / (1.0 + tl.exp(-value)) * (tl.sum(other, 1) * scale)
    if biased:
        value += tl.load(bias + n, mask=n < height, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(out + n, mask=n < height, other=0.0).to(tl.float32)
    tl.store(out + n, value.to(out.dtype.element_ty), mask=n < height)


@triton.jit
def _part(
    line,
    n,
    k,
    at,
    width: tl.constexpr,
    height: tl.constexpr,
    lines: tl.constexpr,
    span: tl.constexpr,
):
    if width % span == 0 and height % lines == 0:
        return tl.load(line + at)
    else:
        return tl.load(line + at, mask=(n < height)[:, None] & (at + k < width)[None, :], other=0.0)
