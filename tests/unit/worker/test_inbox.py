"""The inbox: order kept, an idle thread woken at once, safe from a signal handler."""

import signal
import threading

from headrace.worker.inbox import Inbox, Left


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
