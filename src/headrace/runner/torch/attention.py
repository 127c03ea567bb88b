"""Paged attention on the CPU: what a step's rows read, and the softmax over it.

A row attends to positions 0 .. p of its own sequence, cut at fixed absolute positions by the kernel; what
lies behind p is masked and adds exact zeros. So neither neighbours nor chunking move a bit of it, provided the
kernel's products depend neither on how many queries share them nor on how far one reads past p. Where that holds
is a processor's matter, found by the probe: `Cuts`. Knows blocks, not slots.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from headrace.runner.torch.kv_cache import KvCache
from headrace.weights.shape import ModelShape

IndexArray = NDArray[np.int64]

# Up to this many positions products are small enough to be added in one go on every processor seen so far.
SHORT = 256
# Tokens of a chunk that go through the kernel together.
TILE = 32
# Positions that one group of single rows may gather at a time, padding included: bounds the workspace.
MAX_GATHERED = 16384


class Cuts(Struct, frozen=True):
    """How far is read: in multiples of `fine` positions up to SHORT, of `coarse` beyond.

    `wide`: tokens of a chunk share products; else every token is a batch entry of its own and shapes are fixed.
    """

    fine: int = 32
    coarse: int = 32
    wide: bool = True

    def length(self, stop: int) -> int:
        """Positions to read for tokens that see `stop` of them."""
        step = self.fine if stop <= SHORT else self.coarse
        return -(-stop // step) * step

    def in_blocks(self, block_size: int) -> "Cuts":
        """The same in whole blocks."""
        return replace(self, fine=math.lcm(self.fine, block_size), coarse=math.lcm(self.coarse, block_size))


# The kernel cuts at 512 positions; in whole cuts its products have one shape.
NARROW = Cuts(512, 512, wide=False)
# In the order of what they cost.
CUTS = (Cuts(), Cuts(32, 256), Cuts(512, 512), NARROW)


@dataclass(slots=True, frozen=True)
class Group:
    """Single-token rows of similar length: tokens first .. first + count of the step."""

    first: int
    count: int
    lines: Tensor  # [layers, 2 * count * heads * blocks]
    mask: Tensor  # [count, 1, 1, positions]


@dataclass(slots=True, frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: tokens first .. first + count, from position `start`."""

    first: int
    count: int
    start: int
    lines: Tensor


def fill_tile(tokens: Tensor) -> Tensor:
    """[count, ...] -> [TILE, ...]: the last token stands in for those that are missing."""
    missing = TILE - tokens.shape[0]
    return tokens if not missing else torch.cat((tokens, tokens[-1:].expand(missing, *tokens.shape[1:])))


class Attention:
    def __init__(self, shape: ModelShape, cache: KvCache, cuts: Cuts) -> None:
        self.cuts = cuts.in_blocks(cache.block_size)
        self._cache = cache
        self._heads, self._dim = shape.num_kv_heads, shape.head_dim
        self._queries = shape.num_heads // shape.num_kv_heads
        # A product with one query is another kernel's work.
        self._padded = max(2, self._queries)
        self._scale = shape.head_dim**-0.5
        self._ramp = torch.empty(0, 0)

    def group(self, first: int, ends: IndexArray, tables: IndexArray) -> Group:
        """Rows that end before `ends`; `tables` [count, blocks] is padded to what is read."""
        visible = torch.arange(tables.shape[1] * self._cache.block_size)[None] < torch.from_numpy(ends)[:, None]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, -math.inf)
        return Group(first, len(ends), self._lines(tables), mask[:, None, None])

    def chunk(self, first: int, start: int, count: int, table: IndexArray) -> Chunk:
        return Chunk(first, count, start, self._lines(table[None]))

    def attend(self, layer: int, queries: Tensor, groups: list[Group], chunks: list[Chunk]) -> Tensor:
        """queries [t, heads, dim] -> [t, heads * dim]."""
        count = queries.shape[0]
        grouped = queries.view(count, self._heads, self._queries, self._dim)
        if self._queries < self._padded:
            grouped = grouped.expand(-1, -1, self._padded, -1)
        if len(groups) == 1 and groups[0].count == count:
            result = self._attend_group(layer, grouped, groups[0])
        else:
            result = torch.empty(count, self._heads, self._padded, self._dim)
            for group in groups:
                span = slice(group.first, group.first + group.count)
                result[span] = self._attend_group(layer, grouped[span], group)
            for chunk in chunks:
                self._attend_chunk(layer, grouped, chunk, result)
        return result[:, :, : self._queries].reshape(count, -1)

    def _attend_group(self, layer: int, queries: Tensor, group: Group) -> Tensor:
        keys, values = self._cache.read(group.lines[layer], group.count)
        return self._kernel(queries, keys, values, group.mask)

    def _attend_chunk(self, layer: int, queries: Tensor, chunk: Chunk, result: Tensor) -> None:
        keys, values = self._cache.read(chunk.lines[layer], 1)
        for offset in range(0, chunk.count, TILE):
            count = min(TILE, chunk.count - offset)
            tokens = slice(chunk.first + offset, chunk.first + offset + count)
            start = chunk.start + offset
            length = self.cuts.length(start + count)
            near_keys, near_values = keys[:, :, :length], values[:, :, :length]
            mask = self._slope(start, length)
            if self.cuts.wide:
                # Always whole tiles: a kernel treats the few queries at the end of a shorter one differently.
                whole = fill_tile(queries[tokens])
                tile = whole.transpose(0, 1).reshape(1, self._heads, -1, self._dim)
                each = fill_tile(mask.view(TILE, self._padded, length)[:count]).reshape(-1, length)
                out = self._kernel(tile, near_keys, near_values, each[None, None])
                result[tokens] = out.view(self._heads, TILE, self._padded, self._dim).transpose(0, 1)[:count]
            else:
                mask = mask[: count * self._padded]
                dims = (count, -1, -1, -1)
                each = mask[:: self._padded, None, None]
                result[tokens] = self._kernel(queries[tokens], near_keys.expand(dims), near_values.expand(dims), each)

    def _kernel(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=mask, scale=self._scale
        )[0]
        return out

    def _slope(self, start: int, length: int) -> Tensor:
        """The mask of a tile that begins at `start`, over `length` positions: a window of one ramp."""
        half = self._ramp.shape[1] // 2
        if max(start, length) > half:
            half = max(2 * half, length, start, 1024)
            tokens = torch.arange(TILE).repeat_interleave(self._padded)[:, None]
            self._ramp = torch.zeros(len(tokens), 2 * half)
            self._ramp.masked_fill_(torch.arange(-half, half)[None] > tokens, -math.inf)
        return self._ramp[:, half - start : half - start + length]

    def _lines(self, tables: IndexArray) -> Tensor:
        """The cache lines of tables [rows, blocks]: [layers, keys then values × rows × heads × blocks]."""
        cache = self._cache
        layers = np.arange(cache.num_layers)[:, None, None, None, None] * cache.lines_per_layer
        sides = np.arange(2)[None, :, None, None, None] * self._heads
        heads = np.arange(self._heads)[None, None, None, :, None]
        lines = layers + sides + heads + (tables * cache.lines_per_block)[None, None, :, None, :]
        return torch.from_numpy(lines.reshape(cache.num_layers, -1))
