"""Linear layers in 4 bits, groups of 32 along the width: a scale and an offset for each group.

The kernel knows scales only, so offsets act on the sums of each group's inputs, as a small product of its
own. Weights that were 4-bit groups in their file come through unchanged but for the rounding of scales.
"""

import torch
from torch import Tensor

from headrace.runner.torch.int8 import PlanesOf
from headrace.runner.torch.linear import Norm, normalise, padded_product
from headrace.runner.torch.planes import MARGIN

GROUP = 32


def quantise_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [n, k] as digits 0..15 (uint8), and scales and offsets [n, k / 32]: w = scale * (digit - 8) + offset."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    steps = (high - low).div_(15.0)
    steps.masked_fill_(steps == 0.0, 1.0)
    digits = (groups - low).div_(steps).round_().clamp_(0, 15)
    scales = steps.to(torch.bfloat16)
    # The offset takes up what rounding the scale moved, on average over the group.
    offsets = (groups - (digits - 8.0) * scales.float()).mean(-1)
    return digits.to(torch.uint8).view_as(weight), scales.squeeze(-1), offsets


def has_native_kernel() -> bool:
    """Elsewhere the operation exists as a plain loop, hundreds of times slower than any other dtype."""
    return bool(torch.backends.kleidiai.is_available())  # type: ignore[no-untyped-call]


class Int4Linear:
    """Needs a width that is a multiple of 32."""

    def __init__(
        self,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        norm: Norm | None = None,
        min_rows: int,
        planes_of: PlanesOf,
        planes: int = 1,
    ) -> None:
        digits, scales, offsets = quantise_groups(weight)
        digits = torch.nn.functional.pad(digits, (0, MARGIN), value=8)
        scales = torch.nn.functional.pad(scales, (0, MARGIN // GROUP), value=1.0)
        self._num_rows, self._width = digits.shape
        pairs = (digits[:, 1::2] << 4 | digits[:, ::2]).contiguous()
        self._packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
            pairs, scales.contiguous(), None, GROUP, self._width, self._num_rows
        )
        self._offsets = offsets.t().contiguous()
        self._planes = planes_of(weight.shape[1], planes)
        self._bias, self._norm, self._min_rows = bias, norm, min_rows

    def project(self, rows: Tensor) -> Tensor:
        integers, scales = self._planes.split(rows)
        product = self._planes.join(self.multiply(integers)).mul_(scales)
        sums = rows.view(rows.shape[0], -1, GROUP).sum(-1)
        product.add_(padded_product(sums, self._offsets, self._min_rows))
        return product if self._bias is None else product.add_(self._bias)

    def project_normed(self, rows: Tensor) -> Tensor:
        assert self._norm is not None
        return self.project(normalise(rows, self._norm))

    def multiply(self, integers: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(
            integers, self._packed, GROUP, self._width, self._num_rows
        )
        return product

    @property
    def size_bytes(self) -> int:
        return int(self._packed.numel() * self._packed.element_size()) + self._offsets.numel() * 4
