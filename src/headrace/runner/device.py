"""The fake's device memory: every slot's ids, counts and block table over one cell store.

Computes rows and distrusts every plan: a chunk that skips or repeats, a cell read before it was
written or written twice raises MemoryCorrupted. Knows no sampling rule, no fault and no time.

Steps of few rows are computed in plain numbers: where the processor's caches hold other things, a lone row's
time goes into fetching the many functions of numpy that it would pass through.
"""

from array import array
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from headrace.core.config import EngineConfig
from headrace.core.errors import MemoryCorrupted
from headrace.core.plan import BoolArray, Plan, SlotStart
from headrace.runner.cells import (
    FACTOR,
    MASK_64,
    PEEK,
    ROOT,
    STRIDE,
    UNWRITTEN,
    WRITTEN,
    CellArray,
    CellStore,
    Chain,
    IndexArray,
    mix,
    mix_int,
)

# Operands of no dimension, see `cells.mix`.
_FACTOR, _PEEK = np.array(FACTOR, np.uint64), np.array(PEEK, np.uint64)
_ONE = np.array(1, np.int64)
_WRITTEN = np.array(WRITTEN, np.uint8)
_WRITTEN_BYTES, _UNWRITTEN_BYTES = bytes([WRITTEN]), bytes([UNWRITTEN])
# So few rows are computed one by one, in plain numbers, before vectors take less time; so short chunks likewise.
FEW = 4
_SHORT = 20
# What an array calls a number of 64 bits.
_WORD: Final = "L"
# Slot, end, last cell, and whether it samples.
FewRow = tuple[int, int, int, bool]
# A sampled id may lie this far outside the vocabulary (a fault) and still be computed on.
SPARE_IDS = 8


class Device:
    """Column 0 of every block table is the root block: position p reads column 1 + p // block_size.

    Tables hold a block's first cell rather than its number. Columns and offsets come from tables over
    positions as well, indexed by p + 1, the count of positions up to p. Comparisons of a whole step
    are of bytes, which costs a tenth of a reduction at these sizes. `_plain_*` are the same memory as their
    namesakes, see `CellStore`.
    """

    def __init__(self, config: EngineConfig, *, verify_prefix: bool = True) -> None:
        slots, block_size = config.slots, config.block_size
        self.store = CellStore(config.blocks, block_size)
        self.max_blocks = -(-config.context_len // block_size) + 2
        self._block_size = block_size
        self._vocab_size = config.vocab_size
        self._verify_prefix = verify_prefix
        self._chain = Chain()
        self._no_cell = self.store.no_block * block_size
        # The last column never holds a block: a row that outruns its blocks by one finds poison.
        self._width = width = self.max_blocks + 2
        self._table = np.full((slots, width), self._no_cell, np.int64)
        self._table[:, 0] = self.store.root_block * block_size
        self._flat_table = self._table.reshape(-1)
        self._table_starts = np.arange(slots, dtype=np.int64) * width
        self._numbers = np.full(slots, -1, np.int64)
        self._num_blocks = [0] * slots
        # A slot's ids as they were when it started; of later ones only the last is ever computed on.
        self._ids: list[tuple[int, ...]] = [()] * slots
        self._last_ids = np.zeros(slots, np.int32)
        self._lengths = np.zeros(slots, np.int64)
        # -1: nobody ever started here, so that no row can fit.
        self._computed = np.full(slots, -1, np.int64)
        self._keys = np.zeros(slots, np.uint64)
        self._marks = np.arange(slots, dtype=np.int32)
        self._mixed_ids = mix(np.arange(1, config.vocab_size + SPARE_IDS + 1, dtype=np.uint64))
        self._tabulate_positions((self.max_blocks + 1) * block_size)
        self._plain_table = self._flat_table.data
        self._plain_numbers = self._numbers.data
        self._plain_last_ids = self._last_ids.data
        self._plain_lengths = self._lengths.data
        self._plain_computed = self._computed.data
        self._plain_keys = self._keys.data
        self._plain_mixed_ids = self._mixed_ids.data

    def _tabulate_positions(self, count: int) -> None:
        places = np.arange(-1, count, dtype=np.int64)
        self._columns = places // self._block_size + 1
        self._offsets = places % self._block_size
        natural = np.maximum(places, 0).astype(np.uint64)
        self._strides = natural * np.uint64(STRIDE)
        # Position p's token also depends on the cell of this position.
        peeks = (mix(natural.copy()) % (natural + np.uint64(1))).astype(np.int64)
        self._peek_columns = self._columns[peeks + 1]
        self._peek_offsets = self._offsets[peeks + 1]
        self._plain_peek_columns, self._plain_peek_offsets = self._peek_columns.data, self._peek_offsets.data

    def update(self, plan: Plan) -> None:
        """What a plan changes before its rows run: free, start, grow."""
        if len(plan.freed_blocks):
            self.store.poison(plan.freed_blocks.tolist())
        for start in plan.begun:
            self._begin(start)
        if len(plan.grown_blocks):
            for slot, block in zip(plan.grown_slots.tolist(), plan.grown_blocks.tolist(), strict=True):
                self._grow(slot, block)

    def compute(self, plan: Plan, slots: IndexArray, ends: IndexArray, live: IndexArray | None) -> IndexArray:
        """Write the cells of all rows, or of the rows `live`; returns the last cell of each row."""
        if live is not None:
            cells = np.zeros(len(slots), np.int64)
            cells[live] = self._compute_rows(
                slots[live], plan.starts[live].astype(np.int64), ends[live], plan.samples[live]
            )
            return cells
        return self._compute_rows(slots, plan.starts.astype(np.int64), ends, plan.samples)

    def _compute_rows(self, slots: IndexArray, starts: IndexArray, ends: IndexArray, samples: BoolArray) -> IndexArray:
        if self._computed[slots].tobytes() != starts.tobytes():
            self._refuse_start(slots, starts)
        last = ends.tobytes()
        if last == self._lengths[slots].tobytes() and last == (starts + _ONE).tobytes() and 0 not in samples.tobytes():
            cells = self._step(slots, starts, ends)
        else:
            cells = self._compute_mixed(slots, starts, ends, samples)
        self._computed[slots] = ends
        return cells

    def compute_few(self, plan: Plan) -> list[FewRow] | None:
        """`compute` for few rows, in its order; None, and nothing done, where it would refuse one before any chunk."""
        lengths, computed = self._plain_lengths, self._plain_computed
        rows: list[FewRow] = []
        steps: dict[int, int] = {}
        chunks: list[tuple[int, int]] = []
        numbers = zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), plan.samples.tolist(), strict=True
        )
        for slot, start, count, samples in numbers:
            end, cell = start + count, -1
            left = lengths[slot] - end
            if computed[slot] != start or count <= 0 or left < 0 or (left == 0) != samples:
                return None
            if count == 1 and samples:
                cell, value = self._step_one(slot, start)
                if cell < 0 or cell in steps:
                    return None
                steps[cell] = value
            else:
                chunks.append((len(rows), start))
            rows.append((slot, end, cell, samples))
        for cell, value in steps.items():
            self.store.plain_values[cell] = value
            self.store.plain_states[cell] = WRITTEN
        for row, start in chunks:
            slot, end, _, samples = rows[row]
            rows[row] = slot, end, self._compute_chunk(slot, start, end), samples
        for slot, end, _, _ in rows:
            computed[slot] = end
        return rows

    def _step_one(self, slot: int, position: int) -> tuple[int, int]:
        """The cell of a slot's last id and the value that belongs there; -1 where it must not be computed."""
        store = self.store
        previous, cell = self._cell(slot, position - 1), self._cell(slot, position)
        block = cell - position % self._block_size
        if store.plain_states[previous] != WRITTEN or store.plain_states[cell] != UNWRITTEN:
            return -1, 0
        if store.plain_owners[block] != self._plain_numbers[slot]:
            return -1, 0
        term = self._plain_mixed_ids[self._plain_last_ids[slot]]
        return cell, (store.plain_values[previous] * FACTOR + term) & MASK_64

    def _cell(self, slot: int, position: int) -> int:
        size = self._block_size
        return self._plain_table[slot * self._width + position // size + 1] + position % size

    def draw(self, slots: IndexArray, ends: IndexArray, cells: IndexArray) -> CellArray:
        """The random number of the token after each slot's last position, from two of its cells."""
        store = self.store
        peeked = self._flat_table[self._table_starts[slots] + self._peek_columns[ends]]
        peeked += self._peek_offsets[ends]
        if store.states[peeked].tobytes() != _WRITTEN_BYTES * len(slots):
            positions = (self._peek_columns[ends] - 1) * self._block_size + self._peek_offsets[ends]
            self._refuse_read(slots, positions + 1, peeked)
        mixed: CellArray = store.values[peeked]
        mixed *= _PEEK
        mixed += store.values[cells]
        mixed += self._strides[ends]
        mixed += self._keys[slots]
        return mix(mixed)

    def draw_one(self, slot: int, end: int, cell: int) -> int:
        store = self.store
        column, offset = self._plain_peek_columns[end], self._plain_peek_offsets[end]
        peeked = self._plain_table[slot * self._width + column] + offset
        if store.plain_states[peeked] != WRITTEN:
            position = (column - 1) * self._block_size + offset
            self._refuse("read of a cell that is not written", slot, position, peeked)
        mixed = store.plain_values[cell] + store.plain_values[peeked] * PEEK
        return mix_int(mixed + (end - 1) * STRIDE + self._plain_keys[slot])

    def append(self, slots: IndexArray, ends: IndexArray, tokens: NDArray[np.int32]) -> None:
        """The ids of slots that are computed up to `ends` grow by one token each."""
        self._last_ids[slots] = tokens
        self._lengths[slots] = ends + _ONE

    def append_one(self, slot: int, end: int, token: int) -> None:
        self._plain_last_ids[slot] = token
        self._plain_lengths[slot] = end + 1

    def scrub(self, slot: int, start: int, stop: int) -> None:
        """What a failed row wrote is worth nothing: nobody may read those cells."""
        self.store.states[self._span(slot, start, stop)] = UNWRITTEN

    def _begin(self, start: SlotStart) -> None:
        slot, size = start.slot, self._block_size
        ids, blocks = start.ids, start.blocks
        who = f"slot {slot}, number {start.number}"
        if not 0 <= start.num_computed < len(ids):
            raise MemoryCorrupted(f"{who}: starts with {start.num_computed} of {len(ids)} ids computed")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise MemoryCorrupted(f"{who}: starts with an id outside the vocabulary")
        if len(blocks) > self.max_blocks:
            raise MemoryCorrupted(f"{who}: {len(blocks)} blocks are more than the context holds")
        num_shared = start.num_computed // size
        if num_shared > len(blocks):
            raise MemoryCorrupted(f"{who}: {start.num_computed} ids computed in {len(blocks)} blocks")
        if num_shared:
            self._check_shared(who, ids[: num_shared * size], np.array(blocks[:num_shared], np.int64))
        self.store.give(blocks[num_shared:], start.number)
        first = slot * self._width + 1
        for entry, block in enumerate(blocks, first):
            self._plain_table[entry] = block * size
        for entry in range(first + len(blocks), first + self._num_blocks[slot]):
            self._plain_table[entry] = self._no_cell
        self._plain_numbers[slot] = start.number
        self._num_blocks[slot] = len(blocks)
        self._ids[slot] = ids
        self._plain_last_ids[slot] = ids[-1]
        self._plain_lengths[slot] = len(ids)
        self._plain_computed[slot] = start.num_computed
        self._plain_keys[slot] = mix_int(mix_int(start.sampling.seed + PEEK) + start.choice)

    def _check_shared(self, who: str, ids: tuple[int, ...], shared: IndexArray) -> None:
        bad = self.store.first_unwritten(shared)
        if bad is not None:
            position = bad * self._block_size
            raise MemoryCorrupted(f"{who}: bad prefix hit: block {shared[bad]} at position {position} is not written")
        if not self._verify_prefix:
            return
        wrong = np.flatnonzero(self.store.block_cells(shared) != self._chain.extend(ROOT, self._mixed_ids.take(ids)))
        if len(wrong):
            position = int(wrong[0])
            block = shared[position // self._block_size]
            raise MemoryCorrupted(f"{who}: bad prefix hit: block {block} holds other ids at position {position}")

    def _grow(self, slot: int, block: int) -> None:
        column = self._num_blocks[slot] + 1
        if column > self.max_blocks:
            raise MemoryCorrupted(f"{self._name(slot)}: block {block} is more than the context holds")
        self.store.give((block,), self._plain_numbers[slot])
        self._plain_table[slot * self._width + column] = block * self._block_size
        self._num_blocks[slot] = column

    def _step(self, slots: IndexArray, starts: IndexArray, ends: IndexArray) -> IndexArray:
        """Rows that compute only their slot's last id, all at once."""
        store, count = self.store, len(slots)
        tables = self._table_starts[slots]
        previous = self._flat_table[tables + self._columns[starts]]
        previous += self._offsets[starts]
        blocks = self._flat_table[tables + self._columns[ends]]
        cells: IndexArray = blocks + self._offsets[ends]
        if store.states[previous].tobytes() != _WRITTEN_BYTES * count:
            self._refuse_read(slots, starts, previous)
        if store.states[cells].tobytes() != _UNWRITTEN_BYTES * count:
            self._refuse_write(slots, ends, cells)
        if store.owners[blocks].tobytes() != self._numbers[slots].tobytes():
            self._refuse_owner(slots, ends, blocks)
        values = store.values[previous]
        values *= _FACTOR
        values += self._mixed_ids[self._last_ids[slots]]
        store.values[cells] = values
        store.states[cells] = _WRITTEN
        marks = self._marks[:count]
        store.writers[cells] = marks
        if store.writers[cells].tobytes() != marks.tobytes():
            self._refuse_twice(slots, ends, cells)
        return cells

    def _compute_mixed(self, slots: IndexArray, starts: IndexArray, ends: IndexArray, samples: BoolArray) -> IndexArray:
        """Rows of all sizes: steps together, chunks one by one."""
        left = self._lengths[slots] - ends
        wrong = ((left == 0) != samples) | (left < 0) | (ends <= starts)
        if wrong.any():
            self._refuse_length(slots, ends, left, int(wrong.argmax()))
        is_step = (ends - starts == 1) & samples
        cells = np.empty(len(slots), np.int64)
        if is_step.any():
            cells[is_step] = self._step(slots[is_step], starts[is_step], ends[is_step])
        for row in np.flatnonzero(~is_step).tolist():
            cells[row] = self._compute_chunk(int(slots[row]), int(starts[row]), int(ends[row]))
        return cells

    def _compute_chunk(self, slot: int, start: int, stop: int) -> int:
        """Cells of positions start .. stop - 1 of one slot, block by block; returns the last of them."""
        if stop > self._num_blocks[slot] * self._block_size:
            raise MemoryCorrupted(
                f"{self._name(slot)}: no block for position {stop - 1}: {self._num_blocks[slot]} blocks were given"
            )
        store, size = self.store, self._block_size
        previous = self._cell(slot, start - 1)
        if store.plain_states[previous] != WRITTEN:
            self._refuse("read of a cell that is not written", slot, start - 1, previous)
        first = slot * self._width + 1
        blocks = self._plain_table[first + start // size : first + (stop - 1) // size + 1].tolist()
        if len(set(blocks)) < len(blocks):
            again = next(place for place, block in enumerate(blocks) if block in blocks[:place])
            position = (start // size + again) * size
            self._refuse("two writers of one cell in one step", slot, position, blocks[again])
        values = self._extend(store.plain_values[previous], self._ids[slot][start:stop])
        number = self._plain_numbers[slot]
        at = start
        for block in blocks:
            offset = at % size
            count = min(size - offset, stop - at)
            cells = slice(block + offset, block + offset + count)
            if store.plain_states[cells] != _UNWRITTEN_BYTES * count:
                self._refuse_write(*self._rows_of(slot, at, at + count))
            if store.plain_owners[block] != number:
                self._refuse_owner(np.array([slot]), np.array([at + 1]), np.array([block]))
            store.plain_values[cells] = values[at - start : at - start + count]
            store.plain_states[cells] = _WRITTEN_BYTES * count
            at += count
        return blocks[-1] + (stop - 1) % size

    def _extend(self, value: int, ids: tuple[int, ...]) -> memoryview:
        """Values of the cells of `ids` after a cell of that value."""
        if len(ids) > _SHORT:
            return self._chain.extend(value, self._mixed_ids.take(ids)).data
        terms = self._plain_mixed_ids
        values = [value := (value * FACTOR + terms[token]) & MASK_64 for token in ids]
        return memoryview(array(_WORD, values))

    def _rows_of(self, slot: int, start: int, stop: int) -> tuple[IndexArray, IndexArray, IndexArray]:
        """Positions start .. stop - 1 of one slot as if each were a row: slots, counts and cells."""
        cells = self._span(slot, start, stop)
        return np.full(len(cells), slot), np.arange(start + 1, stop + 1), cells

    def _span(self, slot: int, start: int, stop: int) -> IndexArray:
        cells: IndexArray = self._table[slot, self._columns[start + 1 : stop + 1]]
        cells += self._offsets[start + 1 : stop + 1]
        return cells

    def _name(self, slot: int) -> str:
        return f"slot {slot}, number {self._numbers[slot]}"

    def _refuse_start(self, slots: IndexArray, starts: IndexArray) -> NoReturn:
        row = int((self._computed[slots] != starts).argmax())
        slot = int(slots[row])
        raise MemoryCorrupted(
            f"{self._name(slot)}: a chunk is skipped or repeated: row starts at position {starts[row]},"
            f" {self._computed[slot]} are computed"
        )

    def _refuse_length(self, slots: IndexArray, ends: IndexArray, left: IndexArray, row: int) -> NoReturn:
        what = "computes beyond its ids" if left[row] < 0 else "must sample exactly where its ids end"
        raise MemoryCorrupted(
            f"{self._name(int(slots[row]))}: a row up to position {ends[row] - 1} {what},"
            f" at position {ends[row] + left[row] - 1}"
        )

    def _refuse_read(self, slots: IndexArray, counts: IndexArray, cells: IndexArray) -> NoReturn:
        row = int((self.store.states[cells] != WRITTEN).argmax())
        self._refuse("read of a cell that is not written", int(slots[row]), int(counts[row]) - 1, int(cells[row]))

    def _refuse_write(self, slots: IndexArray, counts: IndexArray, cells: IndexArray) -> NoReturn:
        row = int((self.store.states[cells] != UNWRITTEN).argmax())
        written = self.store.states[cells[row]] == WRITTEN
        what = "two writers of one cell" if written else "write to a freed block"
        self._refuse(what, int(slots[row]), int(counts[row]) - 1, int(cells[row]))

    def _refuse_owner(self, slots: IndexArray, counts: IndexArray, blocks: IndexArray) -> NoReturn:
        row = int((self.store.owners[blocks] != self._numbers[slots]).argmax())
        what = f"two writers of one block, given to number {self.store.owners[blocks[row]]} since"
        self._refuse(what, int(slots[row]), int(counts[row]) - 1, int(blocks[row]))

    def _refuse_twice(self, slots: IndexArray, counts: IndexArray, cells: IndexArray) -> NoReturn:
        _, firsts = np.unique(cells, return_index=True)
        row = int(np.setdiff1d(np.arange(len(cells)), firsts)[0])
        what = "two writers of one cell in one step"
        self._refuse(what, int(slots[row]), int(counts[row]) - 1, int(cells[row]))

    def _refuse(self, what: str, slot: int, position: int, cell: int) -> NoReturn:
        block = cell // self._block_size
        name = "no block" if block == self.store.no_block else f"block {block}"
        raise MemoryCorrupted(
            f"{self._name(slot)}: {what}: position {position} in {name}, found {self.store.state_name(cell)}"
        )
