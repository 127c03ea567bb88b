"""A plan in the making, and what the host remembers of a launched one. Data only."""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.core.plan import IntArray, Plan, SlotStart
from headrace.engine.budget import StepBudget
from headrace.engine.line import Lane
from headrace.engine.sequence import Sequence

# Slot numbers as numpy indexes with them: twice as fast as int32.
SlotArray = NDArray[np.intp]


class Chunk(Struct, eq=False):
    """A row that catches up by `count` tokens; with the last of them it samples.

    `again` of them were computed before, `free` of these because the scheduler took them away; `prompt`
    are prompt tokens computed for the first time.
    """

    sequence: Sequence
    start: int
    count: int
    seconds: float
    again: int
    free: int
    prompt: int
    is_last: bool


class Growth(Struct, eq=False):
    """A running row was given a block that no plan has told the runner of yet."""

    sequence: Sequence
    block: int
    begun_in: int

    def is_current(self) -> bool:
        """Still in the stay in its slot that the block was given for?"""
        return self.sequence.slot >= 0 and self.sequence.begun_in == self.begun_in


class DecodeRows(Struct, eq=False):
    """Slots that compute the one token they sampled last."""

    slots: SlotArray
    starts: IntArray
    kv_tokens: int


class Draft(Struct, eq=False):
    budget: StepBudget
    now_s: float
    chunks: list[Chunk] = []
    # Tenant of the first prompt that this step completes, and the step's predicted time with it.
    newcomer: tuple[int, float] | None = None
    begun: list[SlotStart] = []
    served: list[Lane] = []


class Tariff(Struct, eq=False):
    """What the rows of one step are charged: their part of the predicted step, its fixed cost shared out."""

    row_s: float
    position_s: float
    scale: float

    def chunk_s(self, chunk: Chunk) -> float:
        """Recomputation that the scheduler caused is free."""
        return chunk.seconds * self.scale * (1.0 - chunk.free / chunk.count)


class Flight(Struct, eq=False):
    """A launched plan; arrays have an entry per row."""

    plan: Plan
    slots: SlotArray
    sequences: NDArray[np.object_]
    generations: IntArray
    # Row number of each chunk, beside it.
    chunks: list[tuple[int, Chunk]]
    tariff: Tariff

    def charge_s(self, row: int) -> float:
        """What the row's tenant was charged for it."""
        first_chunk = len(self.slots) - len(self.chunks)
        if row >= first_chunk:
            return self.tariff.chunk_s(self.chunks[row - first_chunk][1])
        return self.tariff.row_s + self.tariff.position_s * int(self.plan.starts[row])
