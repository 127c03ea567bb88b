"""Keys and values of every position, in blocks: one tensor, all layers of a block together, so that what a few tokens need
is in a few of the system's pages, even where these are large.

Owns the memory, its poison and the bytes of blocks in transit. Knows block numbers; knows neither slots
nor plans. Block `blocks` is nobody's, never written and zero: tables are padded with it.
"""

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.core.errors import InvalidInput
from headrace.core.proc import new_pages
from headrace.weights.shape import ModelShape

_HEADER = struct.Struct("<8s6I")
# Of float32 on a processor, in the order of `cells`: another order needs another name.
_MAGIC = b"HRKVCPU2"


def block_bytes(shape: ModelShape, block_size: int) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * block_size * shape.head_dim * 4


class KvCache:
    """`cells` [blocks + 1, layers, 2, kv heads, block size, head dim]: keys under 0, values under 1."""

    def __init__(self, shape: ModelShape, blocks: int, block_size: int, *, poison: bool = False) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.num_layers = shape.num_layers
        self.num_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self._poison = poison
        dims = (blocks + 1, shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
        self.cells = torch.frombuffer(new_pages(4 * math.prod(dims)), dtype=torch.float32).view(dims)
        if poison:
            self.cells[:blocks].fill_(math.nan)
        # A line is one head's part of a layer of a block, a row one position of it.
        self._lines = self.cells.view(-1, block_size * shape.head_dim)
        self._rows = self.cells.view(-1, shape.head_dim)
        self.lines_per_layer = 2 * shape.num_kv_heads
        self.lines_per_block = shape.num_layers * self.lines_per_layer

    def write(self, rows: Tensor, keys_values: Tensor) -> None:
        """`keys_values` [t, 2 * heads, dim] into the rows numbered `rows` [t * 2 * heads]."""
        self._rows.index_copy_(0, rows, keys_values.reshape(-1, self.head_dim))

    def read(self, lines: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, heads, positions, dim] of the lines [2 * sequences * heads * blocks]."""
        gathered = torch.index_select(self._lines, 0, lines)
        both = gathered.view(2, num_sequences, self.num_heads, -1, self.head_dim)
        return both[0], both[1]

    def release(self, blocks: Sequence[int]) -> None:
        """Nobody may read these any more; under `poison` whoever does gets NaN."""
        if self._poison and len(blocks):
            self.cells.index_fill_(0, torch.tensor(blocks, dtype=torch.int64), math.nan)

    def clear(self, blocks: Sequence[int]) -> None:
        """A block that is read before it is full must hold numbers: weight 0 times NaN is NaN."""
        for block in blocks:
            self.cells[block].zero_()

    def export(self, blocks: Sequence[int]) -> bytes:
        self._check(blocks)
        chosen = self.cells[torch.tensor(blocks, dtype=torch.int64)]
        return self._header(len(blocks)) + chosen.numpy().tobytes()

    def load(self, blocks: Sequence[int], payload: bytes) -> None:
        self._check(blocks)
        header = self._header(len(blocks))
        if payload[: len(header)] != header or len(payload) != len(header) + len(blocks) * self._block_bytes():
            raise InvalidInput(
                "the blocks come from another model, block size, dtype or kind of device, or are cut", param="payload"
            )
        if len(blocks):
            body = torch.frombuffer(bytearray(payload[len(header) :]), dtype=torch.float32)
            self.cells[torch.tensor(blocks, dtype=torch.int64)] = body.view(-1, *self.cells.shape[1:])

    def _header(self, count: int) -> bytes:
        dims = (count, self.num_layers, self.num_heads, self.block_size, self.head_dim, 2)
        return _HEADER.pack(_MAGIC, *dims)

    def _block_bytes(self) -> int:
        return self.cells[0].numel() * 4

    def _check(self, blocks: Sequence[int]) -> None:
        if any(not 0 <= block < self.blocks for block in blocks) or len(set(blocks)) < len(blocks):
            raise InvalidInput(f"blocks must be different numbers from 0 to {self.blocks - 1}", param="blocks")
