"""Sequences in scattered blocks, for tests of attention: whatever no sequence may read is NaN."""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_SIZE = 16
# The interpreter rounds to bfloat16 by cutting bits off, and multiplies it as if it were integers.
HALF = torch.float16


@dataclass(frozen=True)
class Paged:
    keys: Tensor
    values: Tensor
    tables: Tensor
    lengths: Tensor


def paged(lengths: list[int], kv_heads: int, dim: int, *, seed: int = 0, dtype: torch.dtype = HALF) -> Paged:
    """A slot per length. Blocks lie in random order; what lies past a length, and every other block, is NaN."""
    chance = torch.Generator().manual_seed(seed)
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = sum(needed) + 3
    shape = (blocks, kv_heads, BLOCK_SIZE, dim)
    keys = torch.full(shape, torch.nan, dtype=dtype)
    values = torch.full(shape, torch.nan, dtype=dtype)
    free = torch.randperm(blocks, generator=chance).tolist()
    tables = torch.full((len(lengths), max(needed) + 2), -(2**30), dtype=torch.int32)
    for slot, length in enumerate(lengths):
        for index in range(needed[slot]):
            block = free.pop()
            tables[slot, index] = block
            size = min(BLOCK_SIZE, length - index * BLOCK_SIZE)
            keys[block, :, :size] = torch.randn(kv_heads, size, dim, generator=chance).to(dtype)
            values[block, :, :size] = torch.randn(kv_heads, size, dim, generator=chance).to(dtype)
    return Paged(keys, values, tables, torch.tensor(lengths, dtype=torch.int32))


def relative_error(got: Tensor, want: Tensor) -> float:
    """NaN if anything is."""
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
