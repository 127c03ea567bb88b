"""Matrix products by the libraries, which choose their kernel by the number of rows: which library, by size.

Libraries are asked while a graph is captured, so that the choice costs a step nothing.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

# Elements of a matrix that is large.
LARGE = 1 << 24
# Where cuBLASLt's own choice of kernel is the faster one, measured on an H200: large matrices, and these rows. Flat ones have at
# least as many columns as lines, steep ones twice as many lines.
_FLAT_ROWS = range(25, 257)
_TALL_ROWS = (*range(49, 65), *range(97, 257))
_STEEP_ROWS = range(49, 65)


def library_product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`rows` [n, width] times `weight` [height, width], plus `bias`."""
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


class Noted(NamedTuple):
    """A product to be made later, and the source that `clusters` must compile for it, if there is any."""

    make: Callable[[], None]
    source: str


# By kind, while they are only noted.
_noted: dict[Hashable, Noted] | None = None


@contextmanager
def products_noted() -> Iterator[list[Noted]]:
    """Inside, on any thread, nothing is multiplied; one product of each kind is in the list afterwards, to be made then:
    the first of a kind takes long, for the library looks for a kernel and loads it, or ours is compiled."""
    global _noted
    _noted = {}
    made: list[Noted] = []
    try:
        yield made
        made.extend(_noted.values())
    finally:
        _noted = None


def note(kind: Hashable, product: Callable[[], None], source: Callable[[], str] = str) -> bool:
    """Whether products are only noted now: then this one is, if it is the first of its kind."""
    if _noted is None:
        return False
    if kind not in _noted:
        _noted[kind] = Noted(product, source())
    return True


def fastest_product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The same by the faster of the libraries."""
    kind = (rows.shape, weight.shape, bias is None)
    if note(kind, partial(fastest_product, rows, weight, bias, out)):
        return
    height, width = weight.shape
    chosen = _FLAT_ROWS if width >= height else (_TALL_ROWS if 2 * width > height else _STEEP_ROWS)
    if not rows.is_cuda or len(rows) not in chosen or weight.numel() < LARGE:
        library_product(rows, weight, bias, out)
        return
    usual = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    library_product(rows, weight, bias, out)
    torch.backends.cuda.preferred_blas_library(usual)


def scaled_product(rows: Tensor, weight: Tensor, unit: Tensor, scale: Tensor, out: Tensor) -> None:
    """`rows` [n, width] times `weight` [height, width], both in eight bits, times two scales of one number each: only with
    these is the library's kernel its fastest."""
    if note((rows.shape, weight.shape), partial(scaled_product, rows, weight, unit, scale, out)):
        return
    if rows.is_cuda:
        torch._scaled_mm(rows, weight.t(), scale_a=unit, scale_b=scale, out_dtype=out.dtype, out=out)
    else:
        plain_scaled_product(rows, weight, unit, scale, out)


def plain_scaled_product(rows: Tensor, weight: Tensor, unit: Tensor, scale: Tensor, out: Tensor) -> None:
    """The same in float32."""
    out.copy_((rows.float() @ weight.float().t()) * (unit * scale))
