"""The journal in Redis, for several gateways. Owns names, leases and sealing there; the client is given and not closed.

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
from hashlib import blake2b, sha1
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from headrace.core.errors import Unreachable
from headrace.streams.codec import decode_birth, decode_record, encode_birth, encode_record
from headrace.streams.journal import Birth, Call, Entry, Expired, Kept, Name, Then
from headrace.streams.record import Record
from headrace.streams.redis_line import Command, RedisLine, stop
from headrace.streams.redis_scripts import APPEND, CALL, CLAIM, ENTRY, FORGET, RELEASE, RENEW
from headrace.streams.seal import Seal

_LOG = logging.getLogger("headrace.streams")
_encode_call = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode
_LABEL = "headrace redis journal 1"
_APPEND_SHA = sha1(APPEND.encode(), usedforsecurity=False).hexdigest()
# A stream that nobody has written to for so long, and nobody has ended, is gone.
_OPEN_S = 3600
# How long after it is gone we still say that it was here.
_MARK_S = 3600
_CLOSE_S = 2.0
_BATCH = 100
# How long what was said to a gateway waits there to be heard, and how much is heard at a time.
_CALL_S = 30
_MAX_CALLS = 1000
_CALL_PLACE = b"call"
# How long a reader of another's stream waits in Redis at a time; the client's socket_timeout must be longer.
_BLOCK_MS = 500


@dataclass(slots=True)
class _Ours:
    key: str
    place: bytes
    epoch: int


@dataclass(slots=True)
class _Append:
    """One append on its way: whose it is, and who is told. `then` is None once it was called."""

    names: list[Name]
    then: Then | None


class RedisJournal:
    """`gateway` is a name that no other living gateway has; a new life of it takes over from the last at once.

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
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._client: Any = client  # its types do not say what is bytes
        self._seal = Seal(secret, _LABEL)
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
        self._refused: set[Name] = set()
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
        names, wires = [], []
        for entry in entries:
            name = (entry.tenant, entry.stream)
            if entry.birth is not None:
                key, place = _key(name)
                self._ours[name] = _Ours(key, place, 1)
            ours = self._ours.get(name)
            if ours is not None:
                names.append(name)
                wires.append(self._wire(entry, ours))
                if entry.record.ending is not None:
                    del self._ours[name]
        self._line.send(_Append(names, then), (*self._head, b"".join(wires)))

    async def recover(self) -> list[Kept]:
        with _translated():
            await self._lease()
            self._start()
            keys: list[str] = []
            for owner in await self._gone_owners():
                held = await self._client.smembers(f"{self._prefix}o:{owner}")
                for some in _batches(sorted(key.decode() for key in held)):
                    keys += await self._claim_all(some, owner)
                await self._eval(FORGET, self._prefix, owner)
            found = [kept for some in _batches(keys) for kept in await self._read(some)]
        for key, kept in zip(keys, found, strict=True):
            if isinstance(kept, Kept):
                name = (kept.birth.tenant, kept.birth.stream)
                self._ours[name] = _Ours(key, _key(name)[1], kept.epoch)
        return [kept for kept in found if isinstance(kept, Kept)]

    async def find(self, tenant: str, stream: str) -> Kept | Expired | None:
        with _translated():
            [found] = await self._read([_key((tenant, stream))[0]])
        return found

    async def claim(self, tenant: str, stream: str, epoch: int) -> bool:
        name = (tenant, stream)
        key, place = _key(name)
        with _translated():
            await self._lease()
            self._start()
            taken = int(await self._eval(CLAIM, self._prefix, self._owner, key, str(epoch), ""))
        if taken:
            self._ours[name] = _Ours(key, place, taken)
        return bool(taken)

    async def tail(self, tenant: str, stream: str, after: int) -> AsyncIterator[Record]:
        """The records behind `after` of a stream that another gateway writes, as they come, up to the ending.

        Ends without one where the stream is gone from Redis, or was taken over so that its rest is elsewhere.
        """
        key, place = _key((tenant, stream))
        name, last = f"{self._prefix}r:{key}".encode(), after
        while True:
            with _translated():
                found: Any = await self._client.xread({name: f"{last}-0"}, count=256, block=_BLOCK_MS)
                if not found and not await self._client.exists(name):
                    return
            for record in self._records(_of_one(found), place):
                yield record
                last = record.number
                if record.ending is not None:
                    return

    async def knows(self, tenant: str, stream: str) -> bool:
        """It is here, whoever owns it."""
        with _translated():
            return bool(await self._client.exists(f"{self._prefix}m:{_key((tenant, stream))[0]}"))

    async def call(self, calls: Sequence[Call]) -> list[bool]:
        """Say something of streams to who owns them: of each, whether there is an owner that lives."""
        pipeline = self._client.pipeline(transaction=False)
        for said in calls:
            sealed = self._seal.seal(_encode_call(said), _CALL_PLACE)
            pipeline.eval(CALL, 0, self._prefix, _key((said.tenant, said.stream))[0], sealed, _CALL_S)
        with _translated():
            return [bool(int(told)) for told in await pipeline.execute()]

    async def calls(self) -> list[Call]:
        """What was said to this gateway since it was last asked."""
        with _translated():
            found = await self._client.lpop(f"{self._prefix}c:{self._owner}", _MAX_CALLS)
        opened = [self._seal.open(sealed, _CALL_PLACE) for sealed in found or ()]
        return [_decode_call(data) for data in opened if data is not None]

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
            await asyncio.sleep(self._renew_s)

    def _wire(self, entry: Entry, ours: _Ours) -> bytes:
        record, birth = entry.record, b""
        if entry.birth is not None:
            birth = self._seal.seal(encode_birth(entry.birth), ours.place)
        sealed = self._seal.seal(encode_record(record), ours.place + record.number.to_bytes(8, "big"))
        ended = b"" if record.ending is None else repr(self._wall_s()).encode()
        head = ENTRY.pack(ours.key.encode(), record.number, ours.epoch, len(sealed), len(birth), len(ended))
        return head + sealed + birth + ended

    def _answered(self, append: _Append, reply: Any) -> None:
        """By the line: first, perhaps, that it is down (None); then what Redis said."""
        if reply is not None:
            refused, lost = reply
            self._refused.update(append.names[place - 1] for place in refused)
            for place in (*refused, *lost):
                self._ours.pop(append.names[place - 1], None)
        if append.then is not None:
            then, append.then = append.then, None
            told, self._refused = frozenset(self._refused), set()
            then(told)

    def _give_up(self, append: _Append) -> None:
        for name in append.names:
            self._ours.pop(name, None)

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
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.hgetall(f"{self._prefix}m:{key}")
            pipeline.xrange(f"{self._prefix}r:{key}")
            pipeline.exists(f"{self._prefix}t:{key}")
        replies = await pipeline.execute()
        return [self._kept(key, *replies[3 * place : 3 * place + 3]) for place, key in enumerate(keys)]

    def _kept(self, key: str, meta: dict[bytes, bytes], entries: Any, is_marked: int) -> Kept | Expired | None:
        if not meta or not entries:
            return Expired() if is_marked else None
        place = bytes.fromhex(key)
        birth = self._birth(meta[b"birth"], place)
        records = list(self._records(entries, place))
        if birth is None or len(records) < len(entries):
            _LOG.warning("a stream in Redis cannot be read: it was changed, or written with another key")
            return None
        epoch = int(meta[b"own"].rpartition(b":")[2])
        return Kept(birth, records, epoch, float(meta[b"ended"]) if b"ended" in meta else None)

    def _birth(self, sealed: bytes, place: bytes) -> Birth | None:
        opened = self._seal.open(sealed, place)
        return None if opened is None else decode_birth(opened)

    def _records(self, entries: Any, place: bytes) -> Iterator[Record]:
        """Up to the first that does not open."""
        for id, fields in entries:
            number = int(id.partition(b"-")[0])
            opened = self._seal.open(fields[b"d"], place + number.to_bytes(8, "big"))
            record = None if opened is None else decode_record(opened)
            if record is None:
                return
            yield record

    async def _eval(self, script: str, *arguments: str | int) -> Any:
        return await self._client.eval(script, 0, *arguments)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise Unreachable("the journal's server does not answer") from error


def _key(name: Name) -> tuple[str, bytes]:
    """What a stream is called in Redis: neither a tenant's name nor a client's id can be read there."""
    tenant, stream = (part.encode("utf-8", "surrogatepass") for part in name)
    place = blake2b(len(tenant).to_bytes(4, "big") + tenant + stream, digest_size=16).digest()
    return place.hex(), place


def _batches(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[begin : begin + _BATCH] for begin in range(0, len(keys), _BATCH)]


def _of_one(found: Any) -> Any:
    """The entries of the one stream that was asked for."""
    return found[0][1] if found else []
