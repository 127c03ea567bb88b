"""Hands out what a step has left after its decode rows: running prefills and the line, in order.

Owns admission to slots. Decides only who gets a chunk; moves are the state's, claims are memory's.
"""

from headrace.engine.budget import StepBudget, part_target_s
from headrace.engine.draft import Chunk, Draft
from headrace.engine.line import Lane
from headrace.engine.memory import Memory
from headrace.engine.sequence import Phase, Sequence
from headrace.engine.slots import some
from headrace.engine.state import State

# Lanes whose head does not fit are passed, at most this many in a step; fewer when every slot is taken,
# where only a right to somebody's slot can help.
_MOST_PASSED = 32
_MOST_PASSED_WHEN_FULL = 4
# How much longer a step that yields a newcomer's first token may be made by parts of other prompts.
_NEWCOMER_SLACK = 1.1

Order = tuple[int, float, int, float]


class Allotment:
    def __init__(self, state: State, memory: Memory) -> None:
        self._state = state
        self._memory = memory
        # Blocks were taken for it and come back when the launched plan is applied.
        self._claimant: Sequence | None = None

    def fill(self, draft: Draft) -> None:
        """Hand out the step's time: reservations first, then running prefills and the line, by order.

        One that has aged and still does not fit is passed no more, so that memory gathers for it; a
        guaranteed one holds back only others of its kind.
        """
        state = self._state
        if self._claimant is not None:
            self._serve(self._claimant, draft)
        if state.tenants.reserving:
            self._serve_reserved(draft)
        running = self._prefills_in_order(draft) if state.prefilling else []
        if state.line.count == 0 or (state.table.num_free == 0 and state.tenants.num_active == 1):
            # Nobody waits, or nobody but those who hold every slot themselves.
            for sequence in running:
                self._advance(sequence, draft)
            return
        passed: list[Lane] = []
        borrowers: list[Lane] = []
        held = False
        while True:
            found = self._next(passed, borrowers)
            if running and (found is None or self._order(running[0]) <= self._lane_order(*found)):
                self._advance(running.pop(0), draft)
                continue
            if found is None or not draft.budget.has_room:
                break
            lane, head = found
            stays = held and head.guaranteed
            if stays or not self._admit(head, draft, lane):
                aged = draft.now_s - head.arrival_s >= state.config.ageing_s
                if aged and not head.guaranteed:
                    break
                held = held or (aged and head.guaranteed)
                state.line.set_aside(lane)
                passed.append(lane)
        for sequence in running:
            self._advance(sequence, draft)
        if borrowers and not passed and state.line.first() is None:
            self._lend(borrowers, draft)
        state.line.put_back(passed + borrowers)

    def _serve(self, claimant: Sequence, draft: Draft) -> None:
        """What was taken for somebody goes to nobody else, least of all back to the victim."""
        self._claimant = None
        if claimant.phase is Phase.WAITING:
            self._admit(claimant, draft, self._state.line.lane(claimant))

    def _serve_reserved(self, draft: Draft) -> None:
        """Tenants below their reservation come before everyone."""
        state = self._state
        tenants = state.tenants
        for tenant in tenants.reserving:
            for lane in state.line.lanes_of(tenant) if tenants.num_waiting[tenant] else ():
                while tenants.used_slots[tenant] < tenants.reserved_slots[tenant]:
                    head = state.line.head(lane)
                    if head is None or not self._admit(head, draft, lane):
                        break

    def _prefills_in_order(self, draft: Draft) -> list[Sequence]:
        state = self._state
        chunked = {chunk.sequence.number for chunk in draft.chunks}
        found = [sequence for number, sequence in state.prefilling.items() if number not in chunked]
        found.sort(key=self._order)
        return found

    def _order(self, sequence: Sequence) -> Order:
        return self._place(sequence.rank, sequence)

    def _lane_order(self, lane: Lane, head: Sequence) -> Order:
        return self._place(self._state.line.rank(lane), head)

    def _place(self, rank: int, sequence: Sequence) -> Order:
        """By tier, then level; at equal level those who hold less, then the earliest deadline."""
        tenants = self._state.tenants
        tenant = sequence.tenant
        return (-rank, tenants.level.item(tenant), tenants.used_slots[tenant], sequence.ttft_at_s)

    def _next(self, passed: list[Lane], borrowers: list[Lane]) -> tuple[Lane, Sequence] | None:
        """The first lane whose tenant is within its caps, and its head; the others are set aside to borrow, maybe."""
        state = self._state
        if not state.line.count:
            return None
        open_slots = state.table.num_free > 0 or state.tenants.any_over_cap(but=-1)
        most = _MOST_PASSED if open_slots else _MOST_PASSED_WHEN_FULL
        if len(passed) >= most:
            return None
        while (lane := state.line.first()) is not None:
            head = state.line.head(lane)
            if head is not None and state.tenants.within_cap(lane.tenant, 1, state.blocks_for(head.num_tokens)):
                return lane, head
            state.line.set_aside(lane)
            borrowers.append(lane)
        return None

    def _admit(self, sequence: Sequence, draft: Draft, lane: Lane, *, borrowing: bool = False) -> bool:
        """Give the waiting sequence a slot, blocks and a first chunk, if it may have them."""
        state = self._state
        before = state.num_preemptions
        pending = sequence.num_tokens
        if not self._chunk(sequence, 0, pending, draft):
            return False
        if state.in_flight(sequence) or sequence.preempted_in == state.planning:
            return False
        if not self._may_have_slot(sequence, borrowing=borrowing):
            return False
        hits = state.find_hits(sequence)
        if not self._has_blocks(sequence, hits, draft.now_s, borrowing=borrowing):
            return False
        if not state.table.num_free and not self._memory.claim_slot(sequence, draft.now_s):
            return False
        if state.num_preemptions != before:
            hits = state.find_hits(sequence)
        computed = len(hits) * state.config.block_size
        is_other = computed or state.num_preemptions != before
        if is_other and not self._chunk(sequence, computed, pending - computed, draft):
            return False
        # What age has won it stays: a prompt that got its slot must also get its tokens.
        sequence.rank = state.line.rank(lane)
        draft.begun.append(state.start(sequence, hits, draft.now_s))
        draft.served.append(lane)
        state.line.admitted(lane)
        self._advance(sequence, draft)
        return True

    def _may_have_slot(self, sequence: Sequence, *, borrowing: bool) -> bool:
        """Reserved slots of others are lent to elastic sequences only: what is guaranteed cannot be taken back."""
        state = self._state
        if sequence.guaranteed and not state.tenants.may_guarantee_slot(sequence.tenant, state.config.slots):
            return False
        return state.table.num_free > 0 or (not borrowing and self._memory.may_claim_slot(sequence))

    def _has_blocks(self, sequence: Sequence, hits: list[int], now_s: float, *, borrowing: bool) -> bool:
        """Are there blocks for all it knows beside its `hits`, after a claim if it has a right to one?"""
        if sequence.guaranteed and not self._may_guarantee(sequence):
            return False
        missing = self._missing_blocks(sequence, hits)
        if missing <= 0:
            return True
        if borrowing or not self._memory.claim_blocks(sequence, missing, now_s):
            return False
        # The victim may have held what this one hits: count again.
        if self._missing_blocks(sequence, self._state.find_hits(sequence)) <= 0:
            return True
        self._claimant = sequence
        return False

    def _missing_blocks(self, sequence: Sequence, hits: list[int]) -> int:
        state = self._state
        need = state.blocks_for(sequence.num_tokens)
        if hits:
            need += state.pool.num_idle(hits) - len(hits)
        if state.table.num_running and not sequence.guaranteed:
            need += self._watermark(sequence)
        return need - state.pool.num_available

    def _may_guarantee(self, sequence: Sequence) -> bool:
        """Guaranteed reservations have a bound; one that outgrew it alone may run alone."""
        state = self._state
        tenants, config = state.tenants, state.config
        if tenants.num_guaranteed_blocks == 0:
            return True
        more = state.expected_blocks(sequence)
        within = tenants.num_guaranteed_blocks + more <= int(config.guaranteed_share * config.blocks)
        return within and tenants.may_guarantee_blocks(sequence.tenant, more, config.blocks)

    def _watermark(self, sequence: Sequence) -> int:
        """Blocks left free so that running rows can grow; more for one that was preempted before.

        Every row needs a block once in `block_size` steps; a quarter of the rows bridges the time until
        others end.
        """
        state = self._state
        running = state.table.num_running
        again = 0
        if sequence.preemptions:
            left = max(sequence.expected_output - len(sequence.outputs), float(state.config.block_size))
            again = sequence.preemptions * state.blocks_for(int(left))
        return min(-(-running // 4) + again, state.config.blocks // 4 + 1)

    def _lend(self, borrowers: list[Lane], draft: Draft) -> None:
        """Nobody else waits: what is idle goes to tenants above their caps, until somebody does."""
        state = self._state
        for lane in borrowers:
            while (head := state.line.head(lane)) is not None and (head.started or not head.guaranteed):
                if not self._admit(head, draft, lane, borrowing=True):
                    break

    def _advance(self, sequence: Sequence, draft: Draft) -> None:
        """Let a running sequence catch up by as much as the step allows."""
        table = self._state.table
        slot = sequence.slot
        if slot < 0:
            return
        start = table.computed.item(slot)
        pending = table.tokens.item(slot) - start
        count = self._chunk(sequence, start, pending, draft)
        if not count:
            return
        seconds = draft.budget.take(start, count)
        if draft.budget.rows:
            sequence.steady_s, sequence.steady_rows = _steady_s(sequence, draft.budget), draft.budget.rows
        end = start + count
        again = min(max(sequence.num_charged - start, 0), count)
        free = min(max(sequence.num_forgiven - start, 0), count)
        prompt = max(0, min(end, sequence.num_prompt) - max(start, sequence.num_charged))
        draft.chunks.append(Chunk(sequence, start, count, seconds, again, free, prompt, count == pending))
        if count == pending and draft.newcomer is None:
            draft.newcomer = (sequence.tenant, draft.budget.predicted_s)

    def _chunk(self, sequence: Sequence, start: int, pending: int, draft: Draft) -> int:
        """How many tokens the sequence may compute in this step.

        Whole prompts share the step as its target allows. A part of one, the last included, may nearly double a step in which
        another tenant decodes, and where it comes after another tenant's newcomer, whose first token then waits for
        it, lengthen the step by a tenth.
        """
        budget = draft.budget
        count = budget.chunk(start, pending)
        begins = sequence.phase is Phase.WAITING or sequence.begun_in == self._state.planning
        if count == pending and begins:
            return count
        target_s = budget.target_s
        if self._others_decode(sequence.tenant):
            target_s = part_target_s(budget.decode_s, _steady_s(sequence, budget))
        if draft.newcomer is not None and draft.newcomer[0] != sequence.tenant:
            target_s = min(target_s, _NEWCOMER_SLACK * draft.newcomer[1])
        return budget.chunk(start, pending, target_s=target_s) if target_s < budget.target_s else count

    def _others_decode(self, tenant: int) -> bool:
        table = self._state.table
        return some(table.decoding & (table.tenant != tenant))


def _steady_s(sequence: Sequence, budget: StepBudget) -> float:
    """What the step's decode rows took at their shortest since the sequence is computed beside them. Where more of them
    have come it is what they take now."""
    return budget.decode_s if budget.rows > sequence.steady_rows else min(sequence.steady_s, budget.decode_s)
