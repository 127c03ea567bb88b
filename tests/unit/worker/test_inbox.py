"""The inbox: order kept, an idle thread woken at once, safe from a signal handler."""

import signal
import threading

from headrace.core.messages import Abort, Submit
from headrace.worker.inbox import Inbox, Left, Order, TurnedAway
from tests.builders import part, request


def test_all_that_came_is_taken_in_order() -> None:
    inbox = Inbox()
    for link in range(5):
        inbox.put(Left(link))
    assert inbox.wait(0.0)
    inbox.put(Left(5))
    assert inbox.take() == [Left(link) for link in range(6)]
    assert inbox.take() == [] and not inbox.wait(0.0)


def test_who_waits_is_woken_by_another_thread() -> None:
    inbox = Inbox()
    other = threading.Thread(target=inbox.put, args=(Left(1),))
    other.start()
    assert inbox.wait(float("inf"))
    other.join()
    assert inbox.take() == [Left(1)]


def test_a_signal_handler_may_fill_it_while_its_thread_waits() -> None:
    inbox = Inbox()
    before = signal.signal(signal.SIGALRM, lambda *_: inbox.put(Left(9)))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        assert inbox.wait(10.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert inbox.take() == [Left(9)]


def order(length: int, key: int = 1, n: int = 1) -> Order:
    return Order(1, 0.0, Submit((part(key, request("r", length), n=n),)))


def test_submissions_past_its_bytes_are_turned_away_until_it_was_emptied() -> None:
    inbox = Inbox(max_bytes=100_000)
    items = [order(2000, key=key, n=2) for key in (1, 3, 5)]
    for item in items:
        inbox.put(item)
    inbox.put(Order(1, 0.0, Abort(1)))
    assert inbox.wait(0.0)
    assert inbox.take() == [items[0], TurnedAway(1, (3, 4)), TurnedAway(1, (5, 6)), Order(1, 0.0, Abort(1))]
    inbox.put(items[1])
    assert inbox.take() == [items[1]]


def test_one_submission_that_is_larger_than_all_its_room_comes_in_alone() -> None:
    inbox = Inbox(max_bytes=100)
    inbox.put(order(2000))
    inbox.put(order(1, key=2))
    assert [type(item) for item in inbox.take()] == [Order, TurnedAway]
