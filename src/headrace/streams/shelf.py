"""The streams of one gateway, by tenant and id: the open ones, and for a while those that ended. Owns how long and how
much is kept, and remembers of what is gone that it was here.

What a tenant does not own is unknown to it, whether it exists or not. Past the bound the oldest goes of the tenant that
keeps most, so that nobody's streams push out another's that keeps less.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import Struct

from headrace.core.errors import Expired, NotFound
from headrace.streams.audience import Audience, Owner
from headrace.streams.stream import Stream

# Of expired streams a hash is remembered, in about 85 bytes.
MAX_EXPIRED = 100_000
# What a stream takes besides its records: itself, its dialect's constant bytes, its place here.
STREAM_BYTES = 5500

Key = tuple[str, str]
_LOG = logging.getLogger("headrace.streams")


class Bounds(Struct, frozen=True):
    """`window_s` is how long a stream is kept after it ended and its last reader left, `size_bytes` the most that all
    of these take together, `unread_bytes` how far behind readers of an open one may be before it pauses."""

    window_s: float = 300.0
    size_bytes: int = 256 << 20
    unread_bytes: int = 256 << 10


@dataclass(slots=True)
class Kept:
    """A stream that is over. Its size is what it was counted with."""

    audience: Audience
    over_s: float
    size_bytes: int


@dataclass(slots=True)
class _Share:
    """What one tenant keeps, in the order in which they were over."""

    size_bytes: int = 0
    keys: dict[Key, None] = field(default_factory=dict)


class Shelf:
    """Use from one event loop. `tick` is to be called a few times a second; `bounds` may be replaced at any time."""

    def __init__(self, now_s: Callable[[], float], bounds: Bounds | None = None) -> None:
        self.bounds = bounds or Bounds()
        self._now_s = now_s
        # Ids of requests that are being answered and have no stream here: not yet, or never.
        self._taken: set[Key] = set()
        self._open: dict[Key, Audience] = {}
        # In the order in which they were over.
        self._kept: OrderedDict[Key, Kept] = OrderedDict()
        self._shares: dict[str, _Share] = {}
        self._expired: set[int] = set()
        self._expired_in_order: deque[int] = deque()
        self._size_bytes = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Of what is kept, about."""
        return self._size_bytes

    def take_id(self, tenant: str, id: str) -> bool:
        """Reserve an id for a request, until `put` or `free_id`. False: another request of the tenant has it, or a
        stream that can still be read."""
        key = (tenant, id)
        if key in self._taken or key in self._open or key in self._kept:
            return False
        self._taken.add(key)
        return True

    def is_taken(self, tenant: str, id: str) -> bool:
        """By a request that has no stream here: not yet, or never."""
        return (tenant, id) in self._taken

    def free_id(self, tenant: str, id: str) -> None:
        """The request is over. A stream under this id stays."""
        self._taken.discard((tenant, id))

    def put(self, stream: Stream, owner: Owner, *, grace_s: float) -> Audience:
        """From now on it can be found. Nobody reads it yet, and its grace has begun."""
        key = (stream.tenant, stream.id)
        self._drop_moved(key)
        assert key not in self._open and key not in self._kept, f"stream {stream.id} is here already"
        audience = Audience(stream, owner, self._now_s(), grace_s=grace_s, on_over=self._keep)
        self._open[key] = audience
        self._taken.discard(key)
        self._expired.discard(hash(key))
        return audience

    def find(self, tenant: str, id: str) -> Audience:
        """NotFound for what was never here, for what another gateway has taken over and for what is another's alike,
        Expired for what was here."""
        key = (tenant, id)
        found = self._open.get(key)
        if found is not None:
            if found.stream.is_moved:
                raise NotFound("There is no such stream.")
            return found
        kept = self._kept.get(key)
        if kept is not None and kept.audience.stream.is_moved:
            raise NotFound("There is no such stream.")
        if kept is not None and not self._is_past(kept, self._now_s()):
            return kept.audience
        if kept is not None or hash(key) in self._expired:
            raise Expired("This stream is over and is not kept any more.")
        raise NotFound("There is no such stream.")

    def _drop_moved(self, key: Key) -> None:
        """What another gateway took over may come back. Who still reads its end here reads on."""
        found = self._open.get(key)
        if found is not None and found.stream.is_moved:
            del self._open[key]
        kept = self._kept.get(key)
        if kept is not None and kept.audience.stream.is_moved:
            self._drop(key)

    def tick(self, now_s: float) -> None:
        unread_bytes = self.bounds.unread_bytes
        for audience in tuple(self._open.values()):
            try:
                audience.tick(now_s, unread_bytes)
            except Exception:  # noqa: BLE001 - a loop of the top: one stream must not take the beat from the others
                _LOG.exception("stream %s could not be looked after", audience.stream.id)
        self._trim(now_s)

    def close(self, why: str) -> None:
        """Cancel whatever is open."""
        for audience in tuple(self._open.values()):
            audience.cancel(why)

    def _keep(self, audience: Audience) -> None:
        """It ended and nobody reads it. It may have been read again: then it keeps its place."""
        stream = audience.stream
        key = (stream.tenant, stream.id)
        stream.fold()
        if self._open.get(key) is not audience:
            return
        del self._open[key]
        now_s = self._now_s()
        kept = Kept(audience, now_s, stream.size_bytes + STREAM_BYTES)
        self._kept[key] = kept
        share = self._shares.setdefault(stream.tenant, _Share())
        share.keys[key] = None
        share.size_bytes += kept.size_bytes
        self._size_bytes += kept.size_bytes
        self._trim(now_s)

    def _trim(self, now_s: float) -> None:
        """Readers of what goes here read on: it can only not be found."""
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if not self._is_past(kept, now_s):
                break
            self._drop(key)
            self._remember(hash(key))
        while self._size_bytes > self.bounds.size_bytes and self._shares:
            largest = max(self._shares.values(), key=lambda share: share.size_bytes)
            key = next(iter(largest.keys))
            self._drop(key)
            self._remember(hash(key))

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key)
        self._size_bytes -= kept.size_bytes
        share = self._shares[key[0]]
        share.size_bytes -= kept.size_bytes
        del share.keys[key]
        if not share.keys:
            del self._shares[key[0]]

    def _remember(self, expired: int) -> None:
        self._expired.add(expired)
        self._expired_in_order.append(expired)
        if len(self._expired_in_order) > MAX_EXPIRED:
            self._expired.discard(self._expired_in_order.popleft())

    def _is_past(self, kept: Kept, now_s: float) -> bool:
        return now_s - kept.over_s >= self.bounds.window_s
