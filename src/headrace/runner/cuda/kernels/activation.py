# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""silu(gate) * up, of the product that holds both."""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.early import await_inputs, starts_early

_TILE = 1024


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """`gate_up` [rows, 2 * width], gates first; `out` [rows, width]."""
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


@triton.jit
def _silu_mul(gate_up, out, gate_stride, out_stride, width: tl.constexpr, tile: tl.constexpr, early: tl.constexpr):
    await_inputs(early)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * tile + tl.arange(0, tile)
    held = i < width
    gate = tl.load(gate_up + row * gate_stride + i, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_stride + width + i, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=held)
