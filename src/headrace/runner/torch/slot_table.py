"""What the runner keeps of every slot: ids, length, block table, whether it failed.

Plans change it by deltas. A decode row's id is the token sampled last. Knows neither tensors nor models.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.core.config import EngineConfig
from headrace.core.errors import MemoryCorrupted
from headrace.core.plan import IntArray, Plan, RowStatus, SlotStart

IndexArray = NDArray[np.int64]


class SlotTable:
    """`tables[slot]` lists the slot's blocks, padded with block `config.blocks`, which is nobody's."""

    def __init__(self, config: EngineConfig, span: int) -> None:
        self._config = config
        size = config.block_size
        self._max_blocks = -(-config.context_len // size) + 2
        width = -(-self._max_blocks * size // span) * span // size
        self._no_block = config.blocks
        self.tables = np.full((config.slots, width), config.blocks, np.int64)
        self.failed = np.zeros(config.slots, np.uint8)
        self.num_prompt = np.zeros(config.slots, np.int64)
        self._num_blocks = [0] * config.slots
        self._ids: list[IntArray] = [np.zeros(0, np.int32)] * config.slots
        self._last_ids = np.zeros(config.slots, np.int32)
        self._lengths = np.zeros(config.slots, np.int64)

    def update(self, plan: Plan) -> None:
        """Starts, then growth; freed blocks are the cache's matter."""
        for start in plan.begun:
            self._begin(start)
        for slot, block in zip(plan.grown_slots.tolist(), plan.grown_blocks.tolist(), strict=True):
            self._grow(slot, block)

    def ids(self, slot: int, start: int, stop: int) -> IntArray:
        """Ids at positions start .. stop - 1; those sampled here are known by the last only."""
        known = self._ids[slot]
        if stop <= len(known):
            return known[start:stop]
        if start != stop - 1 or stop != self._lengths[slot]:
            raise MemoryCorrupted(f"slot {slot}: positions {start} to {stop - 1} are not ids it was given")
        return self._last_ids[slot : slot + 1]

    def prompt_ids(self, slot: int) -> IntArray:
        return self._ids[slot][: self.num_prompt[slot]]

    def check(self, slots: IndexArray, ends: IndexArray) -> None:
        """Every row's positions have blocks and ids."""
        room = np.array([self._num_blocks[slot] for slot in slots.tolist()], np.int64) * self._config.block_size
        wrong = (ends > room) | (ends > self._lengths[slots])
        if wrong.any():
            row = int(wrong.argmax())
            raise MemoryCorrupted(
                f"slot {slots[row]}: a row up to position {ends[row] - 1} has no block or no id for it"
            )

    def append(self, slots: IndexArray, ends: IndexArray, tokens: IntArray) -> None:
        self._last_ids[slots] = tokens
        self._lengths[slots] = ends + 1

    def _begin(self, start: SlotStart) -> None:
        slot, ids = start.slot, np.array(start.ids, np.int32)
        if len(start.blocks) > self._max_blocks:
            raise MemoryCorrupted(f"slot {slot}: {len(start.blocks)} blocks are more than the context holds")
        in_range = len(ids) > 0 and 0 <= ids.min() <= ids.max() < self._config.vocab_size
        self.failed[slot] = RowStatus.OK if in_range else RowStatus.OUT_OF_RANGE
        self.tables[slot] = self._no_block
        self.tables[slot, : len(start.blocks)] = start.blocks
        self._num_blocks[slot] = len(start.blocks)
        self._ids[slot] = ids
        self._lengths[slot] = len(ids)
        self._last_ids[slot] = ids[-1] if len(ids) else 0
        self.num_prompt[slot] = start.num_prompt

    def _grow(self, slot: int, block: int) -> None:
        place = self._num_blocks[slot]
        if place >= self._max_blocks:
            raise MemoryCorrupted(f"slot {slot}: block {block} is more than the context holds")
        self.tables[slot, place] = block
        self._num_blocks[slot] = place + 1
