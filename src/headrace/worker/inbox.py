"""What reaches the engine's thread from others: commands of gateways, and news of links and matchers.

Owns the queue between threads, and bounds it in bytes: submissions past that are turned away, before the engine's
thread has looked at them. Safe to fill from any thread and from a signal handler; emptied by one thread.
"""

from queue import Empty, SimpleQueue

from msgspec import Struct

from headrace.core.messages import Abort, Attach, Drain, Pause, Resume, Service, Submit, Tenants, Withdraw

Command = Submit | Attach | Abort | Withdraw | Pause | Resume | Tenants | Service | Drain

DEFAULT_BYTES = 64 << 20
# Of an id and of a block's hash once they are read, and of a sequence besides.
_ID_BYTES = 36
_HASH_BYTES = 73
_SEQUENCE_BYTES = 512
# A wait of threads has a largest value.
_MOST_S = 1e6


class Order(Struct, frozen=True):
    """A gateway's command and when it came in. `link` is the worker's own number of the connection; 0 is nobody's."""

    link: int
    arrived_s: float
    command: Command


class Greeted(Struct, frozen=True):
    """A gateway is here on a new connection; what its earlier ones had is in the inbox before this."""

    gateway: str
    attaches: bool


class Left(Struct, frozen=True):
    """A connection is gone; `for_good`: so is its gateway."""

    link: int
    gateway: str = ""
    for_good: bool = False


class Crowded(Struct, frozen=True):
    """The outbox of a connection is full, or has room again."""

    link: int
    is_full: bool


class TurnedAway(Struct, frozen=True):
    """A submission that the inbox had no room for."""

    link: int
    keys: tuple[int, ...]


class Built(Struct, frozen=True):
    """One of the matchers of a submission is made, or could not be."""

    ticket: int


Item = Order | Greeted | Left | Crowded | TurnedAway | Built


class Inbox:
    """Submissions are put by one thread alone; everything else may come from any."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        # Unlike a lock of ours its `put` may interrupt its own `get`, as a signal handler does.
        self._queue: SimpleQueue[tuple[Item, int]] = SimpleQueue()
        # The one that `wait` has taken out already.
        self._head: list[tuple[Item, int]] = []
        self._max_bytes = max_bytes
        # One writer each, so neither needs a lock: who puts submissions, and who takes them.
        self._put_bytes = 0
        self._taken_bytes = 0

    def put(self, item: Item) -> None:
        size = 0
        if isinstance(item, Order) and isinstance(item.command, Submit):
            size = submit_bytes(item.command)
            waiting = self._put_bytes - self._taken_bytes
            if waiting and waiting + size > self._max_bytes:
                item, size = TurnedAway(item.link, item.command.keys), 0
            self._put_bytes += size
        self._queue.put((item, size))

    def take(self) -> list[Item]:
        """All there is, in the order it came."""
        waiting, self._head = self._head, []
        while not self._queue.empty():  # nobody else takes from it
            waiting.append(self._queue.get_nowait())
        taken = []
        for item, size in waiting:
            self._taken_bytes += size
            taken.append(item)
        return taken

    def wait(self, timeout_s: float) -> bool:
        """Until there is something; False when the time is over first."""
        if not self._head:
            try:
                self._head.append(self._queue.get(timeout=min(max(timeout_s, 0.0), _MOST_S)))
            except Empty:
                return False
        return True


def submit_bytes(submit: Submit) -> int:
    """About what it holds in memory."""
    size = 0
    for part in submit.parts:
        request = part.request
        size += _ID_BYTES * (len(request.prompt_ids) + len(request.replay_ids))
        size += _HASH_BYTES * len(request.block_hashes) + _SEQUENCE_BYTES * len(part.keys)
        size += 0 if part.grammar is None else len(part.grammar.source)
    return size
