"""What the engine says about its sequences. Owns events and counters; knows no face.

One frame a step carries every row's token; ends follow in the same frame.
"""

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from headrace.core.plan import IntArray, Scores


class Counter(IntEnum):
    """Columns of a counter row. Cumulative per sequence; they ride in every event."""

    PROMPT_COMPUTED = 0
    PROMPT_CACHED = 1
    EMITTED = 2
    OVERRUN = 3
    RECOMPUTED = 4
    REPLAYED = 5


NUM_COUNTERS = len(Counter)


class Counters(Struct, frozen=True):
    prompt_computed: int = 0
    prompt_cached: int = 0
    emitted: int = 0
    overrun: int = 0
    recomputed: int = 0
    replayed: int = 0


class Outcome(IntEnum):
    """The three ways a sequence ends; every accepted one ends in exactly one."""

    FINISHED = 0
    ABORTED = 1
    FAILED = 2


class TokenEvent(Struct, frozen=True):
    number: int
    index: int
    token: int
    counters: Counters


class Waits(Struct, frozen=True):
    """Where a sequence's time in the engine went, in seconds; the parts sum to its stay."""

    wait_capacity_s: float = 0.0
    wait_fairness_s: float = 0.0
    prefill_s: float = 0.0
    prefill_others_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    paused_s: float = 0.0


class Ended(Struct, frozen=True):
    """The terminal event. `reason`: stop, length, or the code of what ended it."""

    number: int
    request_id: str
    choice: int
    outcome: Outcome
    reason: str
    counters: Counters
    waits: Waits
    preemptions: int = 0
    message: str = ""


class EngineLoad(Struct, frozen=True):
    """What a router needs to know. Seconds are predicted device time."""

    queue_s: float
    running_s: float
    waiting: int
    running: int
    free_slots: int
    free_blocks: int
    used_blocks: int
    total_blocks: int


def _no_ints() -> IntArray:
    return np.zeros(0, np.int32)


def _no_numbers() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def _no_counters() -> IntArray:
    return np.zeros((0, NUM_COUNTERS), np.int32)


class StepFrame(Struct, frozen=True):
    """All tokens of one step (a row each) and the sequences that ended with it."""

    step: int
    numbers: NDArray[np.int64] = field(default_factory=_no_numbers)
    indices: IntArray = field(default_factory=_no_ints)
    tokens: IntArray = field(default_factory=_no_ints)
    counters: IntArray = field(default_factory=_no_counters)
    ended: tuple[Ended, ...] = ()
    scores: Scores | None = None

    def events(self) -> Iterator[TokenEvent]:
        """The rows one by one, for readers that do not need the speed of arrays."""
        for row in range(len(self.numbers)):
            yield TokenEvent(
                int(self.numbers[row]),
                int(self.indices[row]),
                int(self.tokens[row]),
                Counters(*self.counters[row].tolist()),
            )
