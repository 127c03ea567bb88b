"""Rotary positions: cosines and sines of every position, and turning queries and keys by them.

Products and sums are separate operations: a fused one rounds otherwise at the edges of a vector loop.
"""

import torch
from torch import Tensor

from headrace.weights.rope import rope_frequencies
from headrace.weights.shape import ModelShape


class RotaryTable:
    def __init__(self, shape: ModelShape, context_len: int) -> None:
        frequencies = torch.from_numpy(rope_frequencies(shape))
        angles = torch.arange(context_len, dtype=torch.float32)[:, None] * frequencies
        cosines, sines = angles.cos(), angles.sin()
        self._cosines = torch.cat((cosines, cosines), 1)
        self._sines = torch.cat((-sines, sines), 1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [t, 1, dim]."""
        return self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)


def turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """heads [t, n, dim], turned; the halves of a head are the pairs' first and second members."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    return heads.mul(cosines).add_(swapped.mul_(sines))
