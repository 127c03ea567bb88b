"""What a step will compute and what came of it: the seam between engine and runner.

A runner keeps every slot's state on its device: ids, length, block table, sampling parameters.
A plan therefore carries rows and deltas only. A decode row names no id: its input is the token that
the device sampled last for that slot, which the host may not have seen yet.
"""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.core.request import SamplingParams

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


_ONE = np.array(1, np.int32)


class Work(Struct, frozen=True):
    """The sizes a step's time depends on: the features of the cost model."""

    prefill_tokens: int
    decode_rows: int
    kv_tokens: int
    attended: int


def measure_work(starts: IntArray, counts: IntArray) -> Work:
    """A row of one token is a decode row; a longer one is a prefill chunk at its context."""
    if len(counts) == 1:
        count = counts.item(0)
        end = starts.item(0) + count
        return Work(count, 0, end, count * end) if count > 1 else Work(0, 1, end, 0)
    ends = starts + counts
    kv_tokens = int(ends.sum())
    chunks = counts > _ONE
    if b"\x01" not in chunks.tobytes():
        return Work(0, len(counts), kv_tokens, 0)
    sizes = counts[chunks].astype(np.int64)
    attended = int((sizes * ends[chunks]).sum())
    return Work(int(sizes.sum()), len(counts) - len(sizes), kv_tokens, attended)


class SlotStart(Struct, frozen=True):
    """A slot's new occupant: replaces all device state of the slot before the rows of its plan run.

    `ids` are prompt and emitted tokens; the first `num_computed` of them are in the blocks already.
    `blocks[: num_computed // block_size]` are shared and must not be written.
    """

    slot: int
    number: int
    request_id: str
    ids: tuple[int, ...]
    num_prompt: int
    num_computed: int
    blocks: tuple[int, ...]
    sampling: SamplingParams
    choice: int


class Plan(Struct, frozen=True):
    """One step: row r computes `counts[r]` tokens of `slots[r]` from position `starts[r]` on.

    A row with `samples[r]` reaches the end of its slot's ids and yields one token, which the device
    appends to the slot. `grown_*` append block `grown_blocks[i]` to the table of `grown_slots[i]`.
    `freed_blocks` belong to nobody since the last plan. Order of effects: free, start, grow, rows.
    `budget_s` is the time the targets allow; decode rows run even where they alone take longer.
    """

    step: int
    slots: IntArray
    starts: IntArray
    counts: IntArray
    samples: BoolArray
    # Rows that may be sampled only with a mask; empty for most plans.
    masked_rows: IntArray
    begun: tuple[SlotStart, ...]
    grown_slots: IntArray
    grown_blocks: IntArray
    freed_blocks: IntArray
    work: Work
    predicted_s: float
    budget_s: float


class Masks(Struct, frozen=True):
    """Which ids each masked row may take: bit v of row i, little end first, 32 to a word."""

    rows: IntArray
    words: NDArray[np.uint32]


class RowStatus:
    """Outcomes of a row, as `StepResult.statuses` holds them."""

    OK = 0
    NOT_FINITE = 1
    OUT_OF_RANGE = 2
    MASK = 3
    FAILED = 4
    OUT_OF_ROOM = 5

    NAMES = ("ok", "not_finite", "out_of_range", "mask", "failed", "out_of_room")
    WORDS = (
        "",
        "the model's scores are not finite",
        "the model gave an id outside its vocabulary",
        "no token may come next: the reply's grammar and the other limits on its tokens allow none together",
        "its row of the step failed",
        "the device has not enough memory left for even its smallest step",
    )


class Scores(Struct, frozen=True):
    """Log-probabilities of ids, an entry each: what was sampled, and prompts where that was asked.

    `owners` are rows in a step's result and sequence numbers in a frame. `positions` count from the
    sequence's first id. `top_ids` (entries × k) are the likeliest ids, likeliest first, -1 where an entry
    asked for fewer than k.
    """

    owners: NDArray[np.int64]
    positions: IntArray
    logprobs: NDArray[np.float32]
    top_ids: IntArray
    top_logprobs: NDArray[np.float32]

    def take(self, entries: NDArray[np.intp], owners: NDArray[np.int64]) -> "Scores":
        """These entries, under other owners."""
        return Scores(
            owners, self.positions[entries], self.logprobs[entries], self.top_ids[entries], self.top_logprobs[entries]
        )


class StepResult(Struct, frozen=True):
    """`tokens[r]` is row r's token, or -1 where the row samples none or failed.

    `scores` is None when nobody asked. The first id of a sequence has no score.
    """

    step: int
    tokens: IntArray
    statuses: NDArray[np.uint8]
    elapsed_s: float
    scores: Scores | None = None
