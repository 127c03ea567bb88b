"""The running table: numpy arrays indexed by slot, so that a decode step is vector arithmetic.

Owns what a step needs to know of every running sequence. Knows neither queue nor pool.
`tokens` counts ids that exist on the device, sampled ones that the host has not seen included.
"""

import numpy as np
from numpy.typing import NDArray

from headrace.core.event import NUM_COUNTERS, Counter
from headrace.core.plan import BoolArray, IntArray
from headrace.engine.sequence import Sequence

# Applied tokens a slot holds before they move to its sequence; a power of two.
_BUFFER = 128
# A position no sequence reaches.
_NEVER = 2**31 - 1
# Constants as arrays: numpy adds those in half the time of a Python number.
_ONE = np.array(1, np.int32)
_LAST = np.array(_BUFFER - 1, np.int32)


def some(mask: BoolArray) -> bool:
    """`mask.any()`, ten times as fast on short rows."""
    return b"\x01" in mask.tobytes()


def every(mask: BoolArray) -> bool:
    """`mask.all()`, likewise."""
    return b"\x00" not in mask.tobytes()


class SlotTable:
    def __init__(self, slots: int, block_size: int) -> None:
        self.size = slots
        self._block_size = block_size
        self.sequences = np.full(slots, None, dtype=object)
        self.number = np.full(slots, -1, np.int64)
        # Raised whenever an occupant leaves: its launched rows are told apart by it from those of the next.
        self.generation = np.zeros(slots, np.int32)
        self.tokens = np.zeros(slots, np.int32)
        self.computed = np.zeros(slots, np.int32)
        # Caught up: every plan lets it compute the one token it sampled last.
        self.decoding = np.zeros(slots, np.bool_)
        self.last_step = np.full(slots, -1, np.int64)
        self.limit = np.zeros(slots, np.int32)
        # A row that reaches this position needs another block first.
        self.grow_at = np.zeros(slots, np.int32)
        self.tenant = np.zeros(slots, np.intp)
        # What decides who gives way.
        self.tier = np.zeros(slots, np.int8)
        self.guaranteed = np.zeros(slots, np.bool_)
        self.begun_in = np.full(slots, -1, np.int64)
        self.preemptions = np.zeros(slots, np.int32)
        # Output tokens below which it is not preempted again.
        self.safe_below = np.zeros(slots, np.int32)
        self.itl_s = np.full(slots, np.inf)
        self.masked = np.zeros(slots, np.bool_)
        self.emitted = np.zeros(slots, np.int32)
        self.counters = np.zeros((slots, NUM_COUNTERS), np.int32)
        self._emitted_counter = self.counters[:, Counter.EMITTED]
        # One line per stop id, as many as the occupant with the most of them needs.
        self.stops = np.full((1, slots), -1, np.int32)
        # Tokens applied but not yet moved to the sequence: token i at i modulo the width.
        self._buffer = np.zeros((slots, _BUFFER), np.int32)
        self.itl_changed = False
        self._shortest_itl_s = float("inf")
        self._free = list(range(slots - 1, -1, -1))
        self.num_free = slots
        self.num_running = 0
        self.num_masked = 0

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    def occupy(self, sequence: Sequence, num_computed: int, itl_s: float, stops: tuple[int, ...]) -> int:
        """Give a free slot to `sequence`, whose first `num_computed` tokens are in its blocks."""
        slot = self._free.pop()
        self.num_free -= 1
        self.num_running += 1
        num_outputs = len(sequence.outputs)
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.number[slot] = sequence.number
        self.tokens[slot] = sequence.num_prompt + num_outputs
        self.computed[slot] = num_computed
        self.last_step[slot] = sequence.last_step
        self.limit[slot] = sequence.limit
        self.tenant[slot] = sequence.tenant
        self.tier[slot] = int(sequence.request.tier)
        self.guaranteed[slot] = sequence.guaranteed
        self.begun_in[slot] = sequence.begun_in
        self.preemptions[slot] = sequence.preemptions
        self.safe_below[slot] = sequence.safe_below - sequence.num_prompt
        self.itl_s[slot] = itl_s
        self.emitted[slot] = num_outputs
        self.counters[slot] = sequence.counters
        if sequence.request.sampling.masked:
            self.masked[slot] = True
            self.num_masked += 1
        self._set_stops(slot, stops)
        self.set_capacity(sequence)
        return slot

    def set_capacity(self, sequence: Sequence) -> None:
        """Its blocks changed. A guaranteed sequence asks one block ahead; one that has all it can need, never."""
        capacity = len(sequence.blocks) * self._block_size
        if capacity >= sequence.limit - 1:
            capacity = _NEVER
        elif sequence.guaranteed:
            capacity -= self._block_size
        self.grow_at[sequence.slot] = capacity

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves; what the table alone knew of it goes back into it."""
        slot = sequence.slot
        self.flush(slot)
        sequence.counters = self.counters[slot].tolist()
        sequence.last_step = self.last_step.item(slot)
        sequence.slot = -1
        self.sequences[slot] = None
        self.number[slot] = -1
        self.generation[slot] += 1
        self.decoding[slot] = False
        self.itl_changed = True
        if sequence.request.sampling.masked:
            self.masked[slot] = False
            self.num_masked -= 1
        self._free.append(slot)
        self.num_free += 1
        self.num_running -= 1
        if len(self.stops) > 1:
            self._trim_stops(slot)

    def shortest_itl_s(self) -> float:
        """The least inter-token target of what is decoding."""
        if self.itl_changed:
            self._shortest_itl_s = float(self.itl_s.min(where=self.decoding, initial=np.inf))
            self.itl_changed = False
        return self._shortest_itl_s

    def append(self, slots: NDArray[np.intp], tokens: IntArray) -> tuple[IntArray, IntArray]:
        """One applied token for each of `slots`, whose occupants are unchanged since the launch.

        Returns each token's output index and each sequence's counters.
        """
        indices = self.emitted[slots]
        place = indices & _LAST
        self._buffer[slots, place] = tokens
        self.emitted[slots] = indices + _ONE
        self._emitted_counter[slots] += _ONE
        counters = self.counters.take(slots, axis=0)
        last = place == _LAST
        if some(last):
            for slot in slots[last].tolist():
                self.flush(slot)
        return indices, counters

    def append_one(self, slot: int, token: int) -> tuple[int, list[int]]:
        """`append` for one slot."""
        index = self.emitted.item(slot)
        place = index & (_BUFFER - 1)
        self._buffer[slot, place] = token
        self.emitted[slot] = index + 1
        self._emitted_counter[slot] += 1
        if place == _BUFFER - 1:
            self.flush(slot)
        counters: list[int] = self.counters[slot].tolist()
        return index, counters

    def stopped(self, slots: NDArray[np.intp], tokens: IntArray) -> BoolArray:
        """Which of the slots' tokens end their sequence, `min_tokens` apart."""
        found: BoolArray = self.stops[0][slots] == tokens
        for line in self.stops[1:]:
            found |= line[slots] == tokens
        return found

    def flush(self, slot: int) -> None:
        """Move applied tokens to the occupant's own list."""
        outputs = self.sequences[slot].outputs
        end = self.emitted.item(slot)
        if end > len(outputs):
            first = len(outputs) & (_BUFFER - 1)
            outputs.extend(self._buffer[slot, first : first + end - len(outputs)].tolist())

    def _trim_stops(self, slot: int) -> None:
        """Lines that only the leaving one needed would be compared in every step for ever."""
        self.stops[:, slot] = -1
        needed = int(np.flatnonzero((self.stops >= 0).any(axis=1)).max(initial=0)) + 1
        self.stops = self.stops[:needed]

    def _set_stops(self, slot: int, stops: tuple[int, ...]) -> None:
        missing = len(stops) - len(self.stops)
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, missing), (0, 0)), constant_values=-1)
        for line in range(len(self.stops)):
            self.stops[line, slot] = stops[line] if line < len(stops) else -1
