"""Integer matrix products on this processor, by several kernels that agree to the last bit.

A kernel takes float32 rows that hold integers, as `planes` makes them, and returns float(exact sum of
integer products). Sums of integers do not depend on how a kernel cuts its work, so the kernel may be chosen
by the clock without changing a result. Knows neither scales nor layers.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition
from typing import Protocol

import torch
from torch import Tensor

from headrace.runner.torch.planes import MARGIN, PEAK

# Weights lie in -LARGEST..LARGEST. Kernels see rows as -128..127 and shift them to 0..255; processors that know nothing better
# add two products of neighbours in 16 bits, and cut off what does not fit: 2 * 255 * 64 does.
LARGEST = 64
_SLICE = 512
# FBGEMM fills up to whole blocks of this many columns.
_FBGEMM_BLOCK = 256


class Kernel(Protocol):
    """One weight matrix, packed from int8 [n, width + MARGIN], whose margin is zero; the
    kernel may keep what it is given. `multiply` takes [m, width + MARGIN] and returns a new [m, n]."""

    def multiply(self, rows: Tensor) -> Tensor: ...

    @property
    def size_bytes(self) -> int: ...


KernelMaker = Callable[[Tensor], Kernel]


class FbgemmKernel:
    """FBGEMM's dynamic 8-bit product, on x86. Its scale for all rows is 1, thanks to the margin; its weight scale is 1."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = _packed(weight, "fbgemm")
        self.size_bytes = _kept_bytes("fbgemm", weight)

    def multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic(rows, self._packed)
        return product


class OneDnnKernel:
    """oneDNN's, likewise.

    The library holds weights as given, as packed, and once more for each of the last two row counts it saw: any other
    one makes it pack them again, which takes longer than the product. So rows are filled up to one of a few counts.
    """

    COPIES = 4
    FORMS = (2, 16, 32, 64)

    def __init__(self, weight: Tensor) -> None:
        self._packed = _packed(weight, "onednn")
        self.size_bytes = _kept_bytes("onednn", weight)

    def multiply(self, rows: Tensor) -> Tensor:
        count = rows.shape[0]
        form = next((form for form in self.FORMS if count <= form), count)
        if form > count:
            filled = rows.new_zeros(form, rows.shape[1])
            filled[:count] = rows
            rows = filled
        product: Tensor = torch.ops.quantized.linear_dynamic(rows, self._packed)
        return product[:count]


class WideKernel:
    """Integers in float32: right on every processor. Cut along the width so that every partial sum is exact."""

    def __init__(self, weight: Tensor) -> None:
        most = 2**24 // (PEAK * LARGEST)
        self._parts = [(start, _transposed(part)) for start, part in _cut(weight[:, :-MARGIN], most)]
        self.size_bytes = _kept_bytes("wide", weight)

    def multiply(self, rows: Tensor) -> Tensor:
        products = [rows[:, start : start + part.shape[0]] @ part for start, part in self._parts]
        if len(products) == 1:
            return products[0]
        # In float64, so that the sum is rounded once, like every other kernel's.
        total = products[0].double()
        for product in products[1:]:
            total += product
        return total.float()


# Those that this processor has; the last one is right on every processor.
KERNELS: dict[str, KernelMaker] = {"onednn": OneDnnKernel, "wide": WideKernel}
if "fbgemm" in torch.backends.quantized.supported_engines:
    KERNELS = {"fbgemm": FbgemmKernel, **KERNELS}


def weight_bytes(name: str, width: int) -> float:
    """What a kernel keeps of each weight of a matrix that is so wide."""
    if name == "fbgemm":
        return -(-(width + MARGIN) // _FBGEMM_BLOCK) * _FBGEMM_BLOCK / width
    return 4.0 if name == "wide" else OneDnnKernel.COPIES * (width + MARGIN) / width


def with_margin(weight: Tensor) -> Tensor:
    """As kernels take it: a copy with columns of nothing behind."""
    return torch.nn.functional.pad(weight, (0, MARGIN))


def _kept_bytes(name: str, weight: Tensor) -> int:
    count, width = weight.shape[0], weight.shape[1] - MARGIN
    return round(weight_bytes(name, width) * count * width)


class _Engine:
    """Which of torch's engines packs is said for the whole process: threads that pack for the same one do so at once, others
    wait, and the last puts back what was there. So with warnings, which are silent meanwhile."""

    def __init__(self) -> None:
        self._turn = Condition()
        self._name = ""
        self._num_users = 0
        self._restore = ExitStack()

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """RuntimeError where there is no such engine."""
        with self._turn:
            self._turn.wait_for(lambda: not self._num_users or self._name == name)
            if not self._num_users:
                self._set(name)
            self._num_users += 1
        try:
            yield
        finally:
            with self._turn:
                self._num_users -= 1
                if not self._num_users:
                    self._restore.close()
                    self._turn.notify_all()

    def _set(self, name: str) -> None:
        before = torch.backends.quantized.engine
        with ExitStack() as restore:
            restore.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            restore.callback(setattr, torch.backends.quantized, "engine", before)
            torch.backends.quantized.engine = name
            self._name, self._restore = name, restore.pop_all()


_engine = _Engine()


def _packed(weight: Tensor, engine: str) -> object:
    """As `linear_dynamic` takes it. RuntimeError where there is no such engine."""
    assert weight.is_contiguous()
    with _engine.use(engine):
        # The same memory under another name: of a head a copy takes as much as what is kept of it.
        tensor = torch._empty_affine_quantized([0], scale=1.0, zero_point=0, dtype=torch.qint8)
        tensor.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
        return torch.ops.quantized.linear_prepack(tensor, None)


def _transposed(weight: Tensor) -> Tensor:
    """As float32, a slice of rows at a time: turned in one piece, most of what is read falls out of the cache unused."""
    turned = torch.empty(weight.shape[1], weight.shape[0])
    for start in range(0, weight.shape[0], _SLICE):
        turned[:, start : start + _SLICE] = weight[start : start + _SLICE].t()
    return turned


def _cut(weight: Tensor, most: int) -> list[tuple[int, Tensor]]:
    return [(start, weight[:, start : start + most]) for start in range(0, weight.shape[1], most)]
