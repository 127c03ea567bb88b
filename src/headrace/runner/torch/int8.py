"""Linear layers in 8-bit integers: exact sums, then one scale per row and one per column.

Every kernel gives the same bits (see `kernels`), so results depend on neither row count nor processor. The
norm before a layer costs nothing but its factor: scaling a row does not change its integers.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.runner.torch.kernels import KERNELS, LARGEST
from headrace.runner.torch.linear import Norm, mean_squares
from headrace.runner.torch.planes import FEW, MARGIN, STEP, RowPlanes
from headrace.runner.torch.rotation import Rotation

PlanesOf = Callable[[int, int], RowPlanes]

_STEP = np.float32(STEP)
_TINY = torch.finfo(torch.float32).tiny
# Weights that are quantised at a time: few enough to stay in a processor's cache.
_SLICE = 1 << 18


def quantise(
    weight: Tensor, planes: int = 1, factors: Tensor | None = None, rotation: Rotation | None = None
) -> tuple[Tensor, Tensor]:
    """weight [n, k], its columns times `factors` [k] and then turned, as int8 [planes * n, k + MARGIN], high plane first and the
    margin zero, and one scale per row [n]. A few lines at a time, so that no more of them is ever there scaled and turned."""
    count, width = weight.shape
    integers = torch.empty(planes, count, width + MARGIN, dtype=torch.int8)
    integers[:, :, width:] = 0
    scales = torch.empty(count, 1)
    step = max(1, _SLICE // width) if rotation is None else rotation.lines_at_once
    for start in range(0, count, step):
        rows = slice(start, start + step)
        lines = weight[rows] if factors is None else weight[rows] * factors
        turned = lines if rotation is None else rotation.turn_lines(lines)
        _quantise_rows(turned, integers[:, rows, :width], scales[rows])
    return integers.view(-1, width + MARGIN), scales.view(-1)


def _quantise_rows(weight: Tensor, integers: Tensor, scales: Tensor) -> None:
    """Into integers [planes, n, k] and scales [n, 1]."""
    planes = integers.shape[0]
    low, high = torch.aminmax(weight, dim=1, keepdim=True)
    torch.maximum(high, low.neg_(), out=scales).div_(LARGEST if planes == 1 else LARGEST * STEP)
    # Smaller rows count as zero: such a scale is not precise enough to keep integers within bounds.
    scales.masked_fill_(scales < _TINY, 1.0)
    whole = weight.div(scales).round_()
    if planes == 1:
        integers[0] = whole
        return
    high = whole.div(STEP).round_()
    integers[0] = high
    integers[1] = whole.sub_(high, alpha=STEP)


class Int8Linear:
    """`planes_of(width, planes)` finds the buffer that layers of one width share. Under a `rotation` it reads turned rows."""

    def __init__(
        self,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        norm: Norm | None = None,
        kernel: str,
        planes_of: PlanesOf,
        planes: int = 1,
        weight_planes: int = 1,
        rotation: Rotation | None = None,
    ) -> None:
        integers, self._scales = quantise(weight, weight_planes, None if norm is None else norm.weight, rotation)
        self._matrix = KERNELS[kernel](integers)
        self._planes = planes_of(weight.shape[1], planes)
        self._scale_array = self._scales.numpy()
        self._weight_planes = weight_planes
        self._bias = bias
        self._eps = None if norm is None else norm.eps

    def project(self, rows: Tensor) -> Tensor:
        integers, scales = self._planes.split(rows)
        return self._finish(integers, scales)

    def project_normed(self, rows: Tensor) -> Tensor:
        assert self._eps is not None
        integers, scales = self._planes.split(rows)
        return self._finish(integers, scales.div_(mean_squares(rows, self._eps).sqrt_()))

    def _finish(self, integers: Tensor, scales: Tensor) -> Tensor:
        if scales.shape[0] <= FEW:
            return self._finish_few(self._matrix.multiply(integers).numpy(), scales.numpy())
        product = self._planes.join(self._matrix.multiply(integers))
        if self._weight_planes == 2:
            half = product.shape[1] // 2
            product = product[:, :half].mul_(float(STEP)).add_(product[:, half:])
        product.mul_(self._scales).mul_(scales)
        return product if self._bias is None else product.add_(self._bias)

    def _finish_few(self, parts: NDArray[np.float32], scales: NDArray[np.float32]) -> Tensor:
        """The same operations on a few rows, by numpy."""
        if self._planes.planes == 2:
            high, low = parts[: len(scales)], parts[len(scales) :]
            parts = np.add(np.multiply(high, _STEP, out=high), low, out=high)
        if self._weight_planes == 2:
            half = parts.shape[1] // 2
            high, low = parts[:, :half], parts[:, half:]
            parts = np.add(np.multiply(high, _STEP, out=high), low, out=high)
        parts *= self._scale_array
        parts *= scales
        product = torch.from_numpy(parts)
        return product if self._bias is None else product.add_(self._bias)

    @property
    def size_bytes(self) -> int:
        return self._matrix.size_bytes + self._scales.numel() * 4
