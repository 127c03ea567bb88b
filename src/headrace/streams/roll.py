"""Streams that are over, by the file in which they were born: where each lies and since when it is over, in 36 bytes.

There may be very many, and few are asked for. So they are rows of bytes, found by the digest of their name alone.
"""

from collections.abc import Iterator
from hashlib import blake2b
from struct import Struct

from msgspec import Struct as Record

from headrace.streams.journal import Name

DIGEST_BYTES = 16
# Digest, since when it is over, the last file that holds something of it, where its birth lies in the first.
_ROW = Struct("<16sdIII")


class Row(Record, frozen=True, gc=False):
    """`last` is the number of a file. `begin` is where the append with the birth begins, `ordinal` its number."""

    digest: bytes
    over_s: float
    last: int
    begin: int
    ordinal: int


class Roll:
    """The rows of one file. Of a name that was given away again the last row counts."""

    __slots__ = ("_rows",)

    def __init__(self, rows: bytes = b"") -> None:
        self._rows = bytearray(rows[: len(rows) // _ROW.size * _ROW.size])

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __bytes__(self) -> bytes:
        return bytes(self._rows)

    def add(self, row: Row) -> None:
        self._rows += _ROW.pack(row.digest, row.over_s, row.last, row.begin, row.ordinal)

    def find(self, digest: bytes) -> Row | None:
        at = find_digest(self._rows, digest, _ROW.size)
        return None if at < 0 else Row(*_ROW.unpack_from(self._rows, at))

    def digests(self) -> Iterator[bytes]:
        return (bytes(self._rows[at : at + DIGEST_BYTES]) for at in range(0, len(self._rows), _ROW.size))


def find_digest(rows: bytes | bytearray, digest: bytes, size_bytes: int) -> int:
    """Where the last row of that size begins that begins with the digest; -1: none does."""
    at = rows.rfind(digest)
    while at >= 0 and at % size_bytes:
        at = rows.rfind(digest, 0, at + DIGEST_BYTES - 1)
    return at


def digest_of(name: Name) -> bytes:
    tenant, stream = (part.encode("utf-8", "surrogatepass") for part in name)
    return blake2b(len(tenant).to_bytes(4, "big") + tenant + stream, digest_size=DIGEST_BYTES).digest()
