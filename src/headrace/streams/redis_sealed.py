"""Streams as they lie in Redis: what they are called there, and their births and records, sealed. Owns names and layout;
knows no owner, no lease and no connection.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from headrace.streams.codec import decode_birth, decode_record, encode_birth, encode_record
from headrace.streams.journal import Call, Entry, Expired, Kept, Name
from headrace.streams.record import Record
from headrace.streams.redis_scripts import ENTRY, RECORD
from headrace.streams.seal import Seal

_LOG = logging.getLogger("headrace.streams")
_encode_call = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode
_LABEL = "headrace redis journal 1"
_CALL_PLACE = b"call"


def key_of(name: Name) -> tuple[str, bytes]:
    """What a stream is called in Redis: neither a tenant's name nor a client's id can be read there."""
    tenant, stream = (part.encode("utf-8", "surrogatepass") for part in name)
    place = blake2b(len(tenant).to_bytes(4, "big") + tenant + stream, digest_size=16).digest()
    return place.hex(), place


class SealedStreams:
    """Of all gateways that hold the same secret."""

    def __init__(self, secret: bytes) -> None:
        self._seal = Seal(secret, _LABEL)

    def wire(self, entry: Entry, key: str, place: bytes, epoch: int, ended_s: float | None) -> bytes:
        """An entry as `redis_scripts.APPEND` reads it."""
        record, birth, ended = entry.record, b"", b"" if ended_s is None else repr(ended_s).encode()
        if entry.birth is not None:
            birth = self._seal.seal(encode_birth(entry.birth), place)
        sealed = self._seal.seal(encode_record(record), _place_of(place, record.number))
        head = ENTRY.pack(key.encode(), record.number, epoch, len(sealed), len(birth), len(ended))
        return head + sealed + birth + ended

    def kept(self, key: str, found: Sequence[Any]) -> Kept | Expired | None:
        """Of what `redis_scripts.READ` found."""
        if len(found) == 1:
            return Expired() if found[0] else None
        _, own, sealed, ended, wires = found
        place = bytes.fromhex(key)
        opened = self._seal.open(sealed, place)
        birth = None if opened is None else decode_birth(opened)
        entries = list(_unpacked(wires))
        records = list(self.records(entries, place))
        if birth is None or len(records) < len(entries) or records[-1].number != len(records):
            _LOG.warning("a stream in Redis cannot be read: it was changed, or written with another key")
            return None
        return Kept(birth, records, int(own.rpartition(b":")[2]), float(ended) if ended else None)

    def records(self, entries: Iterable[tuple[int, bytes]], place: bytes) -> Iterator[Record]:
        """Of numbers and what is sealed, up to the first that does not open."""
        for number, sealed in entries:
            opened = self._seal.open(sealed, _place_of(place, number))
            record = None if opened is None else decode_record(opened)
            if record is None:
                return
            yield record

    def call(self, said: Call) -> bytes:
        return self._seal.seal(_encode_call(said), _CALL_PLACE)

    def calls(self, sealed: Sequence[bytes]) -> list[Call]:
        """Those that a gateway of this server said."""
        opened = [self._seal.open(each, _CALL_PLACE) for each in sealed]
        return [_decode_call(data) for data in opened if data is not None]


def _unpacked(wires: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(wires):
        number, size_bytes = RECORD.unpack_from(wires, at)
        at += RECORD.size + size_bytes
        yield number, wires[at - size_bytes : at]


def _place_of(place: bytes, number: int) -> bytes:
    return place + number.to_bytes(8, "big")
