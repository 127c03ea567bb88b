# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Rows in eight bits (float8 e4m3) with a factor each, and back: what products of eight-bit matrices read and give.

A row's factor takes its largest value to the largest number there is, so that no row depends on another. A row that is
not finite stays so. Products leave the factors out; whoever reads their rows multiplies with them.
"""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.early import await_inputs, let_next_start, starts_early

# The largest float8 e4m3, and what a row of zeros counts as.
LARGEST = tl.constexpr(448.0)
LEAST = tl.constexpr(1e-30)


def quantise(rows: Tensor, out: Tensor, out_factors: Tensor) -> None:
    """`rows`, `out` [rows, width]; `out_factors` [rows]: `out` times these is `rows`."""
    count, width = rows.shape
    padded, early = triton.next_power_of_2(width), starts_early(rows.device)
    _quantise[(count,)](
        rows,
        out,
        out_factors,
        rows.stride(0),
        out.stride(0),
        width=width,
        padded=padded,
        early=early,
        num_warps=min(16, max(1, padded // 512)),
        launch_pdl=early,
    )


def rescale(rows: Tensor, row_factors: Tensor, bias: Tensor) -> None:
    """`rows` [rows, width] become themselves times their factor, plus `bias` [width]."""
    count, width = rows.shape
    padded, early = triton.next_power_of_2(width), starts_early(rows.device)
    _rescale[(count,)](
        rows,
        row_factors,
        bias,
        rows.stride(0),
        width=width,
        padded=padded,
        early=early,
        num_warps=min(16, max(1, padded // 512)),
        launch_pdl=early,
    )


@triton.jit
def in_eights(value):
    """A whole row, zeros behind its end: (as it is stored but for its dtype, its factor)."""
    most = tl.maximum(tl.max(tl.abs(value), 0), LEAST)
    return value * (LARGEST / most), most / LARGEST


@triton.jit
def _quantise(
    rows, out, out_factors, row_stride, out_stride, width: tl.constexpr, padded: tl.constexpr, early: tl.constexpr
):
    let_next_start(early)
    await_inputs(early)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    held = i < width
    value, factor = in_eights(tl.load(rows + row * row_stride + i, mask=held, other=0.0).to(tl.float32))
    tl.store(out + row * out_stride + i, value.to(out.dtype.element_ty), mask=held)
    tl.store(out_factors + row, factor)


@triton.jit
def _rescale(rows, row_factors, bias, row_stride, width: tl.constexpr, padded: tl.constexpr, early: tl.constexpr):
    let_next_start(early)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    held = i < width
    more = tl.load(bias + i, mask=held, other=0.0).to(tl.float32)
    await_inputs(early)
    place = rows + row * row_stride + i
    value = tl.load(place, mask=held, other=0.0).to(tl.float32) * tl.load(row_factors + row) + more
    tl.store(place, value.to(rows.dtype.element_ty), mask=held)
