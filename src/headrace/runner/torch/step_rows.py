"""A plan's rows laid out for the device: tokens in the order they are computed, and where each reads and writes.

Single tokens come first, longest context first, in groups of similar length; then chunks. The order is for
speed only: no row's result depends on it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.runner.torch.attention import MAX_GATHERED, Attention, Chunk, Group
from headrace.runner.torch.kv_cache import KvCache
from headrace.runner.torch.slot_table import SlotTable

IndexArray = NDArray[np.int64]
# A group's shortest row is at least this share of its longest: bounds what is read for nothing.
_LEAST_SHARE = 0.75


@dataclass(slots=True, frozen=True)
class StepRows:
    """`order[i]` is the row (of those given) in place i; its tokens are firsts[i] .. firsts[i] + counts[i]."""

    order: IndexArray
    firsts: IndexArray
    counts: IndexArray
    ids: Tensor
    positions: Tensor
    writes: Tensor  # [layers, tokens * 2 * kv heads]
    groups: list[Group]
    chunks: list[Chunk]
    # Blocks that are read before they are full and were not written before.
    fresh: list[int]

    def lasts(self) -> IndexArray:
        """The last token of each place."""
        return self.firsts + self.counts - 1


def lay_out(
    slots: IndexArray, starts: IndexArray, counts: IndexArray, table: SlotTable, cache: KvCache, attention: Attention
) -> StepRows:
    ends = starts + counts
    order = np.lexsort((-ends, counts > 1))
    slots, starts, counts, ends = slots[order], starts[order], counts[order], ends[order]
    firsts = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(slots)), counts)
    positions = np.arange(len(owners)) - firsts[owners] + starts[owners]
    pieces = [table.ids(*row) for row in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)]
    blocks = table.tables[slots[owners], positions // cache.block_size]
    heads = np.arange(cache.lines_per_layer) * cache.block_size
    homes = blocks * (cache.lines_per_block * cache.block_size) + positions % cache.block_size
    layers = np.arange(cache.num_layers) * (cache.lines_per_layer * cache.block_size)
    writes = layers[:, None, None] + homes[None, :, None] + heads
    return StepRows(
        order=order,
        firsts=firsts,
        counts=counts,
        ids=torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        positions=torch.from_numpy(positions),
        writes=torch.from_numpy(writes.reshape(cache.num_layers, -1)),
        groups=_groups(slots, ends, int((counts == 1).sum()), table, cache, attention),
        chunks=[
            attention.chunk(
                int(firsts[i]),
                int(starts[i]),
                int(counts[i]),
                _padded(table, slots[i : i + 1], ends[i : i + 1], cache, attention)[0],
            )
            for i in np.flatnonzero(counts > 1).tolist()
        ],
        fresh=_fresh(slots, starts, ends, table, cache),
    )


def _groups(
    slots: IndexArray, ends: IndexArray, singles: int, table: SlotTable, cache: KvCache, attention: Attention
) -> list[Group]:
    """Cut the single rows, which are sorted by length, wherever rows get too short or too many."""
    groups, first = [], 0
    while first < singles:
        longest = attention.cuts.length(int(ends[first]))
        most = max(1, MAX_GATHERED // longest)
        stop = first + 1
        while stop < min(singles, first + most) and ends[stop] + attention.cuts.fine > _LEAST_SHARE * longest:
            stop += 1
        span = slice(first, stop)
        tables = _padded(table, slots[span], ends[span], cache, attention)
        groups.append(attention.group(first, ends[span], tables))
        first = stop
    return groups


def _padded(table: SlotTable, slots: IndexArray, ends: IndexArray, cache: KvCache, attention: Attention) -> IndexArray:
    """The blocks up to the longest of `ends`, as far as is read; behind a row's own end, the block that holds zeros."""
    columns = attention.cuts.length(int(ends.max())) // cache.block_size
    starts = np.arange(columns) * cache.block_size
    return np.where(starts < ends[:, None], table.tables[slots, :columns], cache.blocks)


def _fresh(slots: IndexArray, starts: IndexArray, ends: IndexArray, table: SlotTable, cache: KvCache) -> list[int]:
    size = cache.block_size
    firsts = ends // size * size
    partial = (ends > firsts) & (firsts >= starts)
    fresh: list[int] = table.tables[slots[partial], firsts[partial] // size].tolist()
    return fresh
