"""Who gives way when slots or blocks are short. Owns the victim order and the rules of claims.

A claim is the right to take from somebody else: a reservation, a borrower above a cap, a tenant far
under its share against one above, a guaranteed sequence against elastic ones. Knows no plan.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headrace.core.plan import BoolArray
from headrace.core.request import Tier
from headrace.engine.draft import SlotArray
from headrace.engine.sequence import Sequence
from headrace.engine.state import State

# After this many preemptions others go first, as long as there are others.
_PATIENCE = 3
_TOP = int(max(Tier))


@dataclass(slots=True, frozen=True)
class Claim:
    """Whose elastic sequences may be taken from, and up to which tier."""

    from_tenant: Callable[[int], bool]
    up_to_tier: int = _TOP


class Memory:
    def __init__(self, state: State) -> None:
        self._state = state

    def make_room_to_grow(self, grower: Sequence, now_s: float) -> bool:
        """A block for a running row. True when the pool has one now; False: the row sits this step out.

        The grower itself may be the one to go.
        """
        state = self._state
        if grower.guaranteed and self._reaches_into_reserved(grower):
            victim = self._youngest_guaranteed(everyone=False)
            if victim is not None:
                state.preempt(victim, now_s)
            return victim is not None and victim is not grower and state.pool.num_available > 0
        if state.pool.num_available:
            return True
        if state.num_coming_blocks:
            return False
        victim = self._first(Claim(self._may_lose_blocks_to(grower.tenant)), blocks=True)
        if victim is None and grower.guaranteed:
            victim = self._youngest_guaranteed(everyone=True)
        if victim is None:
            return False
        state.preempt(victim, now_s)
        return victim is not grower and state.pool.num_available > 0

    def _reaches_into_reserved(self, grower: Sequence) -> bool:
        """Would one more guaranteed block be one that another tenant has reserved?"""
        state = self._state
        if not state.tenants.reserving or len(grower.blocks) < grower.reserved_blocks:
            return False
        return not state.tenants.may_guarantee_blocks(grower.tenant, 1, state.config.blocks)

    def _youngest_guaranteed(self, *, everyone: bool) -> Sequence | None:
        """Who goes when every block that may be is guaranteed; `everyone`: only if no elastic one is left."""
        table = self._state.table
        taken = (table.number >= 0) & (table.guaranteed if not everyone else True)
        if everyone and (taken & ~table.guaranteed).any():
            return None
        able: list[Sequence] = table.sequences[taken & self._has_gained()].tolist()
        return max(able, key=lambda other: (other.arrival_s, other.number), default=None)

    def may_claim_slot(self, sequence: Sequence) -> bool:
        """Has the sequence a right to a slot that somebody holds? Cheap: asked every step."""
        return self._slot_claim(sequence) is not None

    def claim_slot(self, sequence: Sequence, now_s: float) -> bool:
        """Free a slot for a waiting sequence that has a right to one."""
        claim = self._slot_claim(sequence)
        victim = self._first(claim, blocks=False) if claim is not None else None
        if victim is None:
            return False
        self._state.preempt(victim, now_s)
        return True

    def claim_blocks(self, sequence: Sequence, missing: int, now_s: float) -> bool:
        """Free `missing` blocks for a waiting sequence that has a right to them, or nothing at all.

        Blocks that a launched plan names come back a step later: then the caller tries again.
        """
        state = self._state
        missing -= state.num_coming_blocks
        claim = self._block_claim(sequence) if missing > 0 else None
        if claim is None:
            return False
        chosen = self._choose(claim, missing)
        for victim in chosen:
            state.preempt(victim, now_s)
        return bool(chosen)

    def _choose(self, claim: Claim, missing: int) -> list[Sequence]:
        """Victims that together free `missing` blocks, nobody taken below what is theirs; none if they cannot."""
        state = self._state
        tenants = state.tenants
        chosen: list[Sequence] = []
        enough = False
        for slot in self._ordered(claim, blocks=True).tolist():
            victim: Sequence = state.table.sequences[slot]
            if not claim.from_tenant(victim.tenant):
                continue
            chosen.append(victim)
            tenants.used_slots[victim.tenant] -= 1
            tenants.used_blocks[victim.tenant] -= len(victim.blocks)
            enough = state.pool.num_freed_by([one.blocks for one in chosen]) >= missing
            if enough:
                break
        for victim in chosen:
            tenants.used_slots[victim.tenant] += 1
            tenants.used_blocks[victim.tenant] += len(victim.blocks)
        return chosen if enough else []

    def _slot_claim(self, sequence: Sequence) -> Claim | None:
        """Whom the sequence may take a slot from."""
        state = self._state
        tenants = state.tenants
        tenant = sequence.tenant
        if tenants.used_slots[tenant] < tenants.reserved_slots[tenant]:
            return Claim(lambda other: tenants.used_slots[other] > tenants.reserved_slots[other])
        if not tenants.within_cap(tenant, 1, 0):
            return None
        if tenants.any_over_cap(tenant):
            return self._from_borrowers(tenant)
        # Half its share is what a tenant may claim by preemption; the rest comes as others end.
        if tenants.used_slots[tenant] + 1 <= 0.5 * tenants.share(tenant) * state.config.slots:
            return self._from_those_above_share(sequence)
        return None

    def _block_claim(self, sequence: Sequence) -> Claim | None:
        """Whom the sequence may take blocks from."""
        state = self._state
        tenants = state.tenants
        tenant = sequence.tenant
        wanted = tenants.used_blocks[tenant] + state.blocks_for(sequence.num_tokens)
        if sequence.guaranteed or wanted <= tenants.reserved_blocks[tenant]:
            return Claim(self._may_lose_blocks_to(tenant))
        if not tenants.within_cap(tenant, 1, wanted - tenants.used_blocks[tenant]):
            return None
        if tenants.any_over_cap(tenant):
            return self._from_borrowers(tenant)
        if wanted <= 0.5 * tenants.share(tenant) * state.config.blocks:
            return self._from_those_above_share(sequence)
        return None

    def _from_borrowers(self, tenant: int) -> Claim:
        tenants = self._state.tenants
        return Claim(lambda other: other != tenant and tenants.over_cap(other))

    def _from_those_above_share(self, claimant: Sequence) -> Claim:
        config = self._state.config
        tenants = self._state.tenants

        def allowed(other: int) -> bool:
            share = tenants.share(other)
            above = tenants.used_slots[other] > share * config.slots or (
                tenants.used_blocks[other] > share * config.blocks
            )
            return (
                above
                and other != claimant.tenant
                and bool(tenants.level[other] >= tenants.level[claimant.tenant])
                and tenants.used_slots[other] > tenants.reserved_slots[other]
            )

        return Claim(allowed, up_to_tier=int(claimant.request.tier))

    def _may_lose_blocks_to(self, tenant: int) -> Callable[[int], bool]:
        """Blocks within a reservation are taken by the same tenant only."""
        tenants = self._state.tenants
        reserved, used = tenants.reserved_blocks, tenants.used_blocks
        return lambda other: other == tenant or not reserved[other] or used[other] > reserved[other]

    def _has_gained(self) -> BoolArray:
        """A preempted sequence is not preempted again before it has gained tokens."""
        table = self._state.table
        return table.emitted >= table.safe_below

    def _ordered(self, claim: Claim, *, blocks: bool) -> SlotArray:
        """Slots that may be taken, first to go first: borrowed, lowest tier, most over its share, cheapest."""
        state = self._state
        table, tenants = state.table, state.tenants
        able = (table.number >= 0) & ~table.guaranteed & self._has_gained()
        able &= (table.begun_in != state.planning) & (table.tier <= claim.up_to_tier)
        slots: SlotArray = able.nonzero()[0]
        used = tenants.used_blocks if blocks else tenants.used_slots
        # Per tenant: borrowed or not, and how much it uses for its weight.
        owners, row = np.unique(table.tenant[slots], return_inverse=True)
        names = owners.tolist()
        allowed = np.array([claim.from_tenant(tenant) for tenant in names], np.bool_)
        within = np.array([not tenants.over_cap(tenant) for tenant in names], np.bool_)
        use = np.array([-used[tenant] / float(tenants.weight[tenant]) for tenant in names])
        kept = allowed[row] if names else row.astype(np.bool_)
        slots, row = slots[kept], row[kept]
        if not len(slots):
            return slots
        keys = (
            -table.number[slots],
            table.computed[slots],
            use[row],
            table.tier[slots],
            within[row],
            table.preemptions[slots] >= _PATIENCE,
        )
        ordered: SlotArray = slots[np.lexsort(keys)]
        return ordered

    def _first(self, claim: Claim, *, blocks: bool) -> Sequence | None:
        ordered = self._ordered(claim, blocks=blocks)
        return self._state.table.sequences[ordered[0]] if len(ordered) else None
