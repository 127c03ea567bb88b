"""Keys and values of every position, in blocks, on the device. Owns the memory, its poison and blocks in transit.

Knows block numbers; knows neither slots nor plans.
"""

import math
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import InvalidInput
from headrace.core.plan import IntArray
from headrace.weights.shape import ModelShape

_HEADER = struct.Struct("<8s6I")
_MAGIC = {torch.bfloat16: b"HRKV-B16", torch.float32: b"HRKV-F32", torch.float16: b"HRKV-F16"}


def block_bytes(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * block_size * shape.head_dim * dtype.itemsize


class KvPool:
    """`keys` and `values` [layers, blocks, kv heads, block size, head dim]. Under `poison` what is nobody's is NaN."""

    def __init__(
        self,
        shape: ModelShape,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        poison: bool = False,
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._poison = poison
        self._dtype = dtype
        dims = (shape.num_layers, blocks, shape.num_kv_heads, block_size, shape.head_dim)
        self.keys, self.values = (torch.empty(dims, device=device, dtype=dtype) for _ in range(2))
        if poison:
            self.keys.fill_(math.nan)
            self.values.fill_(math.nan)

    def release(self, blocks: IntArray) -> None:
        """Nobody may read these any more."""
        if self._poison and len(blocks):
            which = torch.from_numpy(blocks.astype(np.int64)).to(self.keys.device)
            self.keys.index_fill_(1, which, math.nan)
            self.values.index_fill_(1, which, math.nan)

    def export(self, blocks: Sequence[int]) -> bytes:
        which = self._indices(blocks)
        both = torch.stack((self.keys[:, which], self.values[:, which]))
        return self._header(len(blocks)) + both.view(torch.uint8).cpu().numpy().tobytes()

    def load(self, blocks: Sequence[int], payload: bytes) -> None:
        which = self._indices(blocks)
        header = self._header(len(blocks))
        dims = (2, self.keys.shape[0], len(blocks), *self.keys.shape[2:])
        if payload[: len(header)] != header or len(payload) != len(header) + math.prod(dims) * self._dtype.itemsize:
            raise InvalidInput(
                "the blocks come from another model, block size, dtype or kind of device, or are cut", param="payload"
            )
        if len(blocks):
            body = torch.frombuffer(bytearray(payload[len(header) :]), dtype=self._dtype).view(dims)
            self.keys[:, which], self.values[:, which] = body.to(self.keys.device).unbind(0)

    def _header(self, count: int) -> bytes:
        layers, _, heads, size, dim = self.keys.shape
        return _HEADER.pack(_MAGIC[self._dtype], count, layers, heads, size, dim, 2)

    def _indices(self, blocks: Sequence[int]) -> Tensor:
        if any(not 0 <= block < self.blocks for block in blocks) or len(set(blocks)) < len(blocks):
            raise InvalidInput(f"blocks must be different numbers from 0 to {self.blocks - 1}", param="blocks")
        return torch.tensor(list(blocks), dtype=torch.int64, device=self.keys.device)
