"""The proof of the engine's accounts, run when idle and by tests after every step. Changes nothing."""

import numpy as np

from headrace.engine.sequence import Phase, Sequence
from headrace.engine.state import State


def check_state(state: State) -> None:
    """Raise AssertionError, naming the first account that does not add up."""
    state.pool.check(state.held_blocks())
    _check_slots(state)
    _check_tenants(state)
    _check_line(state)
    coming = sum(len(sequence.blocks) for sequence in state.live.values() if sequence.phase is Phase.LEAVING)
    assert coming <= state.num_coming_blocks, "blocks of those who leave do not add up"
    guaranteed = sum(sequence.reserved_blocks for sequence in state.live.values())
    assert guaranteed == state.tenants.num_guaranteed_blocks, "reserved blocks do not add up"


def _check_slots(state: State) -> None:
    table = state.table
    occupied = 0
    for slot in range(table.size):
        sequence: Sequence | None = table.sequences[slot]
        if sequence is None:
            assert table.number[slot] == -1 and not table.decoding[slot], f"slot {slot} is empty but not clean"
            continue
        occupied += 1
        assert sequence.slot == slot and sequence.phase is Phase.RUNNING, f"slot {slot} holds a stranger"
        assert table.number[slot] == sequence.number, f"slot {slot} has another number"
        assert state.live.get(sequence.number) is sequence, f"slot {slot} holds a sequence that ended"
        assert table.computed[slot] < table.tokens[slot] < table.limit[slot], f"slot {slot} is past its limit"
        assert table.computed[slot] <= len(sequence.blocks) * state.config.block_size, f"slot {slot} overflows"
        assert (sequence.number in state.prefilling) != bool(table.decoding[slot]), f"slot {slot}: prefill or decode?"
    assert occupied == table.num_running == table.size - table.num_free, "the free slots do not add up"
    assert table.num_masked == int(np.count_nonzero(table.masked)), "masked slots do not add up"


def _check_tenants(state: State) -> None:
    slots: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for sequence in state.live.values():
        slots[sequence.tenant] = slots.get(sequence.tenant, 0) + (sequence.slot >= 0)
        blocks[sequence.tenant] = blocks.get(sequence.tenant, 0) + len(sequence.blocks)
    for tenant, name in enumerate(state.tenants.names):
        assert state.tenants.used_slots[tenant] == slots.get(tenant, 0), f"slots of {name} do not add up"
        assert state.tenants.used_blocks[tenant] == blocks.get(tenant, 0), f"blocks of {name} do not add up"


def _check_line(state: State) -> None:
    waiting = [sequence for sequence in state.live.values() if sequence.phase is Phase.WAITING]
    assert len(waiting) == state.line.count, "the waiting line does not add up"
    work_s = sum(sequence.work_s for sequence in waiting)
    assert abs(work_s - state.queue_s) <= 1e-6 * max(1.0, work_s), "the queue's seconds do not add up"
