"""The sizes a step's time depends on, measured from its rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.plan import RowStatus, Work, measure_work


def measure(rows: list[tuple[int, int]]) -> Work:
    return measure_work(np.array([row[0] for row in rows], np.int32), np.array([row[1] for row in rows], np.int32))


def test_no_rows_are_no_work() -> None:
    assert measure([]) == Work(0, 0, 0, 0)


def test_rows_of_one_token_are_decode_rows() -> None:
    assert measure([(9, 1), (0, 1)]) == Work(prefill_tokens=0, decode_rows=2, kv_tokens=11, attended=0)


def test_a_chunk_attends_to_its_context_and_to_itself() -> None:
    assert measure([(100, 20)]) == Work(prefill_tokens=20, decode_rows=0, kv_tokens=120, attended=20 * 120)


def test_the_largest_contexts_do_not_overflow() -> None:
    assert measure([(2**20, 2**16)] * 4).attended == 4 * 2**16 * (2**20 + 2**16)
    assert measure([(2**21 - 1, 1)] * 1024).kv_tokens == 2**31


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 300)), max_size=20))
def test_work_is_the_sum_over_rows(rows: list[tuple[int, int]]) -> None:
    chunks = [(start, count) for start, count in rows if count > 1]
    assert measure(rows) == Work(
        prefill_tokens=sum(count for _, count in chunks),
        decode_rows=len(rows) - len(chunks),
        kv_tokens=sum(start + count for start, count in rows),
        attended=sum(count * (start + count) for start, count in chunks),
    )


def test_every_row_status_has_its_name() -> None:
    constants = {name: value for name, value in vars(RowStatus).items() if isinstance(value, int)}
    assert {RowStatus.NAMES[value]: value for value in constants.values()} == {
        name.lower(): value for name, value in constants.items()
    }
