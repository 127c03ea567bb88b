"""Tenants as the engine sees them: weighted service, what each uses, what it may use.

Owns the counters of fairness. A tenant's *level* is the predicted device-seconds it was given,
divided by its weight: the tenant with the lowest level is served next. Knows no sequence.
"""

import numpy as np

from headrace.core.config import TenantConfig

_NO_CAP = 2**31 - 1
_LEAST_WAIT_S = 0.05
# Tenants remembered beyond those that are active.
_MOST_IDLE = 4096


class TenantTable:
    def __init__(self, configs: tuple[TenantConfig, ...]) -> None:
        self._configs = {config.name: config for config in configs}
        self._index: dict[str, int] = {}
        self.names: list[str] = []
        self.level = np.zeros(8)
        self.weight = np.ones(8)
        # Device-seconds charged here that `take_given` has not told yet.
        self._given = np.zeros(8)
        self.used_slots: list[int] = []
        self.used_blocks: list[int] = []
        # What is promised to guaranteed sequences and cannot be taken back, of each tenant and in all.
        self.guaranteed_slots: list[int] = []
        self.guaranteed_blocks: list[int] = []
        self.num_guaranteed_slots = 0
        self.num_guaranteed_blocks = 0
        self.max_slots: list[int] = []
        self.max_blocks: list[int] = []
        self.reserved_slots: list[int] = []
        self.reserved_blocks: list[int] = []
        self.waiting_s: list[float] = []
        self.waiting_prompt_s: list[float] = []
        self.num_live: list[int] = []
        self.num_waiting: list[int] = []
        # Seconds waited per second of work that stood before: others take their part without queueing.
        self.wait_bias: list[float] = []
        # How many sequences of each tenant wait or run.
        self._active: dict[int, int] = {}
        self._active_weight = 0.0
        # Rows that may be used again, longest idle first.
        self._idle: dict[int, None] = {}
        self.reserving: list[int] = []
        self._capped: list[int] = []
        for config in configs:
            self.index(config.name)

    def index(self, name: str) -> int:
        """The tenant's row, made on first sight; rows of tenants long idle are used again."""
        found = self._index.get(name)
        return self._add(name) if found is None else found

    def _add(self, name: str) -> int:
        row = self._spare_row()
        self._index[name] = row
        self.names[row] = name
        self.level[row] = 0.0
        self._given[row] = 0.0
        self.wait_bias[row] = 1.0
        self._configure(row)
        if name not in self._configs:
            self._idle[row] = None
        return row

    def _configure(self, row: int) -> None:
        config = self._configs.get(self.names[row]) or TenantConfig(self.names[row])
        self.weight[row] = config.weight
        self.max_slots[row] = _NO_CAP if config.max_slots is None else config.max_slots
        self.max_blocks[row] = _NO_CAP if config.max_blocks is None else config.max_blocks
        self.reserved_slots[row] = config.reserved_slots
        self.reserved_blocks[row] = config.reserved_blocks
        if config.reserved_slots or config.reserved_blocks:
            self.reserving.append(row)
        if config.max_slots is not None or config.max_blocks is not None:
            self._capped.append(row)

    def replace(self, configs: tuple[TenantConfig, ...]) -> None:
        """Other weights, caps and reservations from now on. Levels stay: what was given was given."""
        self._configs = {config.name: config for config in configs}
        self.reserving.clear()
        self._capped.clear()
        for name, row in self._index.items():
            self._configure(row)
            if name in self._configs:
                self._idle.pop(row, None)
            elif not self.num_live[row]:
                self._idle.setdefault(row, None)
        self._active_weight = float(sum(self.weight[row] for row in self._active))
        for config in configs:
            self.index(config.name)

    def _spare_row(self) -> int:
        """A row nobody uses. Forgetting the longest idle tenant costs it nothing: it would be lifted anyway."""
        row = len(self.names)
        if row >= _MOST_IDLE and self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            del self._index[self.names[oldest]]
            return oldest
        if row == len(self.level):
            self.level = np.concatenate([self.level, np.zeros(row)])
            self.weight = np.concatenate([self.weight, np.ones(row)])
            self._given = np.concatenate([self._given, np.zeros(row)])
        self.names.append("")
        counts = (self.used_slots, self.used_blocks, self.guaranteed_slots, self.guaranteed_blocks)
        limits = (self.max_slots, self.max_blocks, self.reserved_slots, self.reserved_blocks)
        for column in (*counts, *limits, self.num_live, self.num_waiting):
            column.append(0)
        for seconds in (self.waiting_s, self.waiting_prompt_s, self.wait_bias):
            seconds.append(0.0)
        return row

    def accept(self, tenant: int) -> None:
        """One more live sequence: its row is not given to another tenant before that one has ended."""
        self.num_live[tenant] += 1
        self._idle.pop(tenant, None)
        self.enter(tenant)

    def end(self, tenant: int) -> None:
        self.leave(tenant)
        self.num_live[tenant] -= 1
        if not self.num_live[tenant] and self.names[tenant] not in self._configs:
            self._idle[tenant] = None

    def enter(self, tenant: int) -> None:
        """One more sequence that waits or runs: paused ones do not count for shares."""
        count = self._active.get(tenant, 0)
        if count == 0:
            self._active_weight += self.weight.item(tenant)
        self._active[tenant] = count + 1

    def leave(self, tenant: int) -> None:
        """One has ended or is paused."""
        count = self._active[tenant] - 1
        if count:
            self._active[tenant] = count
            return
        del self._active[tenant]
        self._active_weight = self._active_weight - self.weight.item(tenant) if self._active else 0.0

    def lift(self, tenant: int, floor: float | None) -> None:
        """A tenant that had nothing waiting comes back: idle time is no credit.

        It is lifted to the level that is being served or, where nobody waits, to the most served of all.
        """
        level = self.level
        if floor is None:
            floor = level.item(level.argmax())  # `max` takes five times as long
        if floor > level.item(tenant):
            level[tenant] = floor

    def charge(self, rows: np.ndarray, seconds: np.ndarray) -> None:
        """Add device-seconds to the tenants of `rows`; negative seconds are a refund."""
        given = np.bincount(rows, weights=seconds, minlength=len(self.level))
        self._given += given
        self.level += given / self.weight

    def charge_one(self, tenant: int, seconds: float) -> None:
        self._given[tenant] = self._given.item(tenant) + seconds
        self.observe(tenant, seconds)

    def observe(self, tenant: int, seconds: float) -> None:
        """Service that was given elsewhere."""
        self.level[tenant] = self.level.item(tenant) + seconds / self.weight.item(tenant)

    def take_given(self) -> dict[str, float]:
        """Device-seconds given here since last asked. A refund that is larger waits for the next charge."""
        rows = (self._given > 0.0).nonzero()[0].tolist()
        given = {self.names[row]: float(self._given[row]) for row in rows}
        self._given[rows] = 0.0
        return given

    def hold_slot(self, tenant: int, change: int, *, guaranteed: bool) -> None:
        self.used_slots[tenant] += change
        if guaranteed:
            self.guaranteed_slots[tenant] += change
            self.num_guaranteed_slots += change

    def guarantee_blocks(self, tenant: int, change: int) -> None:
        self.guaranteed_blocks[tenant] += change
        self.num_guaranteed_blocks += change

    def share(self, tenant: int) -> float:
        """The tenant's part of everything, by weight among active tenants."""
        return self.weight.item(tenant) / self._active_weight if self._active_weight else 1.0

    def learn_wait(self, tenant: int, expected_s: float, waited_s: float) -> None:
        """Compare a wait with what was expected of it; short ones are mostly chance."""
        if expected_s >= _LEAST_WAIT_S:
            ratio = min(max(waited_s / expected_s, 0.25), 8.0)
            self.wait_bias[tenant] += 0.05 * (ratio - self.wait_bias[tenant])

    def over_cap(self, tenant: int) -> bool:
        return self.used_slots[tenant] > self.max_slots[tenant] or self.used_blocks[tenant] > self.max_blocks[tenant]

    def any_over_cap(self, but: int) -> bool:
        return any(tenant != but and self.over_cap(tenant) for tenant in self._capped)

    def within_cap(self, tenant: int, slots: int, blocks: int) -> bool:
        """Could the tenant take `slots` and `blocks` more without borrowing?"""
        return (
            self.used_slots[tenant] + slots <= self.max_slots[tenant]
            and self.used_blocks[tenant] + blocks <= self.max_blocks[tenant]
        )

    def reserved_by_others(self, tenant: int) -> tuple[int, int]:
        """Slots and blocks that other tenants have reserved, used or not."""
        others = [other for other in self.reserving if other != tenant]
        return sum(self.reserved_slots[o] for o in others), sum(self.reserved_blocks[o] for o in others)

    def may_guarantee_slot(self, tenant: int, slots: int) -> bool:
        """Would everybody's reservation still be there with one more slot that cannot be taken back?"""
        others = [other for other in self.reserving if other != tenant]
        short = sum(max(0, self.reserved_slots[other] - self.guaranteed_slots[other]) for other in others)
        return self.num_guaranteed_slots + 1 + short <= slots

    def may_guarantee_blocks(self, tenant: int, more: int, blocks: int) -> bool:
        """Likewise with `more` blocks."""
        others = [other for other in self.reserving if other != tenant]
        short = sum(max(0, self.reserved_blocks[other] - self.guaranteed_blocks[other]) for other in others)
        return self.num_guaranteed_blocks + more + short <= blocks

    @property
    def num_active(self) -> int:
        return len(self._active)
