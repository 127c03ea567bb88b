"""What the host remembers of every slot to lay plans out: ids it was given, how many blocks, who failed.

Turns a plan's starts and growth into changes of the device's words. Owns no tensor; never waits for the device.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.core.config import EngineConfig
from headrace.core.errors import MemoryCorrupted
from headrace.core.ids import largest, packed
from headrace.core.plan import BoolArray, IntArray, Plan, RowStatus, SlotStart
from headrace.runner.cuda.slot_words import SlotWords, is_special

_NO_PAIRS = np.zeros((0, 2), np.int32)
_ALWAYS = 2**62


def table_width(config: EngineConfig) -> int:
    """Blocks that the longest sequence can have; the engine may be a block or two ahead of it."""
    return -(-config.context_len // config.block_size) + 2


class HostSlots:
    """`ids[slot]` are the ids a slot was given, `known[slot]` how many; those sampled since are the device's alone.
    `lengths[slot]` counts both, once all that was launched has run."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._block_size = np.int32(config.block_size)
        self.words = SlotWords(config.slots, table_width(config))
        slots = config.slots
        # The system gives a page of these zeros when it is first written.
        self.ids = np.zeros((slots, config.context_len + 1), np.int32)
        self.known = np.zeros(slots, np.int32)
        self.lengths = np.zeros(slots, np.int32)
        self.num_blocks = np.zeros(slots, np.int32)
        self.num_prompt = np.zeros(slots, np.int32)
        self.failed = np.zeros(slots, np.uint8)
        # The graph cannot sample tokens before this position; 0: it can sample them all.
        self.special_until = np.zeros(slots, np.int64)
        # Alternatives to report beside each id of its prompt; -1: the prompt is not scored.
        self.prompt_alternatives = np.full(slots, -1, np.int32)
        # The plan that brought the occupant: what an earlier plan found out is not about it.
        self._begun_in = np.full(slots, -(2**62), np.int64)

    def update(self, plan: Plan) -> IntArray:
        """Starts, then growth: the changes [n, 2] for the device, no address twice."""
        pairs = []
        # A slot given away twice in one plan belongs to the second.
        for start in {start.slot: start for start in plan.begun}.values():
            pairs.append(self._begin(start, plan.step))
        if len(plan.grown_slots):
            pairs.append(self._grow(plan.grown_slots, plan.grown_blocks))
        if len(pairs) == 1:
            return pairs[0]
        return np.concatenate(pairs) if pairs else _NO_PAIRS

    def check(self, plan: Plan) -> None:
        """Every row has tokens, its positions have blocks, every token an id, and it samples exactly where the ids end."""
        slots, counts = plan.slots, plan.counts
        ends, lengths = plan.starts + counts, self.lengths[slots]
        lost = ends > self.num_blocks[slots] * self._block_size
        lost |= ends > np.where(counts > 1, self.known[slots], lengths)
        wrong = (counts < 1) | (plan.samples != (ends == lengths))
        # Faster than to ask each whether it is any, of the few rows that most steps have.
        if not np.count_nonzero(lost | wrong):
            return
        if lost.any():
            row = int(lost.argmax())
            raise MemoryCorrupted(
                f"slot {slots[row]}: a row up to position {ends[row] - 1} has no block or no id for it"
            )
        row = int(wrong.argmax())
        raise MemoryCorrupted(
            f"slot {slots[row]}: a row of {counts[row]} tokens up to position {ends[row] - 1} must sample exactly where its"
            f" ids end, at position {lengths[row] - 1}"
        )

    def note_samples(self, plan: Plan) -> None:
        """Every row that samples gives its slot one id more."""
        self.lengths[plan.slots] += plan.samples

    def is_special(self, slots: IntArray, ends: IntArray) -> BoolArray:
        """Whether the token at `ends` of each slot must be chosen outside of the graph."""
        special: BoolArray = ends < self.special_until[slots]
        return special

    def fed_by_device(self, plan: Plan) -> BoolArray:
        """Rows of one token that is the slot's last: the device has it, whether the host has seen it or not."""
        single: BoolArray = (plan.counts == 1) & (plan.starts >= self.known[plan.slots] - 1)
        return single

    def note_failures(self, plan: Plan, statuses: NDArray[np.uint8]) -> None:
        """What a collected plan found out of the slots it ran for."""
        rows = np.flatnonzero(statuses != RowStatus.OK)
        slots = plan.slots[rows]
        same = self._begun_in[slots] <= plan.step
        self.failed[slots[same]] = statuses[rows[same]]

    def _begin(self, start: SlotStart, step: int) -> IntArray:
        slot, config = start.slot, self._config
        ids = packed(start.ids)
        if len(start.blocks) > self.words.width or len(ids) > config.context_len + 1:
            raise MemoryCorrupted(
                f"slot {slot}: {len(ids)} ids in {len(start.blocks)} blocks are more than the context"
            )
        in_range = len(ids) > 0 and largest(ids) < config.vocab_size
        self.failed[slot] = RowStatus.OK if in_range else RowStatus.OUT_OF_RANGE
        # The row of a failed slot runs, is not believed, and must only do no harm.
        self.ids[slot, : len(ids)] = ids if in_range else np.clip(ids, 0, config.vocab_size - 1)
        self.known[slot] = self.lengths[slot] = len(ids)
        self.num_prompt[slot] = start.num_prompt
        self.num_blocks[slot] = len(start.blocks)
        self.special_until[slot] = _ALWAYS if is_special(start.sampling) else _stops_from(start)
        asked = start.sampling.prompt_logprobs
        self.prompt_alternatives[slot] = -1 if asked is None else asked
        self._begun_in[slot] = step
        return self.words.begin(start, config.vocab_size)

    def _grow(self, slots: IntArray, blocks: IntArray) -> IntArray:
        places = self.num_blocks[slots]
        if len(slots) > 1 and len(set(slots.tolist())) < len(slots):
            # Several blocks for one slot: each after the other.
            order = np.argsort(slots, kind="stable")
            grouped = slots[order]
            first = np.searchsorted(grouped, grouped)
            places[order] += (np.arange(len(slots)) - first).astype(np.int32)
        if (places >= self.words.width).any():
            slot = int(slots[int(places.argmax())])
            raise MemoryCorrupted(f"slot {slot}: another block is more than the context holds")
        np.add.at(self.num_blocks, slots, 1)
        pairs = np.empty((len(slots), 2), np.int32)
        pairs[:, 0] = self.words.tables_at + slots * np.int32(self.words.width) + places
        pairs[:, 1] = blocks
        return pairs


def _stops_from(start: SlotStart) -> int:
    """Before this position stops are forbidden; 0 where they never are."""
    min_tokens = start.sampling.min_tokens
    return start.num_prompt + min_tokens if min_tokens else 0
