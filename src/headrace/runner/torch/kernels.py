"""Integer matrix products on this processor, by several kernels that agree to the last bit.

A kernel takes float32 rows that hold integers, as `planes` makes them, and returns float(exact sum of
integer products). Sums of integers do not depend on how a kernel cuts its work, so the kernel may be chosen
by row count and by the clock without changing a result. Knows neither scales nor layers.
"""

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace.runner.torch.planes import MARGIN, PEAK

# Weights lie in -LARGEST..LARGEST.
LARGEST = 127
_SLICE = 512


class Kernel(Protocol):
    """One weight matrix, packed. `multiply` takes [m, width + MARGIN] and returns a new [m, n]."""

    def multiply(self, rows: Tensor) -> Tensor: ...

    @property
    def size_bytes(self) -> int: ...


KernelMaker = Callable[[Tensor], Kernel]


class OneDnnKernel:
    """oneDNN's dynamic 8-bit product. Its scale for all rows is 1, thanks to the margin; its weight scale is 1.

    The library holds weights as given, as packed, and once more for each of the last two row counts it saw: any other
    one makes it pack them again, which takes longer than the product. So rows are filled up to one of a few counts.
    """

    COPIES = 4
    FORMS = (2, 16, 32, 64)

    def __init__(self, weight: Tensor) -> None:
        padded = torch.nn.functional.pad(weight, (0, MARGIN))
        engine = torch.backends.quantized.engine
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                torch.backends.quantized.engine = "onednn"
                tensor = torch._make_per_tensor_quantized_tensor(padded, 1.0, 0)
                self._packed = torch.ops.quantized.linear_prepack(tensor, None)
            finally:
                torch.backends.quantized.engine = engine
        self._num_weights = padded.numel()

    def multiply(self, rows: Tensor) -> Tensor:
        count = rows.shape[0]
        form = next((form for form in self.FORMS if count <= form), count)
        if form > count:
            filled = rows.new_zeros(form, rows.shape[1])
            filled[:count] = rows
            rows = filled
        product: Tensor = torch.ops.quantized.linear_dynamic(rows, self._packed)
        return product[:count]

    @property
    def size_bytes(self) -> int:
        return self.COPIES * self._num_weights


class WideKernel:
    """Integers in float32: right on every processor. Cut along the width so that every partial sum is exact."""

    def __init__(self, weight: Tensor) -> None:
        self._width = weight.shape[1]
        most = 2**24 // (PEAK * LARGEST)
        self._parts = [(start, _transposed(part)) for start, part in _cut(weight, most)]

    def multiply(self, rows: Tensor) -> Tensor:
        products = [rows[:, start : start + part.shape[0]] @ part for start, part in self._parts]
        if len(products) == 1:
            return products[0]
        # In float64, so that the sum is rounded once, like every other kernel's.
        total = products[0].double()
        for product in products[1:]:
            total += product
        return total.float()

    @property
    def size_bytes(self) -> int:
        return sum(part.numel() * 4 for _, part in self._parts)


KERNELS: dict[str, KernelMaker] = {"onednn": OneDnnKernel, "wide": WideKernel}


class IntegerMatrix:
    """One weight matrix under the kernels chosen for it: the first whose row limit holds the rows at hand."""

    def __init__(self, weight: Tensor, ladder: tuple[tuple[int, str], ...]) -> None:
        made = {name: KERNELS[name](weight) for name in dict.fromkeys(name for _, name in ladder)}
        self._rungs = tuple((limit, made[name]) for limit, name in ladder)
        self.size_bytes = sum(kernel.size_bytes for kernel in made.values())

    def multiply(self, rows: Tensor) -> Tensor:
        for limit, kernel in self._rungs:
            if rows.shape[0] <= limit:
                return kernel.multiply(rows)
        return self._rungs[-1][1].multiply(rows)


def _transposed(weight: Tensor) -> Tensor:
    """As float32, a slice of rows at a time: turned in one piece, most of what is read falls out of the cache unused."""
    turned = torch.empty(weight.shape[1], weight.shape[0])
    for start in range(0, weight.shape[0], _SLICE):
        turned[:, start : start + _SLICE] = weight[start : start + _SLICE].t()
    return turned


def _cut(weight: Tensor, most: int) -> list[tuple[int, Tensor]]:
    return [(start, weight[:, start : start + most]) for start in range(0, weight.shape[1], most)]
