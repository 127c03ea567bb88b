"""Tensors read ahead: in order and whole, not too far, and broken off when nobody wants them any more."""

from collections.abc import Iterator
from itertools import count
from threading import Event, current_thread, get_ident

import numpy as np
import pytest

from headrace.core.errors import InvalidModel
from headrace.weights.ahead import Named, ReadAhead

pytestmark = pytest.mark.unit


def tensor(number: int) -> Named:
    return f"tensor {number}", np.full(2, number, np.float32)


def test_tensors_come_in_order_from_another_thread() -> None:
    threads = set()

    def read() -> Iterator[Named]:
        for number in range(50):
            threads.add(get_ident())
            yield tensor(number)

    ahead = ReadAhead(read(), most_bytes=20)
    found = [(name, values.tolist()) for name, values in ahead]
    ahead.close()
    assert found == [(f"tensor {number}", [number, number]) for number in range(50)]
    assert len(threads) == 1 and get_ident() not in threads


def test_it_reads_before_it_is_asked_and_not_too_far() -> None:
    asked = [Event() for _ in range(4)]

    def read() -> Iterator[Named]:
        for number, event in enumerate(asked):
            event.set()
            yield tensor(number)

    ahead = ReadAhead(read(), most_bytes=16)
    assert asked[1].wait(5.0)
    assert not asked[2].wait(0.05)
    next(ahead)
    # What was taken last is held as well.
    assert not asked[2].wait(0.05)
    next(ahead)
    assert asked[2].wait(5.0)
    assert not asked[3].wait(0.05)
    ahead.close()


def test_beside_one_that_is_too_large_none_is_held() -> None:
    asked = Event()

    def read() -> Iterator[Named]:
        yield "large", np.zeros(100, np.float32)
        asked.set()
        yield tensor(1)

    ahead = ReadAhead(read(), most_bytes=16)
    assert next(ahead)[0] == "large" and not asked.wait(0.05)
    assert next(ahead)[0] == "tensor 1"
    ahead.close()
    assert ReadAhead(iter(()))._most_bytes == 2**23


class _Stop(BaseException): ...


@pytest.mark.parametrize("error", [InvalidModel("ends too early"), _Stop("told to leave")])
def test_what_reading_raises_is_raised_though_tensors_wait(error: BaseException) -> None:
    has_ended = Event()

    def read() -> Iterator[Named]:
        try:
            yield tensor(0)
            yield tensor(1)
            raise error
        finally:
            has_ended.set()

    ahead = ReadAhead(read())
    assert has_ended.wait(5.0)
    ahead._thread.join(5.0)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            next(ahead)
    ahead.close()
    assert not ahead._waiting


def test_closed_it_reads_no_more() -> None:
    last: list[int] = []
    threads = []

    def read() -> Iterator[Named]:
        threads.append(current_thread())
        for number in count():
            last[:] = [number]
            yield tensor(number)

    ahead = ReadAhead(read(), most_bytes=80)
    next(ahead)
    ahead.close()
    assert not threads[0].is_alive()
    assert last[0] <= 11
