"""The journal in Redis, for several gateways. Owns who owns what there, and leases; the client is given and not closed.

A gateway speaks for the streams it owns, as long as nobody has taken them: every append is conditional on the owner's
epoch. Owners hold a lease; when it is gone, whoever asks first takes the stream. Where something of a stream could not
be kept, nothing of it is from then on, so that what lies there never has a gap. Redis' own errors come out of `recover`,
`find`, `claim` and `tail` as Unreachable, never out of `append`.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from headrace.core.errors import Unreachable
from headrace.streams.ended_streams import EndedStreams
from headrace.streams.journal import NOBODY, Call, Entry, Expired, Kept, Name, Then
from headrace.streams.record import Record
from headrace.streams.redis_line import Command, RedisLine, stop
from headrace.streams.redis_scripts import APPEND, CALL, CLAIM, FORGET, LET_GO, READ, RELEASE, RENEW
from headrace.streams.redis_sealed import SealedStreams, key_of

_LOG = logging.getLogger("headrace.streams")
_APPEND_SHA = sha1(APPEND.encode(), usedforsecurity=False).hexdigest()
# A stream that nobody has written to for so long, and nobody has ended, is gone.
_OPEN_S = 3600
# How long after it is gone we still say that it was here.
_MARK_S = 3600
_CLOSE_S = 2.0
_BATCH = 100
# Streams that are read at a time, and what is opened within a millisecond or two; more is in a thread.
_READ_BATCH = 20
_LARGE_BYTES = 32 << 10
# How long what was said to a gateway waits there to be heard, and how much is heard at a time.
_CALL_S = 30
_MAX_CALLS = 1000
_MAX_HEARINGS = 10
# How long a reader of another's stream waits in Redis at a time; the client's socket_timeout must be longer.
_BLOCK_MS = 500
# Streams that are to be forgotten there, once there is a server. A name takes about 150 bytes.
_MAX_LEFT = 100_000


@dataclass(slots=True)
class _Ours:
    key: str
    place: bytes
    epoch: int
    size_bytes: int = 0


@dataclass(slots=True)
class _Append:
    """One append on its way: whose entries it was given, whose were sent, and who is told. `then` is None once it was
    called."""

    names: list[Name]
    sent: list[Name]
    then: Then | None


class RedisJournal:
    """`gateway` is a name that no other living gateway has; a new life of it takes over from the last at once.
    `max_bytes` of what this life has ended are kept, and what is open.

    The client must hand out bytes (no `decode_responses`) and its socket_timeout, if any, be above a second.
    """

    def __init__(
        self,
        client: "Redis",
        secret: bytes,
        gateway: str,
        *,
        window_s: float = 300.0,
        prefix: str = "headrace:",
        lease_s: float = 5.0,
        renew_s: float = 1.0,
        reply_s: float = 1.0,
        max_waiting_bytes: int = 32 << 20,
        max_bytes: int = 256 << 20,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._client: Any = client  # its types do not say what is bytes
        self._sealed = SealedStreams(secret)
        self._prefix = prefix
        self._gateway = gateway
        self._life = os.urandom(8).hex()
        self._owner = f"{gateway}:{self._life}"
        self._lease_ms = max(1, round(1000 * lease_s))
        self._renew_s = renew_s
        self._wall_s = wall_s
        self._has_leased = False
        self._leasing: asyncio.Task[None] | None = None
        self._ours: dict[Name, _Ours] = {}
        # Another's now, and who writes them was not told yet.
        self._refused: set[Name] = set()
        # Ours in Redis, by key, and not read yet by who is to speak for them; and those who claimed them are about to.
        self._unread: dict[str, None] = {}
        self._claimed: set[Name] = set()
        # Ours in Redis, by key, and without the rest, or too much: to be forgotten there.
        self._left: dict[str, None] = {}
        self._ended = EndedStreams(max_bytes, window_s)
        self._head: Command = (
            "EVALSHA",
            _APPEND_SHA,
            0,
            prefix,
            self._owner,
            max(1, round(window_s)),
            _OPEN_S,
            _MARK_S,
        )
        self._line: RedisLine[_Append] = RedisLine(
            client, self._greeting, self._answered, self._give_up, max_bytes=max_waiting_bytes, reply_s=reply_s
        )

    @property
    def is_keeping(self) -> bool:
        return self._line.is_up

    def append(self, entries: Sequence[Entry], then: Then) -> None:
        self._start()
        names, sent, wires = [], [], []
        for entry in entries:
            name = (entry.tenant, entry.stream)
            names.append(name)
            if entry.birth is not None:
                key, place = key_of(name)
                self._ours[name] = _Ours(key, place, 1)
                self._left.pop(key, None)
            ours = self._ours.get(name)
            if ours is not None:
                sent.append(name)
                now_s = None if entry.record.ending is None else self._wall_s()
                wire = self._sealed.wire(entry, ours.key, ours.place, ours.epoch, now_s)
                ours.size_bytes += len(wire)
                wires.append(wire)
                if now_s is not None:
                    del self._ours[name]
                    self._left.update(dict.fromkeys(self._ended.add(ours.key, ours.size_bytes, now_s)))
        self._line.send(_Append(names, sent, then), (*self._head, b"".join(wires)))

    async def recover(self) -> list[Kept]:
        with _translated():
            await self._lease()
            self._start()
            for owner in await self._gone_owners():
                held = await self._client.smembers(f"{self._prefix}o:{owner}")
                for some in _batches(sorted(key.decode() for key in held)):
                    self._unread.update(dict.fromkeys(await self._claim_all(some, owner)))
                await self._eval(FORGET, self._prefix, owner)
            keys = list(self._unread)
            found = [kept for some in _batches(keys, _READ_BATCH) for kept in await self._read(some)]
        for key, kept in zip(keys, found, strict=True):
            self._unread.pop(key, None)
            if isinstance(kept, Kept):
                name = (kept.birth.tenant, kept.birth.stream)
                self._ours[name] = _Ours(key, key_of(name)[1], kept.epoch)
        return [kept for kept in found if isinstance(kept, Kept)]

    async def find(self, tenant: str, stream: str) -> Kept | Expired | None:
        name = (tenant, stream)
        key, _ = key_of(name)
        is_claimed = name in self._claimed
        self._claimed.discard(name)
        with _translated():
            [found] = await self._read([key])
        if is_claimed:
            self._unread.pop(key, None)
        return found

    async def claim(self, tenant: str, stream: str, epoch: int) -> bool:
        name = (tenant, stream)
        key, place = key_of(name)
        with _translated():
            await self._lease()
            self._start()
            taken = int(await self._eval(CLAIM, self._prefix, self._owner, key, str(epoch), ""))
        if taken:
            self._ours[name] = _Ours(key, place, taken)
            # Who claimed it asks for it now: if Redis is gone then, `recover` has it.
            self._unread[key] = None
            self._claimed.add(name)
        return bool(taken)

    async def tail(self, tenant: str, stream: str, after: int) -> AsyncIterator[Record]:
        """The records behind `after` of a stream that another gateway writes, as they come, up to the ending.

        Ends without one where the stream is gone from Redis, or was taken over so that its rest is elsewhere.
        """
        key, place = key_of((tenant, stream))
        name, last = f"{self._prefix}r:{key}".encode(), after
        while True:
            with _translated():
                found: Any = await self._client.xread({name: f"{last}-0"}, count=256, block=_BLOCK_MS)
                if not found and not await self._client.exists(name):
                    return
            before = last
            for record in self._sealed.records(_of_one(found), place):
                yield record
                last = record.number
                if record.ending is not None:
                    return
            if found and last == before:
                return  # what is there cannot be read here

    async def knows(self, tenant: str, stream: str) -> bool:
        """It is here, whoever owns it."""
        with _translated():
            return bool(await self._client.exists(f"{self._prefix}m:{key_of((tenant, stream))[0]}"))

    async def call(self, calls: Sequence[Call]) -> list[bool]:
        """Say something of streams to who owns them: of each, whether there is an owner that lives."""
        pipeline = self._client.pipeline(transaction=False)
        for said in calls:
            sealed = self._sealed.call(said)
            pipeline.eval(CALL, 0, self._prefix, key_of((said.tenant, said.stream))[0], sealed, _CALL_S)
        with _translated():
            return [bool(int(told)) for told in await pipeline.execute()]

    async def calls(self) -> list[Call]:
        """What was said to this gateway since it was last asked."""
        found: list[bytes] = []
        with _translated():
            for _ in range(_MAX_HEARINGS):
                some = await self._client.lpop(f"{self._prefix}c:{self._owner}", _MAX_CALLS) or ()
                found += some
                if len(some) < _MAX_CALLS:
                    break
        return self._sealed.calls(found)

    async def close(self) -> None:
        """Let go of all at once: whoever asks first takes what has not ended."""
        if self._leasing is not None:
            await stop(self._leasing)
        await self._line.close(_CLOSE_S)
        with contextlib.suppress(RedisError, OSError):
            await self._eval(RELEASE, self._prefix, self._gateway, self._life)

    def _start(self) -> None:
        if self._leasing is None:
            self._leasing = asyncio.create_task(self._keep_lease())

    def _greeting(self) -> Sequence[Command]:
        """The lease comes before the first stream: nobody must find one whose owner seems gone."""
        takes = "0" if self._has_leased else "1"
        lease = ("EVAL", RENEW, 0, self._prefix, self._gateway, self._life, self._lease_ms, takes)
        return [("SCRIPT", "LOAD", APPEND), lease]

    async def _lease(self) -> None:
        takes = "0" if self._has_leased else "1"
        await self._eval(RENEW, self._prefix, self._gateway, self._life, self._lease_ms, takes)
        self._has_leased = True

    async def _keep_lease(self) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError):  # the line says that Redis is gone
                async with asyncio.timeout(self._lease_ms / 1000):
                    await self._lease()
                    await self._let_go()
            await asyncio.sleep(self._renew_s)

    async def _let_go(self) -> None:
        """Once nothing waits any more that could still write to them."""
        while self._left and self._line.is_up:
            keys = list(self._left)[:_BATCH]
            await self._eval(LET_GO, self._prefix, self._owner, *keys)
            for key in keys:
                self._left.pop(key, None)

    def _answered(self, append: _Append, reply: Any) -> None:
        """By the line: first, perhaps, that it is down (None); then what Redis said."""
        if reply is not None:
            refused, lost = reply
            theirs = [append.sent[place - 1] for place in refused]
            # Who was answered, and has written its end, asks no more.
            self._refused.update(theirs if append.then is not None else self._ours.keys() & theirs)
            for place in (*refused, *lost):
                self._ours.pop(append.sent[place - 1], None)
        if append.then is not None:
            then, append.then = append.then, None
            # Only who writes a stream can be told of it: with what else it writes, if this was answered before.
            told = self._refused.intersection(append.names) if self._refused else NOBODY
            self._refused -= told
            try:
                then(frozenset(told))
            except Exception:  # noqa: BLE001 - of others' streams the line tells as well
                _LOG.exception("what was kept in Redis could not be told")

    def _give_up(self, append: _Append) -> None:
        for name in append.sent:
            self._ours.pop(name, None)
            if len(self._left) < _MAX_LEFT:
                self._left[key_of(name)[0]] = None

    async def _gone_owners(self) -> list[str]:
        members = await self._client.smembers(f"{self._prefix}g")
        owners = [owner for member in members if (owner := member.decode()) != self._owner]
        if not owners:
            return []
        leases = await self._client.mget([f"{self._prefix}l:{owner.rpartition(':')[0]}" for owner in owners])
        return [
            owner
            for owner, life in zip(owners, leases, strict=True)
            if (life or b"").decode() != owner.rpartition(":")[2]
        ]

    async def _claim_all(self, keys: Sequence[str], owner: str) -> list[str]:
        """Those of them that are ours now."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.eval(CLAIM, 0, self._prefix, self._owner, key, "", owner)
        return [key for key, epoch in zip(keys, await pipeline.execute(), strict=True) if int(epoch)]

    async def _read(self, keys: Sequence[str]) -> list[Kept | Expired | None]:
        found = await self._eval(READ, self._prefix, *keys)
        if sum([len(one[-1]) for one in found if len(one) > 1]) > _LARGE_BYTES:
            return await asyncio.to_thread(self._open, keys, found)
        return self._open(keys, found)

    def _open(self, keys: Sequence[str], found: Sequence[Any]) -> list[Kept | Expired | None]:
        return [self._sealed.kept(key, one) for key, one in zip(keys, found, strict=True)]

    async def _eval(self, script: str, *arguments: str | int) -> Any:
        return await self._client.eval(script, 0, *arguments)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise Unreachable("the journal's server does not answer") from error


def _batches(keys: Sequence[str], size: int = _BATCH) -> list[Sequence[str]]:
    return [keys[begin : begin + size] for begin in range(0, len(keys), size)]


def _of_one(found: Any) -> Iterator[tuple[int, bytes]]:
    """The entries of the one stream that was asked for."""
    for id, fields in found[0][1] if found else ():
        yield int(id.partition(b"-")[0]), fields[b"d"]
