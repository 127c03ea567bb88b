"""Memory that the experts of a layer compute in, taken once for the largest step: no size in it depends on who is chosen.

Owns how many tiles of rows experts can need. A pair is a row and one of the experts that it chose, numbered
`row * num_chosen + rank`. Arithmetic and buffers only; needs no Triton.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headrace.weights.shape import ExpertShape

# Rows that one program computes with one expert, for few pairs and for many.
LOW_TILE = 16
HIGH_TILE = 64


def most_tiles(pairs: int, num_experts: int, tile: int) -> int:
    """However the pairs fall: whole tiles, and one that is not whole for each expert that somebody chose."""
    return pairs // tile + min(num_experts, pairs)


@dataclass(slots=True, frozen=True)
class ExpertSpace:
    """`chosen` and `weights` [tokens, num chosen], -1 for rows that ask nobody; `counts` [experts]; `owners` [tiles] names
    each tile's expert, -1 behind the last; `order` [tiles * rows] the pairs of each tile, -1 where it is not whole;
    `inner` and `given` [pairs, ...] what experts have in the middle and at their end."""

    chosen: Tensor
    weights: Tensor
    counts: Tensor
    owners: Tensor
    order: Tensor
    inner: Tensor
    given: Tensor

    @classmethod
    def make(
        cls, experts: ExpertShape, hidden_size: int, max_tokens: int, device: torch.device, dtype: torch.dtype
    ) -> "ExpertSpace":
        pairs = max_tokens * experts.num_chosen
        tiles = {tile: most_tiles(pairs, experts.num_experts, tile) for tile in (LOW_TILE, HIGH_TILE)}

        def words(*dims: int) -> Tensor:
            return torch.zeros(dims, dtype=torch.int32, device=device)

        return cls(
            chosen=words(max_tokens, experts.num_chosen),
            weights=torch.zeros(max_tokens, experts.num_chosen, dtype=torch.float32, device=device),
            counts=words(experts.num_experts),
            owners=words(max(tiles.values())),
            order=words(max(tile * count for tile, count in tiles.items())),
            inner=torch.zeros(pairs, experts.inner_size, dtype=dtype, device=device),
            given=torch.zeros(pairs, hidden_size, dtype=dtype, device=device),
        )

    @property
    def size_bytes(self) -> int:
        tensors: list[Tensor] = [getattr(self, field.name) for field in fields(self)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
