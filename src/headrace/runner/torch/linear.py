"""Linear layers that treat every row alone, in the reference dtype and as the Protocol the others meet.

Owns padding: a product of very few rows takes another path through the library, so it is computed as one of
`min_rows`. Knows neither layers nor attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Linear(Protocol):
    """rows [m, k] -> new [m, n]. A row of the result depends on the same row of the input alone."""

    def project(self, rows: Tensor) -> Tensor: ...

    def project_normed(self, rows: Tensor) -> Tensor:
        """The same of RMSNorm(rows); the norm's weight was given when the layer was made."""
        ...

    @property
    def size_bytes(self) -> int: ...


@dataclass(slots=True, frozen=True)
class Norm:
    """An RMSNorm before a linear layer; `weight` [k]."""

    weight: Tensor
    eps: float


def mean_squares(rows: Tensor, eps: float) -> Tensor:
    """mean(x²) + eps of each row, [m, 1]."""
    lengths = torch.linalg.vector_norm(rows, 2.0, 1, True)
    means: Tensor = lengths.square_().mul_(1.0 / rows.shape[1]).add_(eps)
    return means


def normalise(rows: Tensor, norm: Norm) -> Tensor:
    return rows.div(mean_squares(rows, norm.eps).sqrt_()).mul_(norm.weight)


def padded_product(rows: Tensor, weight: Tensor, min_rows: int) -> Tensor:
    """rows [m, k] @ weight [k, n] as a product of at least `min_rows` rows."""
    count = rows.shape[0]
    if count >= min_rows:
        return rows @ weight
    wide = rows.new_zeros(min_rows, rows.shape[1])
    wide[:count] = rows
    return (wide @ weight)[:count]


class Fp32Linear:
    """The reference: float32 throughout."""

    def __init__(self, weight: Tensor, *, bias: Tensor | None = None, norm: Norm | None = None, min_rows: int) -> None:
        self._weight = weight.t().contiguous()
        self._bias = bias
        self._norm = norm
        self._min_rows = min_rows

    def project(self, rows: Tensor) -> Tensor:
        product = padded_product(rows, self._weight, self._min_rows)
        return product if self._bias is None else product.add_(self._bias)

    def project_normed(self, rows: Tensor) -> Tensor:
        assert self._norm is not None
        return self.project(normalise(rows, self._norm))

    @property
    def size_bytes(self) -> int:
        return self._weight.numel() * 4


class JoinedLinear:
    """One matrix whose lines were packed in parts, each of which gives its columns of the result."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)

    def project(self, rows: Tensor) -> Tensor:
        return torch.cat([part.project(rows) for part in self._parts], 1)

    def project_normed(self, rows: Tensor) -> Tensor:
        return torch.cat([part.project_normed(rows) for part in self._parts], 1)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self._parts)
