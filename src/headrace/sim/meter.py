"""How full the workers were: slots, KV blocks and queue, weighted by the time of each step.

Owns running sums only. Slots are counted two ways: always, and while anything waits, which is when
an idle slot is a loss. Also adds up what each tenant was given while others wanted it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.config import CostProfile
from headrace.core.plan import Plan

IntArray = NDArray[np.int64]


@dataclass(slots=True)
class Flight:
    """A launched step as it is remembered until it ends."""

    launch_ns: int
    # Slots with a row in the plan or a sequence that stays.
    occupied: int
    waiting: int
    used_blocks: int


class Meter:
    def __init__(self, slots: int, blocks: int) -> None:
        self._slots = slots
        self._blocks = blocks
        self.num_steps = 0
        self.busy_ns = 0
        self.max_waiting = 0
        self.max_queue_s = 0.0
        self.max_used_blocks = 0
        self._slot_ns = 0
        self._block_ns = 0
        self._contended_ns = 0
        self._contended_slot_ns = 0
        self._contended_block_ns = 0

    def add(self, flight: Flight, elapsed_ns: int) -> None:
        """A step has ended after `elapsed_ns` of device time."""
        self.num_steps += 1
        self.busy_ns += elapsed_ns
        slot_ns = flight.occupied * elapsed_ns
        block_ns = flight.used_blocks * elapsed_ns
        self._slot_ns += slot_ns
        self._block_ns += block_ns
        if flight.used_blocks > self.max_used_blocks:
            self.max_used_blocks = flight.used_blocks
        if flight.waiting:
            self._contended_ns += elapsed_ns
            self._contended_slot_ns += slot_ns
            self._contended_block_ns += block_ns
            if flight.waiting > self.max_waiting:
                self.max_waiting = flight.waiting

    def occupancy(self, *, contended: bool = False) -> float | None:
        """Mean share of occupied slots while stepping; None when there was no such step."""
        if contended:
            return _share(self._contended_slot_ns, self._slots * self._contended_ns)
        return _share(self._slot_ns, self._slots * self.busy_ns)

    def kv_use(self, *, contended: bool = False) -> float | None:
        """Mean share of KV blocks that sequences held."""
        if contended:
            return _share(self._contended_block_ns, self._blocks * self._contended_ns)
        return _share(self._block_ns, self._blocks * self.busy_ns)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class Service:
    """Device-seconds given to tenants in steps that left somebody waiting, as predicted.

    Also what a backlogged tenant was *due*: of the time that went to backlogged tenants, its part by
    weight among them. Given over due is 1 for everyone where sharing is fair.
    """

    def __init__(self, profile: CostProfile, weights: list[float]) -> None:
        self._profile = profile
        self._weights = np.array(weights, np.float64)
        self._all = np.zeros(len(weights))
        self._given = np.zeros(len(weights))
        self._due = np.zeros(len(weights))

    def add(self, plan: Plan, tenants: IntArray, backlogged: IntArray) -> None:
        """`tenants[r]` owns row r of the plan; the tenants `backlogged` could have used more."""
        if len(tenants) == 0:
            return
        size = 1 + max(int(tenants.max()), int(backlogged.max(initial=0)))
        if size > len(self._weights):
            self._grow(size)
        profile = self._profile
        counts = plan.counts
        ends = plan.starts + counts
        chunk_s = counts * (profile.c_in_s + profile.c_att_s * ends)
        seconds = np.where(counts > 1, chunk_s, profile.c_out_s) + profile.c_kv_s * ends
        # The step's fixed cost is shared in proportion, as the engine charges it.
        total_s = float(seconds.sum())
        seconds *= plan.predicted_s / total_s if total_s > 0.0 else 0.0
        given = np.bincount(tenants, weights=seconds, minlength=len(self._weights))
        self._all += given
        if len(backlogged) > 1:
            theirs, weights = given[backlogged], self._weights[backlogged]
            self._given[backlogged] += theirs
            self._due[backlogged] += weights * (theirs.sum() / weights.sum())

    def seconds(self, tenant: int) -> float:
        return float(self._all[tenant]) if tenant < len(self._all) else 0.0

    def given_over_due(self, tenant: int) -> float | None:
        """None for a tenant that was never backlogged beside another."""
        if tenant >= len(self._due) or self._due[tenant] <= 0.0:
            return None
        return float(self._given[tenant] / self._due[tenant])

    def _grow(self, size: int) -> None:
        """Tenants that only a trace names have weight 1."""
        more = size - len(self._weights)
        self._weights = np.concatenate([self._weights, np.ones(more)])
        self._all, self._given, self._due = (
            np.concatenate([column, np.zeros(more)]) for column in (self._all, self._given, self._due)
        )


def jain(values: list[float]) -> float | None:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0.0 else None
