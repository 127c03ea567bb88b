"""Things broken on purpose, between the engine and its runner or inside the engine: each must be noticed.

The engine's own check is off, so that it is the fake's cells or the streams' truth that notice.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.errors import MemoryCorrupted
from headrace.core.event import Outcome
from headrace.core.plan import Plan, SlotStart
from headrace.core.request import Admission, Tier
from headrace.engine.blocks import BlockPool
from headrace.engine.outcome import Applier
from headrace.engine.sequence import Sequence as Generation
from headrace.engine.slots import SlotTable
from headrace.engine.state import State
from headrace.runner.faults import Faults
from tests.builders import Rig, engine_config, prompt, request

BLOCK = 4
# Index of a request in the workload, and of the token at which its row fails.
FAILING = {7: 4, 22: 4}
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def busy(depth: int) -> Rig:
    """Shared prefixes, chunked prompts, unforeseen ends, failures and memory that runs out."""
    faults = Faults()
    config = engine_config(slots=4, blocks=22, block_size=BLOCK, max_step_tokens=34)
    rig = Rig(config, depth=depth, checked=False, faults=faults)
    for index in range(40):
        made = request(
            f"r{index}",
            ids=prompt_of(index),
            max_tokens=20,
            block_size=BLOCK,
            tier=Tier(index % 4),
            admission=Admission(is_guaranteed(index)),
        )
        number = rig.submit(made, output=5 + index % 13 if index % 2 else None)
        if index in FAILING:
            faults.fail_row(number, at=FAILING[index])
    return rig


def is_guaranteed(index: int) -> bool:
    """Then it is given a block before it needs one."""
    return index % 9 == 8


def prompt_of(index: int) -> tuple[int, ...]:
    """Families with a tail of their own, and strangers."""
    return prompt(30, index) if index % 4 == 0 else prompt(13, index // 8 % 3) + prompt(2 + index % 7, index)


def noticed(rig: Rig) -> str:
    """What noticed that something is wrong; empty when nothing did."""
    try:
        rig.run(3_000)
    except MemoryCorrupted as error:
        return f"the cells: {error.message}"
    except (AssertionError, LookupError) as error:
        return f"the order of tokens: {error}"
    for number, tokens in rig.tokens.items():
        truth = rig.truth(number)
        whole = rig.ended[number].outcome is Outcome.FINISHED
        if tokens != (truth if whole else truth[: len(tokens)]):
            return f"the truth of stream {number}"
    return ""


@DEPTHS
def test_nothing_is_noticed_where_nothing_is_wrong(depth: int) -> None:
    """And what the mutations need does happen: hits, chunks, preemption, failures."""
    rig = busy(depth)
    assert noticed(rig) == ""
    counters = [ended.counters for ended in rig.ended.values()]
    assert rig.engine.num_preemptions > 3
    assert sum(one.prompt_cached > 0 for one in counters) > 3 and sum(one.recomputed > 0 for one in counters) > 1
    assert sum(ended.outcome is Outcome.FAILED for ended in rig.ended.values()) > 1


class Tampering:
    """Sits before the runner and changes the first plan in which `change` finds something to change."""

    def __init__(
        self, rig: Rig, change: Callable[[Plan, list[SlotStart]], Plan | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.done = False
        self._change = change
        self._launch = rig.runner.launch
        # Starts of every slot so far, the last one last.
        self._starts: list[SlotStart] = []
        monkeypatch.setattr(rig.runner, "launch", self.launch)

    def launch(self, plan: Plan) -> None:
        changed = None if self.done else self._change(plan, self._starts)
        self.done = self.done or changed is not None
        self._starts += plan.begun
        self._launch(changed or plan)


def other_block(plan: Plan, start: SlotStart, starts: Iterable[SlotStart]) -> int | None:
    """A block that somebody else who runs in this plan was started with."""
    occupants = {one.slot: one for one in [*starts, *plan.begun]}
    for slot in plan.slots.tolist():
        if slot != start.slot and occupants[slot].number != start.number:
            return occupants[slot].blocks[-1]
    return None


def sound(plan: Plan) -> list[SlotStart]:
    """What begins with the plan and is not going to fail anyway."""
    return [start for start in plan.begun if not fails(start)]


def fails(start: SlotStart) -> bool:
    return int(start.request_id[1:]) in FAILING


def with_start(plan: Plan, old: SlotStart, new: SlotStart) -> Plan:
    return replace(plan, begun=tuple(new if start is old else start for start in plan.begun))


def _wrong_first_block(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    for start in sound(plan):
        block = other_block(plan, start, starts)
        if block is not None:
            return with_start(plan, start, replace(start, blocks=(block, *start.blocks[1:])))
    return None


def _wrong_last_block(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    for start in sound(plan):
        block = other_block(plan, start, starts)
        if block is not None:
            return with_start(plan, start, replace(start, blocks=(*start.blocks[:-1], block)))
    return None


def _lost_block(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    for start in sound(plan):
        return with_start(plan, start, replace(start, blocks=start.blocks[:-1]))
    return None


def needed_growth(plan: Plan, starts: list[SlotStart]) -> int | None:
    """Place of a block that a row of this plan computes in."""
    rows = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
    occupants = {start.slot: start for start in starts}
    for place, slot in enumerate(plan.grown_slots.tolist()):
        start = occupants[slot]
        if rows.get(slot, 1) % BLOCK == 0 and not fails(start) and not is_guaranteed(int(start.request_id[1:])):
            return place
    return None


def _wrong_grown_block(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    place = needed_growth(plan, starts)
    occupants = {start.slot: start for start in starts}
    for slot in plan.slots.tolist():
        if place is not None and slot in occupants and slot != plan.grown_slots[place]:
            blocks = plan.grown_blocks.copy()
            blocks[place] = occupants[slot].blocks[-1]
            return replace(plan, grown_blocks=blocks)
    return None


def _lost_growth(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    place = needed_growth(plan, starts)
    if place is None:
        return None
    slots, blocks = np.delete(plan.grown_slots, place), np.delete(plan.grown_blocks, place)
    return replace(plan, grown_slots=slots, grown_blocks=blocks)


def _moved(plan: Plan, by_start: int, by_count: int) -> Plan | None:
    """The first chunk begins and ends elsewhere than it should."""
    rows = np.flatnonzero((plan.counts > 2) & (plan.starts > 0))
    if not len(rows):
        return None
    starts, counts = plan.starts.copy(), plan.counts.copy()
    starts[rows[0]] += by_start
    counts[rows[0]] += by_count
    return replace(plan, starts=starts, counts=counts)


def _skipped_token(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    return _moved(plan, 1, -1)


def _repeated_token(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    return _moved(plan, -1, 1)


def _short_chunk(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    return _moved(plan, 0, -1)


def _long_chunk(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    return _moved(plan, 0, 1)


def _wrong_id(plan: Plan, first: bool) -> Plan | None:
    """One id of a start is another: a replayed one, or one of the prompt that is still to compute."""
    for start in sound(plan):
        place = start.num_prompt - 1 if first else len(start.ids) - 1
        if start.num_computed <= place and (first or place >= start.num_prompt):
            ids = list(start.ids)
            ids[place] = ids[place] % 999 + 1
            return with_start(plan, start, replace(start, ids=tuple(ids)))
    return None


def _wrong_replayed_id(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    return _wrong_id(plan, first=False)


def _wrong_prompt_id(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    return _wrong_id(plan, first=True)


def _lost_replayed_id(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    for start in sound(plan):
        if start.num_computed < len(start.ids) - 2 and len(start.ids) > start.num_prompt:
            return with_start(plan, start, replace(start, ids=start.ids[:-1]))
    return None


def _wrong_seed(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    for start in sound(plan):
        if len(start.ids) > start.num_prompt:
            return with_start(
                plan, start, replace(start, sampling=replace(start.sampling, seed=start.sampling.seed + 1))
            )
    return None


def _wrong_prefix_hit(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    """The last shared block, which the first row reads, is one that holds other ids."""
    for start in sound(plan):
        last = start.num_computed // BLOCK - 1
        for other in starts:
            end = BLOCK * (last + 1)
            if 0 < end <= other.num_computed and other.ids[:end] != start.ids[:end]:
                blocks = (*start.blocks[:last], other.blocks[last], *start.blocks[last + 1 :])
                return with_start(plan, start, replace(start, blocks=blocks))
    return None


def _prefix_hits_out_of_order(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    for start in sound(plan):
        if start.num_computed >= 2 * BLOCK:
            swapped = (start.blocks[1], start.blocks[0], *start.blocks[2:])
            return with_start(plan, start, replace(start, blocks=swapped))
    return None


def _hit_that_was_not_computed(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    for start in sound(plan):
        if start.num_computed + BLOCK < len(start.ids) and start.num_computed:
            return with_start(plan, start, replace(start, num_computed=start.num_computed + BLOCK))
    return None


def _freed_too_early(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    """The block that a running row computes in belongs to nobody."""
    occupants = {start.slot: start for start in starts}
    for slot, start in zip(plan.slots.tolist(), plan.starts.tolist(), strict=True):
        if slot in occupants and 0 < start < len(occupants[slot].ids) and start % BLOCK:
            block = occupants[slot].blocks[start // BLOCK]
            return replace(plan, freed_blocks=np.array([*plan.freed_blocks, block], np.int32))
    return None


def _two_rows_of_one_slot(plan: Plan, starts: list[SlotStart]) -> Plan | None:
    if len(plan.slots) < 2 or plan.counts.max() > 1:
        return None
    return replace(plan, slots=np.array([*plan.slots[:-1], plan.slots[0]], np.int32))


TAMPERINGS = [
    _wrong_first_block,
    _wrong_last_block,
    _lost_block,
    _wrong_grown_block,
    _lost_growth,
    _skipped_token,
    _repeated_token,
    _short_chunk,
    _long_chunk,
    _wrong_prompt_id,
    _wrong_replayed_id,
    _lost_replayed_id,
    _wrong_seed,
    _wrong_prefix_hit,
    _prefix_hits_out_of_order,
    _hit_that_was_not_computed,
    _freed_too_early,
    _two_rows_of_one_slot,
]


@DEPTHS
@pytest.mark.parametrize("change", TAMPERINGS)
def test_a_plan_tampered_with_once_is_noticed(
    change: Callable[[Plan, list[SlotStart]], Plan | None], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = busy(depth)
    tampering = Tampering(rig, change, monkeypatch)
    what = noticed(rig)
    assert tampering.done, "the workload gave no occasion"
    assert what


@DEPTHS
@pytest.mark.parametrize("change", [_wrong_prefix_hit, _prefix_hits_out_of_order])
def test_a_bad_prefix_hit_is_noticed_by_its_output_alone(
    change: Callable[[Plan, list[SlotStart]], Plan | None], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ample memory, two families that both hit the cache; the runner does not look at what a hit holds."""
    rig = Rig(engine_config(blocks=256, block_size=BLOCK), depth=depth, checked=False)
    monkeypatch.setattr(rig.runner._device, "_verify_prefix", False)
    tampering = Tampering(rig, change, monkeypatch)
    for index in range(8):
        ids = prompt(12, index % 2) + prompt(5, 10 + index)
        rig.submit(request(f"r{30 + index}", ids=ids, max_tokens=12, block_size=BLOCK))
        if index in (1, 3):
            rig.run()
    assert noticed(rig).startswith("the truth") and tampering.done


def twins(depth: int) -> Rig:
    """Two of one prompt that start in one plan."""
    rig = Rig(engine_config(block_size=BLOCK), depth=depth, checked=False)
    for name in "xy":
        rig.submit(request(name, ids=prompt(20, 1), max_tokens=12, block_size=BLOCK))
    return rig


def heir_of_a_failure(depth: int) -> Rig:
    """One whose prompt's only row fails, and after it another of the same prompt."""
    faults = Faults()
    rig = Rig(engine_config(block_size=BLOCK), depth=depth, checked=False, faults=faults)
    faults.nan_row(rig.submit(request("x", ids=prompt(20, 1), block_size=BLOCK)), at=0)
    rig.run()
    rig.submit(request("y", ids=prompt(20, 1), block_size=BLOCK))
    return rig


def _published_when_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    start = State.start

    def start_and_publish(state: State, sequence: Generation, hits: list[int], now_s: float) -> SlotStart:
        started = start(state, sequence, hits, now_s)
        for block, key in zip(sequence.blocks, sequence.request.block_hashes, strict=False):
            state.pool.publish(block, key)
        return started

    monkeypatch.setattr(State, "start", start_and_publish)


def _published_though_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of a sequence whose row failed is findable."""
    end = State.end

    def publish_and_end(state: State, sequence: Generation, outcome: Outcome, *others: object) -> None:
        if outcome is Outcome.FAILED:
            for block, key in zip(sequence.blocks, sequence.request.block_hashes, strict=False):
                state.pool.publish(block, key)
        end(state, sequence, outcome, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(State, "end", publish_and_end)


def _released_while_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence holds its first block without a reference."""
    start = State.start

    def start_and_release(state: State, sequence: Generation, hits: list[int], now_s: float) -> SlotStart:
        started = start(state, sequence, hits, now_s)
        state.pool.release(sequence.blocks[:1])
        state.pool._references[sequence.blocks[0]] += 1
        return started

    monkeypatch.setattr(State, "start", start_and_release)


def _shared_without_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def release_held(pool: BlockPool, blocks: Sequence[int]) -> None:
        release(pool, [block for block in blocks if pool._references[block]])

    monkeypatch.setattr(BlockPool, "share", lambda pool, blocks: None)
    monkeypatch.setattr(BlockPool, "release", release_held)


def _evicted_but_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that was given on is still found under its old hash."""
    allocate = BlockPool.allocate

    def allocate_and_remember(pool: BlockPool, count: int) -> list[int]:
        known = dict(pool._block_of)
        blocks = allocate(pool, count)
        for key in set(known) - set(pool._block_of):
            pool._block_of[key] = known[key]
            pool._hash_of[known[key]] = key
        return blocks

    monkeypatch.setattr(BlockPool, "allocate", allocate_and_remember)


def _one_hit_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is taken for a block longer than was found."""
    find = BlockPool.find

    def find_more(pool: BlockPool, hashes: Sequence[bytes]) -> list[int]:
        found = find(pool, hashes)
        rest = [block for block in pool._block_of.values() if block not in found]
        return found + rest[:1] if found and len(found) < len(hashes) else found

    monkeypatch.setattr(BlockPool, "find", find_more)


def _wrong_late_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of a row that was in flight at a preemption is another at its restart."""
    append = Applier._append_late

    def append_another(applier: Applier, sequence: Generation, token: int, now_s: float) -> None:
        append(applier, sequence, token, now_s)
        if sequence.slot < 0 and sequence.started and sequence.preemptions:
            sequence.outputs[-1] = token % 999 + 1

    monkeypatch.setattr(Applier, "_append_late", append_another)


def _old_rows_taken_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token of an earlier occupant goes to who holds the slot now."""
    occupy, release = SlotTable.occupy, SlotTable.release

    def occupy_unseen(table: SlotTable, *arguments: object) -> int:
        slot = occupy(table, *arguments)  # type: ignore[arg-type]
        table.generation[slot] -= 1
        return slot

    def release_unseen(table: SlotTable, sequence: Generation) -> None:
        slot = sequence.slot
        release(table, sequence)
        table.generation[slot] -= 1

    monkeypatch.setattr(SlotTable, "occupy", occupy_unseen)
    monkeypatch.setattr(SlotTable, "release", release_unseen)


@pytest.mark.parametrize(
    ("mutate", "world", "depths"),
    [
        (_published_when_planned, twins, (1, 2)),
        (_published_though_failed, heir_of_a_failure, (1, 2)),
        (_released_while_used, busy, (1, 2)),
        (_shared_without_reference, busy, (1, 2)),
        (_evicted_but_found, busy, (1, 2)),
        (_one_hit_too_many, busy, (1, 2)),
        (_wrong_late_token, busy, (2,)),
        (_old_rows_taken_for_new, busy, (2,)),
    ],
)
def test_an_engine_broken_on_purpose_is_noticed(
    mutate: Callable[[pytest.MonkeyPatch], None],
    world: Callable[[int], Rig],
    depths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [noticed(world(depth)) for depth in depths] == [""] * len(depths)
    mutate(monkeypatch)
    for depth in depths:
        assert noticed(world(depth)), f"at depth {depth}"
