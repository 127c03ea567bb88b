"""Who held which slot when, for drawing. Owns the spans of one worker's slots and its waiting line.

A span is a stretch of steps in which one slot computed one request in one manner: catching up
(prefill) or decoding. A slot that was held without a row for some steps counts as held.
"""

from array import array
from collections import deque

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.core.plan import Plan

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
MAX_SPANS = 200_000


class Spans(Struct, frozen=True):
    """Columns of equal length, a row per span; beside them the waiting line as it changed."""

    slots: IntArray
    ordinals: IntArray
    starts_s: FloatArray
    ends_s: FloatArray
    prefill: NDArray[np.bool_]
    waiting_at_s: FloatArray
    waiting: IntArray
    num_slots: int


class SlotRecorder:
    """Follows one worker; takes no more spans past a bound, so that no run fills the memory."""

    def __init__(self, num_slots: int, worker: int = 0) -> None:
        self.worker = worker
        self._num_slots = num_slots
        # 2 · request + catching up, per slot, so that one comparison finds every change; -1: none yet.
        self._kind = np.full(num_slots, -1, np.int64)
        self._start_ns = np.zeros(num_slots, np.int64)
        self._end_ns = np.zeros(num_slots, np.int64)
        self._flights: deque[tuple[IntArray, IntArray]] = deque()
        self._columns = [array("q") for _ in range(4)]
        self._waiting_ns = array("q")
        self._waiting = array("q")
        self._last_waiting = deque[int]()

    def launched(self, plan: Plan, slot_ordinals: IntArray, waiting: int) -> None:
        """`slot_ordinals[s]` is the request that holds slot s in this plan."""
        slots = plan.slots.astype(np.int64)
        kinds = 2 * slot_ordinals[slots] + ((plan.counts > 1) | ~plan.samples)
        self._flights.append((slots, kinds))
        self._last_waiting.append(waiting)

    def ended(self, start_ns: int, end_ns: int) -> None:
        """The oldest launched plan ran from `start_ns` to `end_ns`."""
        slots, kinds = self._flights.popleft()
        changed = kinds != self._kind[slots]
        if changed.any():
            for slot, kind in zip(slots[changed].tolist(), kinds[changed].tolist(), strict=True):
                self._open(slot, kind, start_ns)
        self._end_ns[slots] = end_ns
        waiting = self._last_waiting.popleft()
        if not self._waiting or self._waiting[-1] != waiting:
            self._waiting_ns.append(start_ns)
            self._waiting.append(waiting)

    def worker_died(self) -> None:
        """What was launched never ended; the slots are empty."""
        self._flights.clear()
        self._last_waiting.clear()
        self._close_all()

    def spans(self) -> Spans:
        self._close_all()
        slots, kinds, starts, ends = (np.array(column, np.int64) for column in self._columns)
        return Spans(
            slots,
            kinds // 2,
            starts / 1e9,
            ends / 1e9,
            kinds % 2 == 1,
            np.array(self._waiting_ns, np.int64) / 1e9,
            np.array(self._waiting, np.int64),
            self._num_slots,
        )

    def _open(self, slot: int, kind: int, start_ns: int) -> None:
        same = int(self._kind[slot]) // 2 == kind // 2
        self._close(slot)
        self._kind[slot] = kind
        # The same request goes on: its new manner begins where the old one ended.
        self._start_ns[slot] = self._end_ns[slot] if same else start_ns

    def _close(self, slot: int) -> None:
        if self._kind[slot] >= 0 and len(self._columns[0]) < MAX_SPANS:
            values = (slot, self._kind[slot], self._start_ns[slot], self._end_ns[slot])
            for column, value in zip(self._columns, values, strict=True):
                column.append(int(value))

    def _close_all(self) -> None:
        for slot in range(self._num_slots):
            self._close(slot)
        self._kind[:] = -1
