"""What reaches the engine's thread from others: commands of gateways, and news of links and matchers.

Owns the queue between threads. Safe to fill from any thread and from a signal handler; emptied by one thread.
"""

from queue import Empty, SimpleQueue
from typing import Any

from msgspec import Struct

from headrace.core.messages import Abort, Drain, Pause, Resume, Submit, Tenants, Withdraw

Command = Submit | Abort | Withdraw | Pause | Resume | Tenants | Drain

# A wait of threads has a largest value.
_MOST_S = 1e6


class Order(Struct, frozen=True):
    """A gateway's command and when it came in. `link` is the worker's own number of the connection; 0 is nobody's."""

    link: int
    arrived_s: float
    command: Command


class Left(Struct, frozen=True):
    """A connection is gone."""

    link: int


class Crowded(Struct, frozen=True):
    """The outbox of a connection is full, or has room again."""

    link: int
    is_full: bool


class Built(Struct, frozen=True):
    """The matcher of a submission is made, or could not be."""

    ticket: int


Item = Order | Left | Crowded | Built


class Inbox:
    def __init__(self) -> None:
        # Unlike a lock of ours its `put` may interrupt its own `get`, as a signal handler does.
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._head: list[Item] = []

    def put(self, item: Item) -> None:
        self._queue.put(item)

    def take(self) -> list[Item]:
        """All there is, in the order it came."""
        taken, self._head = self._head, []
        try:
            while True:
                taken.append(self._queue.get_nowait())
        except Empty:
            return taken

    def wait(self, timeout_s: float) -> bool:
        """Until there is something; False when the time is over first."""
        if not self._head:
            try:
                self._head.append(self._queue.get(timeout=min(max(timeout_s, 0.0), _MOST_S)))
            except Empty:
                return False
        return True
