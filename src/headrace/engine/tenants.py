"""Tenants as the engine sees them: weighted service, what each uses, what it may use.

Owns the counters of fairness. A tenant's *level* is the predicted device-seconds it was given,
divided by its weight: the tenant with the lowest level is served next. Knows no sequence.
"""

import numpy as np

from headrace.core.config import TenantConfig

_NO_CAP = 2**31 - 1
_LEAST_WAIT_S = 0.05


class TenantTable:
    def __init__(self, configs: tuple[TenantConfig, ...]) -> None:
        self._configs = {config.name: config for config in configs}
        self._index: dict[str, int] = {}
        self.names: list[str] = []
        self.level = np.zeros(8)
        self.weight = np.ones(8)
        self.used_slots: list[int] = []
        self.used_blocks: list[int] = []
        self.max_slots: list[int] = []
        self.max_blocks: list[int] = []
        self.reserved_slots: list[int] = []
        self.reserved_blocks: list[int] = []
        self.waiting_s: list[float] = []
        self.waiting_prompt_s: list[float] = []
        self.num_waiting: list[int] = []
        # Seconds waited per second of work that stood before: others take their part without queueing.
        self.wait_bias: list[float] = []
        # Tenants with anything waiting, running or paused: dict as an ordered set.
        self._active: dict[int, int] = {}
        self._active_weight = 0.0
        self._last_level = 0.0
        self.reserving: list[int] = []
        self._capped: list[int] = []
        for config in configs:
            self.index(config.name)

    def index(self, name: str) -> int:
        """The tenant's row, made on first sight."""
        found = self._index.get(name)
        return self._add(name) if found is None else found

    def _add(self, name: str) -> int:
        config = self._configs.get(name) or TenantConfig(name)
        row = self._index[name] = len(self.names)
        if row == len(self.level):
            self.level = np.concatenate([self.level, np.zeros(row)])
            self.weight = np.concatenate([self.weight, np.ones(row)])
        self.names.append(name)
        self.weight[row] = config.weight
        self.used_slots.append(0)
        self.used_blocks.append(0)
        self.max_slots.append(_NO_CAP if config.max_slots is None else config.max_slots)
        self.max_blocks.append(_NO_CAP if config.max_blocks is None else config.max_blocks)
        self.reserved_slots.append(config.reserved_slots)
        self.reserved_blocks.append(config.reserved_blocks)
        self.waiting_s.append(0.0)
        self.waiting_prompt_s.append(0.0)
        self.num_waiting.append(0)
        self.wait_bias.append(1.0)
        if config.reserved_slots or config.reserved_blocks:
            self.reserving.append(row)
        if config.max_slots is not None or config.max_blocks is not None:
            self._capped.append(row)
        return row

    def enter(self, tenant: int) -> None:
        """One more live sequence. A tenant that returns from idle is lifted to the least active level.

        By one unit in the last place less: a tie goes to the one who was away. Where nobody is active,
        the level of the last to leave stands for them.
        """
        count = self._active.get(tenant, 0)
        if count == 0:
            if self._active or self.level[tenant] < self._last_level:
                least = self.level[list(self._active)].min() if self._active else self._last_level
                self.level[tenant] = max(self.level[tenant], np.nextafter(least, -np.inf))
            self._active_weight += float(self.weight[tenant])
        self._active[tenant] = count + 1

    def leave(self, tenant: int) -> None:
        count = self._active[tenant] - 1
        if count:
            self._active[tenant] = count
        else:
            del self._active[tenant]
            self._active_weight -= float(self.weight[tenant])
            if not self._active:
                self._active_weight = 0.0
                self._last_level = float(self.level[tenant])

    def charge(self, rows: np.ndarray, seconds: np.ndarray) -> None:
        """Add device-seconds to the tenants of `rows`; negative seconds are a refund."""
        width = len(self.level)
        self.level += np.bincount(rows, weights=seconds, minlength=width) / self.weight

    def charge_one(self, tenant: int, seconds: float) -> None:
        self.level[tenant] += seconds / self.weight[tenant]

    def share(self, tenant: int) -> float:
        """The tenant's part of everything, by weight among active tenants."""
        return float(self.weight[tenant]) / self._active_weight if self._active_weight else 1.0

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

    def unused_slots(self, but: int) -> int:
        """Reserved slots that other tenants than `but` do not use now."""
        return sum(max(0, self.reserved_slots[t] - self.used_slots[t]) for t in self.reserving if t != but)

    def unused_blocks(self, but: int) -> int:
        return sum(max(0, self.reserved_blocks[t] - self.used_blocks[t]) for t in self.reserving if t != but)

    @property
    def num_active(self) -> int:
        return len(self._active)
