# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""RMSNorm of rows, and the sum that comes before it in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.early import await_inputs, starts_early


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """`x`, `out` [rows, width]."""
    _launch(x, x, weight, eps, out, add=False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """`residual` += `x`; the norm is that of the sum as it was stored."""
    _launch(x, residual, weight, eps, out, add=True)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, *, add: bool) -> None:
    rows, width = x.shape
    padded = triton.next_power_of_2(width)
    early = starts_early(x.device)
    _norm[(rows,)](
        x,
        residual,
        weight,
        out,
        eps,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        width=width,
        padded=padded,
        add=add,
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
    eps,
    x_stride,
    residual_stride,
    out_stride,
    width: tl.constexpr,
    padded: tl.constexpr,
    add: tl.constexpr,
    early: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, padded)
    held = i < width
    factor = tl.load(weight + i, mask=held, other=0.0).to(tl.float32)
    await_inputs(early)
    value = tl.load(x + row * x_stride + i, mask=held, other=0.0).to(tl.float32)
    if add:
        value += tl.load(residual + row * residual_stride + i, mask=held, other=0.0).to(tl.float32)
        stored = value.to(residual.dtype.element_ty)
        tl.store(residual + row * residual_stride + i, stored, mask=held)
        value = stored.to(tl.float32)
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + row * out_stride + i, (scaled * factor).to(out.dtype.element_ty), mask=held)
