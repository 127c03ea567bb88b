"""Activations as integers: every row under its own scale, in one plane of 8 bits or in two that make 15.

Owns the buffer that integer kernels read. A row that is not finite becomes zeros under a scale that is not
finite, so it fails alone. Knows neither weights nor kernels.
"""

import numpy as np
import torch
from torch import Tensor

# Integers of a plane lie in -PEAK..PEAK.
PEAK = 127
# Two planes: value = STEP * high + low, and `low` never exceeds half a step.
STEP = 128
# Columns behind a row's own. The first two hold the least and the greatest number of an 8-bit kernel, so that
# a kernel which takes its scale from what it is given takes 1, for each row and for all of them together.
MARGIN = 32
_LOW, _HIGH = -128.0, 127.0
# Smaller rows count as zero.
_TINY = 1e-30
# Up to this many rows numpy is the faster to ask. Both do the same operations of IEEE arithmetic, so bits agree.
FEW = 4


class RowPlanes:
    """The integers of at most `max_rows` rows of `width` numbers. A call overwrites what the last one returned."""

    def __init__(self, max_rows: int, width: int, planes: int) -> None:
        assert planes in (1, 2)
        self.width = width
        self.planes = planes
        self._levels = float(PEAK if planes == 1 else PEAK * STEP)
        self._single_levels = np.float32(self._levels)
        self._buffer = torch.zeros(max_rows * planes, width + MARGIN)
        self._buffer[:, width] = _HIGH
        self._buffer[:, width + 1] = _LOW
        self._array = self._buffer.numpy()

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Integers as float32 [planes * m, width + MARGIN], high plane first, and each row's scale [m, 1]."""
        count = rows.shape[0]
        if count <= FEW:
            return self._split_few(rows)
        return self._split_many(rows)

    def _split_few(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        values, count = rows.numpy(), rows.shape[0]
        peaks = np.abs(values).max(1, keepdims=True)
        if not np.isfinite(peaks).all():
            return self._split_many(rows)
        np.maximum(peaks, np.float32(_TINY), out=peaks)
        factors = self._single_levels / peaks
        high = self._array[:count, : self.width]
        if self.planes == 1:
            np.rint(np.multiply(values, factors, out=high), out=high)
        else:
            whole = values * factors
            np.rint(whole, out=whole)
            np.rint(np.multiply(whole, np.float32(1.0 / STEP), out=high), out=high)
            np.subtract(whole, high * np.float32(STEP), out=self._array[count : 2 * count, : self.width])
        peaks /= self._single_levels
        return self._buffer[: count * self.planes], torch.from_numpy(peaks)

    def _split_many(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        count = rows.shape[0]
        peaks = rows.abs().amax(1, keepdim=True).clamp_min_(_TINY)
        integers = self._buffer[: count * self.planes]
        high = integers[:count, : self.width]
        factors = torch.div(self._levels, peaks)
        if self.planes == 1:
            torch.mul(rows, factors, out=high)
            high.round_().nan_to_num_(0.0, 0.0, 0.0)
        else:
            whole = torch.mul(rows, factors).round_().nan_to_num_(0.0, 0.0, 0.0)
            torch.mul(whole, 1.0 / STEP, out=high)
            high.round_()
            torch.sub(whole, high, alpha=STEP, out=integers[count:, : self.width])
        return integers, peaks.div_(self._levels)

    def join(self, products: Tensor) -> Tensor:
        """What a kernel made of the planes, as one [m, n]; `products` is used up."""
        if self.planes == 1:
            return products
        count = products.shape[0] // 2
        return products[:count].mul_(float(STEP)).add_(products[count:])
