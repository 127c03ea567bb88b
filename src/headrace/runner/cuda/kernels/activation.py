# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""silu(gate) * up, of the product that holds both. In eight bits (see `eights`) a program has a whole row."""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.early import await_inputs, let_next_start, starts_early
from headrace.runner.cuda.kernels.eights import in_eights

_TILE = 1024


def silu_mul(
    gate_up: Tensor, out: Tensor, *, row_factors: Tensor | None = None, out_factors: Tensor | None = None
) -> None:
    """`gate_up` [rows, 2 * width], gates first, times `row_factors` [rows] where given; `out` [rows, width], in eight bits
    where `out_factors` [rows] are given."""
    if row_factors is not None or out_factors is not None:
        assert row_factors is not None and out_factors is not None
        _silu_mul_in_eights(gate_up, out, row_factors, out_factors)
        return
    rows, width = out.shape
    early = starts_early(gate_up.device)
    _silu_mul[(rows, triton.cdiv(width, _TILE))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        width=width,
        tile=_TILE,
        early=early,
        num_warps=4,
        launch_pdl=early,
    )


def _silu_mul_in_eights(gate_up: Tensor, out: Tensor, row_factors: Tensor, out_factors: Tensor) -> None:
    rows, width = out.shape
    padded, early = triton.next_power_of_2(width), starts_early(gate_up.device)
    _silu_mul_eights[(rows,)](
        gate_up,
        out,
        row_factors,
        out_factors,
        gate_up.stride(0),
        out.stride(0),
        width=width,
        padded=padded,
        early=early,
        num_warps=min(32, max(1, padded // 512)),
        launch_pdl=early,
    )


@triton.jit
def _silu_mul(gate_up, out, gate_stride, out_stride, width: tl.constexpr, tile: tl.constexpr, early: tl.constexpr):
    let_next_start(early)
    await_inputs(early)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * tile + tl.arange(0, tile)
    held = i < width
    gate = tl.load(gate_up + row * gate_stride + i, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_stride + width + i, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=held)


@triton.jit
def _silu_mul_eights(
    gate_up,
    out,
    row_factors,
    out_factors,
    gate_stride,
    out_stride,
    width: tl.constexpr,
    padded: tl.constexpr,
    early: tl.constexpr,
):
    let_next_start(early)
    await_inputs(early)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    held = i < width
    factor = tl.load(row_factors + row)
    gate = tl.load(gate_up + row * gate_stride + i, mask=held, other=0.0).to(tl.float32) * factor
    up = tl.load(gate_up + row * gate_stride + width + i, mask=held, other=0.0).to(tl.float32) * factor
    value, left = in_eights(gate / (1.0 + tl.exp(-gate)) * up)
    tl.store(out + row * out_stride + i, value.to(out.dtype.element_ty), mask=held)
    tl.store(out_factors + row, left)
