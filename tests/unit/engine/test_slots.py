"""The running table: rows come and go, tokens reach their sequence, targets and stops are known."""

import numpy as np
import pytest

from headrace.core.event import Counter
from headrace.core.request import Admission, SamplingParams
from headrace.engine.sequence import Sequence
from headrace.engine.slots import SlotTable, some
from tests.builders import request


def sequence(number: int = 0, *, blocks: int = 2, limit: int = 400, length: int = 8, **others: object) -> Sequence:
    made = Sequence(
        number=number,
        request=request(f"r{number}", length=length, **others),  # type: ignore[arg-type]
        tenant=0,
        arrival_s=0.0,
        ttft_at_s=1.0,
        limit=limit,
        expected_output=1.0,
        prompt_s=1.0,
        work_s=1.0,
    )
    made.blocks = list(range(blocks))
    return made


def occupied(*made: Sequence, slots: int = 4) -> SlotTable:
    table = SlotTable(slots, block_size=4)
    for one in made:
        table.occupy(one, 0, 0.1, (0,))
    return table


def say(table: SlotTable, slot: int, *tokens: int) -> None:
    for token in tokens:
        table.append(np.array([slot]), np.array([token], np.int32))


@pytest.mark.parametrize("mask", [[], [False], [True], [False, True], [False, False]])
def test_some_is_any(mask: list[bool]) -> None:
    assert some(np.array(mask, np.bool_)) == any(mask)


def test_slots_are_given_and_taken_back() -> None:
    first, second = sequence(0), sequence(1)
    table = occupied(first, second, slots=2)
    assert {first.slot, second.slot} == {0, 1} and table.num_free == 0
    assert table.running() == [first, second]
    slot = first.slot
    table.release(first)
    assert (first.slot, table.number[slot], table.num_running) == (-1, -1, 1)


def test_a_new_occupant_is_told_apart_from_the_old_one() -> None:
    first = sequence(0)
    table = occupied(first, slots=1)
    launched = int(table.generation[0])
    table.release(first)
    assert table.generation[0] != launched
    table.occupy(sequence(1), 0, 0.1, ())
    assert table.generation[0] != launched


def test_tokens_are_numbered_counted_and_handed_over_at_release() -> None:
    one = sequence()
    table = occupied(one)
    indices, counters = table.append(np.array([one.slot]), np.array([11], np.int32))
    assert (indices.tolist(), counters[0, Counter.EMITTED]) == ([0], 1)
    say(table, one.slot, 12, 13)
    table.release(one)
    assert (one.outputs, one.counters[Counter.EMITTED]) == ([11, 12, 13], 3)


@pytest.mark.parametrize("count", [127, 128, 129, 300])
@pytest.mark.parametrize("replayed", [0, 5, 128])
def test_no_token_is_lost_however_many_there_are(count: int, replayed: int) -> None:
    one = sequence(limit=10_000)
    one.outputs = list(range(1000, 1000 + replayed))
    table = occupied(one)
    say(table, one.slot, *range(count))
    table.flush(one.slot)
    assert one.outputs == [*range(1000, 1000 + replayed), *range(count)]


def test_rows_of_other_slots_are_untouched() -> None:
    first, second = sequence(0), sequence(1)
    table = occupied(first, second)
    say(table, second.slot, 5, 6)
    table.release(first)
    table.release(second)
    assert (first.outputs, second.outputs) == ([], [5, 6])


def test_stop_ids_are_per_slot_and_leave_with_the_occupant() -> None:
    table = SlotTable(3, block_size=4)
    few, many = sequence(0), sequence(1)
    table.occupy(few, 0, 0.1, (0,))
    table.occupy(many, 0, 0.1, (0, 7, 9))
    slots = np.array([few.slot, many.slot])
    assert table.stopped(slots, np.array([9, 9], np.int32)).tolist() == [False, True]
    assert table.stopped(slots, np.array([0, 7], np.int32)).tolist() == [True, True]
    table.release(many)
    heir = sequence(2)
    table.occupy(heir, 0, 0.1, (5,))
    assert table.stopped(np.array([heir.slot] * 3), np.array([9, 0, 5], np.int32)).tolist() == [False, False, True]


def test_without_stop_ids_nothing_stops() -> None:
    one = sequence()
    table = SlotTable(1, block_size=4)
    table.occupy(one, 0, 0.1, ())
    assert not table.stopped(np.array([0]), np.array([0], np.int32)).any()


def test_the_shortest_target_is_that_of_what_is_decoding() -> None:
    table = SlotTable(3, block_size=4)
    made = [sequence(number) for number in range(3)]
    for one, itl_s in zip(made, (0.3, 0.1, 0.2), strict=True):
        table.occupy(one, 0, itl_s, ())
    assert table.shortest_itl_s() == float("inf")
    for one in (made[0], made[2]):
        table.decoding[one.slot] = table.itl_changed = True
    assert table.shortest_itl_s() == 0.2
    table.release(made[2])
    assert table.shortest_itl_s() == 0.3


def test_a_row_grows_when_its_blocks_are_full() -> None:
    one = sequence(blocks=2, limit=30)
    table = occupied(one)
    assert table.grow_at[one.slot] == 8
    one.blocks.append(2)
    table.set_capacity(one)
    assert table.grow_at[one.slot] == 12


def test_a_guaranteed_row_grows_one_block_ahead() -> None:
    one = sequence(blocks=3, limit=30, admission=Admission.GUARANTEED)
    table = occupied(one)
    assert table.grow_at[one.slot] == 8


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize(("limit", "asks"), [(13, False), (14, True)])
def test_a_row_that_has_all_it_can_need_asks_no_more(admission: Admission, limit: int, asks: bool) -> None:
    """The last token is never computed, so it needs no cell."""
    one = sequence(blocks=3, limit=limit, admission=admission)
    table = occupied(one)
    assert (table.grow_at[one.slot] < 1000) == asks


def test_masked_rows_are_counted() -> None:
    one, two = sequence(0, sampling=SamplingParams(masked=True)), sequence(1)
    table = occupied(one, two)
    assert table.num_masked == 1
    table.release(one)
    table.release(two)
    assert table.num_masked == 0 and not table.masked.any()
