# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""RMSNorm of rows, and the sum that comes before it in one pass. Rows may come with a factor each, and be left in eight
bits (see `eights`)."""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.early import await_inputs, let_next_start, starts_early
from headrace.runner.cuda.kernels.eights import in_eights


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, *, out_factors: Tensor | None = None) -> None:
    """`x`, `out` [rows, width]; with `out_factors` [rows], `out` is in eight bits."""
    _launch(x, x, weight, eps, out, None, out_factors, add=False)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    row_factors: Tensor | None = None,
    out_factors: Tensor | None = None,
) -> None:
    """`residual` += `x` (times `row_factors` [rows]); the norm is that of the sum as it was stored."""
    _launch(x, residual, weight, eps, out, row_factors, out_factors, add=True)


def sum_rms_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """`residual` += `parts` [number, rows, width] in float32, added up and then rounded; the norm is that of the sum as it was
    stored."""
    number, rows, width = parts.shape
    padded, early = triton.next_power_of_2(width), starts_early(parts.device)
    _norm_parts[(rows,)](
        parts,
        residual,
        weight,
        out,
        eps,
        rows * width,
        residual.stride(0),
        out.stride(0),
        width=width,
        padded=padded,
        number=number,
        early=early,
        num_warps=min(16, max(1, padded // 256)),
        launch_pdl=early,
    )


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    row_factors: Tensor | None,
    out_factors: Tensor | None,
    *,
    add: bool,
) -> None:
    rows, width = x.shape
    padded = triton.next_power_of_2(width)
    early = starts_early(x.device)
    _norm[(rows,)](
        x,
        residual,
        weight,
        out,
        x if row_factors is None else row_factors,
        out if out_factors is None else out_factors,
        eps,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        width=width,
        padded=padded,
        add=add,
        scaled=row_factors is not None,
        eights=out_factors is not None,
        early=early,
        num_warps=min(16, max(1, padded // 512)),
        launch_pdl=early,
    )


@triton.jit
def _norm(
    x,
    residual,
    weight,
    out,
    row_factors,
    out_factors,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    width: tl.constexpr,
    padded: tl.constexpr,
    add: tl.constexpr,
    scaled: tl.constexpr,
    eights: tl.constexpr,
    early: tl.constexpr,
):
    let_next_start(early)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    held = i < width
    factor = tl.load(weight + i, mask=held, other=0.0).to(tl.float32)
    await_inputs(early)
    value = tl.load(x + row * x_stride + i, mask=held, other=0.0).to(tl.float32)
    if scaled:
        value *= tl.load(row_factors + row)
    if add:
        value += tl.load(residual + row * residual_stride + i, mask=held, other=0.0).to(tl.float32)
        stored = value.to(residual.dtype.element_ty)
        tl.store(residual + row * residual_stride + i, stored, mask=held)
        value = stored.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * factor
    if eights:
        normed, left = in_eights(normed)
        tl.store(out_factors + row, left)
    tl.store(out + row * out_stride + i, normed.to(out.dtype.element_ty), mask=held)


@triton.jit
def _norm_parts(
    parts,
    residual,
    weight,
    out,
    eps,
    part_stride,
    residual_stride,
    out_stride,
    width: tl.constexpr,
    padded: tl.constexpr,
    number: tl.constexpr,
    early: tl.constexpr,
):
    let_next_start(early)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    held = i < width
    factor = tl.load(weight + i, mask=held, other=0.0).to(tl.float32)
    await_inputs(early)
    before = tl.load(residual + row * residual_stride + i, mask=held, other=0.0).to(tl.float32)
    value = tl.load(parts + row * width + i, mask=held, other=0.0)
    for part in tl.static_range(1, number):
        value += tl.load(parts + part * part_stride + row * width + i, mask=held, other=0.0)
    value = value.to(residual.dtype.element_ty).to(tl.float32) + before
    stored = value.to(residual.dtype.element_ty)
    tl.store(residual + row * residual_stride + i, stored, mask=held)
    value = stored.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps) * factor
    tl.store(out + row * out_stride + i, normed.to(out.dtype.element_ty), mask=held)
