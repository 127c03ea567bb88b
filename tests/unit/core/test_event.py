"""Step frames read row by row; counters ride in every event."""

import numpy as np

from headrace.core.event import NUM_COUNTERS, Counter, Counters, StepFrame, TokenEvent


def frame() -> StepFrame:
    return StepFrame(
        step=3,
        numbers=np.array([7, 2**40], np.int64),
        indices=np.array([0, 5], np.int32),
        tokens=np.array([11, 12], np.int32),
        counters=np.arange(2 * NUM_COUNTERS, dtype=np.int32).reshape(2, NUM_COUNTERS),
    )


def test_rows_become_events_in_order() -> None:
    first, second = frame().events()
    assert first == TokenEvent(7, 0, 11, Counters(0, 1, 2, 3, 4, 5))
    assert (second.number, second.index, second.token) == (2**40, 5, 12)
    assert second.counters == Counters(6, 7, 8, 9, 10, 11)


def test_a_frame_without_tokens_has_no_events() -> None:
    assert list(StepFrame(0).events()) == []


def test_counter_columns_are_the_fields_of_counters() -> None:
    assert tuple(counter.name.lower() for counter in Counter) == Counters.__struct_fields__
    assert [int(counter) for counter in Counter] == list(range(NUM_COUNTERS))
