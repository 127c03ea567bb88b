"""Memory that rows in eight bits (float8 e4m3) lie in between the operations of a step, taken once for the largest one.

Owns how many rows a product of them has. Arithmetic and buffers only; needs no Triton.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.weights.shape import ModelShape

EIGHTS = torch.float8_e4m3fn
# Products have rows and widths in whole multiples of this.
ALIGNED = 16


def padded_rows(rows: int) -> int:
    """What is behind the last row is nobody's, and is multiplied with it."""
    return -(-rows // ALIGNED) * ALIGNED


@dataclass(slots=True, frozen=True)
class EightSpace:
    """Rows in eight bits, as products read them, and their factors: of what norms leave, and of what is between."""

    normed: Tensor
    attended: Tensor
    inner: Tensor
    norm_factors: Tensor
    factors: Tensor
    unit: Tensor

    @classmethod
    def make(cls, shape: ModelShape, max_tokens: int, device: torch.device) -> "EightSpace":
        rows = padded_rows(max_tokens)

        def make(dtype: torch.dtype, *dims: int) -> Tensor:
            return torch.zeros(dims, dtype=dtype, device=device)

        return cls(
            normed=make(EIGHTS, rows, shape.hidden_size),
            attended=make(EIGHTS, rows, shape.num_heads * shape.head_dim),
            inner=make(EIGHTS, rows, shape.intermediate_size),
            norm_factors=make(torch.float32, rows),
            factors=make(torch.float32, rows),
            unit=torch.ones(1, dtype=torch.float32, device=device),
        )

    @property
    def size_bytes(self) -> int:
        tensors: list[Tensor] = [getattr(self, name) for name in EightSpace.__slots__]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
