"""Who gives way when slots or blocks are short. Owns the victim order and the rules of claims.

A claim is the right to take from somebody else: a reservation, a borrower above a cap, a tenant far
under its share against one above, a guaranteed sequence against elastic ones. Knows no plan.
"""

from collections.abc import Callable

from headrace.engine.sequence import Sequence
from headrace.engine.state import State

# After this many preemptions others go first, as long as there are others.
_PATIENCE = 3


class Memory:
    def __init__(self, state: State) -> None:
        self._state = state

    def make_room_to_grow(self, grower: Sequence, now_s: float) -> bool:
        """A block for a running row. True when the pool has one now; False: the row sits this step out.

        The grower itself may be the one to go.
        """
        state = self._state
        if state.pool.num_available:
            return True
        if state.num_coming_blocks:
            return False
        if grower.guaranteed:
            return self._room_for_guaranteed(grower, now_s)
        victim = self._victim(lambda other: not other.guaranteed and self._may_lose(other, grower), blocks=True)
        if victim is None:
            return False
        state.preempt(victim, now_s)
        return victim is not grower and state.pool.num_available > 0

    def _room_for_guaranteed(self, grower: Sequence, now_s: float) -> bool:
        state = self._state
        victim = self._victim(lambda other: not other.guaranteed, blocks=True)
        if victim is None:
            running = state.table.running()
            if any(not other.guaranteed for other in running):
                return False
            # Every block is guaranteed: the youngest that has gained something gives way.
            able = [other for other in running if self._has_gained(other)]
            if not able:
                return False
            victim = max(able, key=lambda other: (other.arrival_s, other.number))
        state.preempt(victim, now_s)
        return victim is not grower and state.pool.num_available > 0

    def may_claim_slot(self, sequence: Sequence) -> bool:
        """Has the sequence a right to a slot that somebody holds? Cheap: asked every step."""
        return self._slot_claim(sequence) is not None

    def claim_slot(self, sequence: Sequence, now_s: float) -> bool:
        """Free a slot for a waiting sequence that has a right to one."""
        allowed = self._slot_claim(sequence)
        if allowed is None:
            return False
        victim = self._victim(lambda other: not other.guaranteed and allowed(other), blocks=False)
        if victim is None:
            return False
        self._state.preempt(victim, now_s)
        return True

    def _slot_claim(self, sequence: Sequence) -> Callable[[Sequence], bool] | None:
        """Whom the sequence may take a slot from."""
        tenants = self._state.tenants
        tenant = sequence.tenant
        if tenants.used_slots[tenant] < tenants.reserved_slots[tenant]:
            return self._uses_more_slots_than_reserved
        if not tenants.within_cap(tenant, 1, 0):
            return None
        if tenants.any_over_cap(tenant):
            return self._is_borrowed_from_others(tenant)
        if self._far_under_share(tenant):
            return self._above_share(sequence)
        return None

    def claim_blocks(self, sequence: Sequence, missing: int, now_s: float) -> bool:
        """Free `missing` blocks for a waiting sequence that has a right to them, or nothing at all.

        Blocks that a launched plan names come back a step later: then the caller tries again.
        """
        state = self._state
        missing -= state.num_coming_blocks
        if missing <= 0:
            return False
        allowed = self._block_claim(sequence)
        if allowed is None:
            return False
        able = self._ordered(lambda other: not other.guaranteed and allowed(other), blocks=True)
        chosen: list[Sequence] = []
        for other in able:
            if missing <= 0:
                break
            chosen.append(other)
            missing -= state.pool.num_exclusive(other.blocks)
        if missing > 0:
            return False
        for other in chosen:
            state.preempt(other, now_s)
        return True

    def _block_claim(self, sequence: Sequence) -> Callable[[Sequence], bool] | None:
        """Whom the sequence may take blocks from."""
        state = self._state
        tenants = state.tenants
        tenant = sequence.tenant
        need = state.blocks_for(sequence.num_tokens)
        if sequence.guaranteed:
            return lambda other: self._may_lose(other, sequence)
        if tenants.used_blocks[tenant] + need <= tenants.reserved_blocks[tenant]:
            return lambda other: self._may_lose(other, sequence)
        if not tenants.within_cap(tenant, 1, need):
            return None
        if tenants.any_over_cap(tenant):
            return self._is_borrowed_from_others(tenant)
        half_share = 0.5 * tenants.share(tenant) * state.config.blocks
        if tenants.used_blocks[tenant] + need <= half_share:
            return self._above_share(sequence)
        return None

    def _is_borrowed_from_others(self, tenant: int) -> Callable[[Sequence], bool]:
        tenants = self._state.tenants
        return lambda other: other.tenant != tenant and tenants.over_cap(other.tenant)

    def _far_under_share(self, tenant: int) -> bool:
        """Half its share is what a tenant may claim by preemption; the rest comes as others end."""
        state = self._state
        half_share = 0.5 * state.tenants.share(tenant) * state.config.slots
        return state.tenants.used_slots[tenant] + 1 <= half_share

    def _above_share(self, claimant: Sequence) -> Callable[[Sequence], bool]:
        state = self._state
        tenants = state.tenants

        def allowed(other: Sequence) -> bool:
            share = tenants.share(other.tenant)
            return (
                other.tenant != claimant.tenant
                and tenants.level[other.tenant] > tenants.level[claimant.tenant]
                and other.request.tier <= claimant.request.tier
                and (
                    tenants.used_slots[other.tenant] > share * state.config.slots
                    or tenants.used_blocks[other.tenant] > share * state.config.blocks
                )
                and tenants.used_slots[other.tenant] > tenants.reserved_slots[other.tenant]
            )

        return allowed

    def _uses_more_slots_than_reserved(self, other: Sequence) -> bool:
        tenants = self._state.tenants
        return tenants.used_slots[other.tenant] > tenants.reserved_slots[other.tenant]

    def _may_lose(self, other: Sequence, claimant: Sequence) -> bool:
        """Blocks within a reservation are taken by the same tenant only."""
        tenants = self._state.tenants
        if other.tenant == claimant.tenant or not tenants.reserved_blocks[other.tenant]:
            return True
        return tenants.used_blocks[other.tenant] > tenants.reserved_blocks[other.tenant]

    def _has_gained(self, sequence: Sequence) -> bool:
        """A preempted sequence is not preempted again before it has gained tokens."""
        return self._state.table.num_known(sequence) >= sequence.safe_below

    def _ordered(self, allowed: Callable[[Sequence], bool], *, blocks: bool) -> list[Sequence]:
        """Possible victims, first to go first: borrowed, lowest tier, most over its share, cheapest."""
        state = self._state
        tenants = state.tenants
        computed = state.table.computed
        used = tenants.used_blocks if blocks else tenants.used_slots
        rows = []
        for other in state.table.running():
            if other.begun_step == state.planning_step or not self._has_gained(other) or not allowed(other):
                continue
            rows.append(
                (
                    other.preemptions >= _PATIENCE,
                    not tenants.over_cap(other.tenant),
                    int(other.request.tier),
                    -used[other.tenant] / float(tenants.weight[other.tenant]),
                    int(computed[other.slot]),
                    -other.number,
                    other,
                )
            )
        rows.sort(key=lambda row: row[:-1])
        return [row[-1] for row in rows]

    def _victim(self, allowed: Callable[[Sequence], bool], *, blocks: bool) -> Sequence | None:
        ordered = self._ordered(allowed, blocks=blocks)
        return ordered[0] if ordered else None
