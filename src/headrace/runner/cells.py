"""The fake's KV store: one 64-bit cell per position, and the arithmetic that fills it.

A position's cell is `H(prev, id) = prev * A + mix(id + 1)` mod 2^64. That is a linear recurrence, so
a chunk is a cumulative sum. Knows blocks and cells; knows neither slots, plans nor time.
"""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import InvalidInput, MemoryCorrupted

CellArray = NDArray[np.uint64]
IndexArray = NDArray[np.int64]

MASK_64 = 2**64 - 1
# H's multiplier (odd, hence invertible mod 2^64), and the cell before position 0.
FACTOR = 0xD1342543DE82EF95
ROOT = 0x48656164_72616365
# The token of position p mixes cell_p + cell_q * PEEK + p * STRIDE + key(seed, choice).
PEEK = 0x9E3779B97F4A7C15
STRIDE = 0xBF58476D1CE4E5B9
# Turns a token's mix into the luck that decides whether it is an end of sequence.
LUCK = 0x94D049BB133111EB

# States of a cell.
POISON = 0
UNWRITTEN = 1
WRITTEN = 2
STATE_NAMES = ("poison", "unwritten", "written")

_HEADER = struct.Struct("<8sII")
_MAGIC = b"HRCELLS1"
# Operands of no dimension: numpy is slower to convert a scalar than to multiply 32 numbers by it.
_S30, _S27, _S31 = (np.array(bits, np.uint64) for bits in (30, 27, 31))
_M1, _M2 = (np.array(factor, np.uint64) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(values: CellArray) -> CellArray:
    """splitmix64's finaliser, in place."""
    values ^= values >> _S30
    values *= _M1
    values ^= values >> _S27
    values *= _M2
    values ^= values >> _S31
    return values


def mix_int(value: int) -> int:
    """`mix` of one number of any size, taken mod 2^64."""
    value &= MASK_64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK_64
    return value ^ (value >> 31)


class Chain:
    """H over whole chunks. Owns the tables of FACTOR's powers, which grow to the longest chunk seen."""

    def __init__(self) -> None:
        self._powers = np.ones(1, np.uint64)
        self._inverses = np.ones(1, np.uint64)

    def extend(self, prev: int, terms: CellArray) -> CellArray:
        """The cells that follow a cell of value `prev`, of ids whose `mix(id + 1)` are `terms`."""
        count = len(terms)
        if count > len(self._powers):
            self._grow(count)
        # c_k = A^k (prev A + sum_{j<=k} m_j A^-j)
        sums: CellArray = terms * self._inverses[:count]
        sums[0] = (prev * FACTOR + sums.item(0)) & MASK_64
        np.add.accumulate(sums, out=sums)
        sums *= self._powers[:count]
        return sums

    def _grow(self, count: int) -> None:
        size = max(count, 2 * len(self._powers))
        self._powers = _powers(FACTOR, size)
        self._inverses = _powers(pow(FACTOR, -1, 2**64), size)


def _powers(base: int, size: int) -> CellArray:
    factors = np.full(size, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


class CellStore:
    """Values and states of `blocks * block_size` cells, and two blocks that nobody is ever given.

    Block `root_block` is written with ROOT throughout: what position -1 reads. Block `no_block` is
    always poison: what a table entry points at while no block was given for it.

    `plain_*` are the same memory: a number, or a block's states, costs there a fraction of what numpy takes.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.num_blocks = blocks
        self.block_size = block_size
        self.root_block = blocks
        self.no_block = blocks + 1
        self.values = np.zeros((blocks + 2) * block_size, np.uint64)
        self.plain_states = bytearray((blocks + 2) * block_size)
        self.states = np.frombuffer(self.plain_states, np.uint8)
        # Who wrote a cell last, numbered within one write: finds a write that names a cell twice.
        self.writers = np.zeros((blocks + 2) * block_size, np.int32)
        # At a block's first cell: the number of the sequence it was given to last.
        self.owners = np.full((blocks + 2) * block_size, -1, np.int64)
        self.plain_values = self.values.data
        self.plain_owners = self.owners.data
        self._block_values = self.values.reshape(-1, block_size)
        self._block_states = self.states.reshape(-1, block_size)
        self._block_values[self.root_block] = ROOT
        self._block_states[self.root_block] = WRITTEN

    def poison(self, blocks: Iterable[int]) -> None:
        poison = bytes([POISON]) * self.block_size
        for block in blocks:
            self.plain_states[self._cells(block)] = poison

    def give(self, blocks: Iterable[int], number: int) -> None:
        """Sequence `number`, and nobody else, will compute all cells of these blocks."""
        unwritten = bytes([UNWRITTEN]) * self.block_size
        for block in blocks:
            cells = self._cells(block)
            self.plain_states[cells] = unwritten
            self.plain_owners[cells.start] = number

    def _cells(self, block: int) -> slice:
        if not 0 <= block < self.num_blocks:
            raise MemoryCorrupted(f"block {block} does not exist: there are {self.num_blocks}")
        first = block * self.block_size
        return slice(first, first + self.block_size)

    def first_unwritten(self, blocks: IndexArray) -> int | None:
        """Index into `blocks` of the first that is not wholly written."""
        self._check_range(blocks)
        bad = np.flatnonzero((self._block_states[blocks] != WRITTEN).any(axis=1))
        return int(bad[0]) if len(bad) else None

    def block_cells(self, blocks: IndexArray) -> CellArray:
        values: CellArray = self._block_values[blocks].reshape(-1)
        return values

    def state_name(self, cell: int) -> str:
        return STATE_NAMES[int(self.states[cell])]

    def export(self, blocks: Sequence[int]) -> bytes:
        """Header, values, then one byte per cell: written or not."""
        chosen = np.array(blocks, np.int64)
        self._check_range(chosen)
        states = self._block_states[chosen]
        if len(chosen) and states.min() == POISON:
            bad = int(chosen[(states == POISON).any(axis=1)][0])
            raise MemoryCorrupted(f"block {bad} is exported and belongs to nobody")
        header = _HEADER.pack(_MAGIC, self.block_size, len(chosen))
        values = self._block_values[chosen].astype("<u8")
        written: NDArray[np.bool_] = states == WRITTEN
        return header + values.tobytes() + written.tobytes()

    def load(self, blocks: Sequence[int], payload: bytes) -> None:
        """Fill `blocks` with what `export` wrote; none of their cells may be written already."""
        chosen = np.array(blocks, np.int64)
        self._check_range(chosen)
        num_cells = len(chosen) * self.block_size
        if len(payload) < _HEADER.size or payload[:8] != _MAGIC:
            raise InvalidInput("payload is no export of cells", param="payload")
        _, block_size, count = _HEADER.unpack_from(payload)
        if (block_size, count) != (self.block_size, len(chosen)):
            raise InvalidInput(
                f"payload holds {count} blocks of {block_size} cells, expected {len(chosen)} of {self.block_size}",
                param="payload",
            )
        if len(payload) != _HEADER.size + 9 * num_cells:
            raise InvalidInput(
                f"payload is {len(payload)} bytes, expected {_HEADER.size + 9 * num_cells}", param="payload"
            )
        if num_cells and self._block_states[chosen].max() == WRITTEN:
            raise MemoryCorrupted("blocks are imported over cells that are written")
        values = np.frombuffer(payload, "<u8", num_cells, _HEADER.size)
        written = np.frombuffer(payload, np.uint8, num_cells, _HEADER.size + 8 * num_cells)
        self._block_values[chosen] = values.reshape(-1, self.block_size)
        self._block_states[chosen] = np.where(written, WRITTEN, UNWRITTEN).reshape(-1, self.block_size)

    def _check_range(self, blocks: IndexArray) -> None:
        if len(blocks) and blocks.view(np.uint64).max() >= self.num_blocks:  # as large numbers, negative ones are too
            bad = next(int(block) for block in blocks if not 0 <= block < self.num_blocks)
            raise MemoryCorrupted(f"block {bad} does not exist: there are {self.num_blocks}")
