"""Matrix products by the libraries, which choose their kernel by the number of rows: which library, by size.

Libraries are asked while a graph is captured, so that the choice costs a step nothing.
"""

import torch
from torch import Tensor

# Where cuBLASLt's own choice of kernel is the faster one, measured on an H200: matrices of this size, and these rows.
_LARGE = 1 << 24
_FLAT_ROWS = range(25, 97)
_TALL_ROWS = range(49, 65)


def library_product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`rows` [n, width] times `weight` [height, width], plus `bias`."""
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def fastest_product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The same by the faster of the libraries."""
    height, width = weight.shape
    chosen = _FLAT_ROWS if width >= height else _TALL_ROWS
    if not rows.is_cuda or len(rows) not in chosen or weight.numel() < _LARGE:
        library_product(rows, weight, bias, out)
        return
    usual = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    library_product(rows, weight, bias, out)
    torch.backends.cuda.preferred_blas_library(usual)


def scaled_product(rows: Tensor, weight: Tensor, unit: Tensor, scale: Tensor, out: Tensor) -> None:
    """`rows` [n, width] times `weight` [height, width], both in eight bits, times two scales of one number each: only with
    these is the library's kernel its fastest."""
    if rows.is_cuda:
        torch._scaled_mm(rows, weight.t(), scale_a=unit, scale_b=scale, out_dtype=out.dtype, out=out)
    else:
        plain_scaled_product(rows, weight, unit, scale, out)


def plain_scaled_product(rows: Tensor, weight: Tensor, unit: Tensor, scale: Tensor, out: Tensor) -> None:
    """The same in float32."""
    out.copy_((rows.float() @ weight.float().t()) * (unit * scale))
