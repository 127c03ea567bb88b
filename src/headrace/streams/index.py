"""Which streams lie in a file of a journal, in a second file beside it. Owns that file's form.

It is written once nothing more comes to the first, so that the next life need not read that one to know what is in it.
It is a shortcut and never the truth: where it is missing, torn, changed, or of a file of another size, the first file
is read. It outlives that for a while, to tell streams that were here once from those that never were.
"""

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from headrace.streams.journal import Name
from headrace.streams.roll import Roll, digest_of
from headrace.streams.seal import Seal
from headrace.streams.segment import ID_BYTES, numbered, read_id

SUFFIX = ".index"
_MAGIC = b"HRI1"
_HEAD_BYTES = len(_MAGIC) + ID_BYTES
_PLACE = b"index"
# Where an append begins, and its number.
Spot = tuple[int, int]


@dataclass(slots=True)
class Index:
    """`open` are the streams that more may come of, each with where its birth lies, None for one that was born in an
    earlier file. The others are as a segment's."""

    last_s: float
    roll: Roll
    open: dict[Name, Spot | None]
    over: dict[Name, float]
    shares: Counter[str]
    is_apart: bool = False

    def digests(self) -> bytes:
        """Of all that were born here."""
        born = [digest_of(name) for name, spot in self.open.items() if spot is not None]
        return b"".join([*self.roll.digests(), *born])


class _Open(Struct, array_like=True, frozen=True, gc=False):
    """Names as bytes: they may hold what UTF-8 does not."""

    tenant: bytes
    stream: bytes
    spot: Spot | None


class _Over(Struct, array_like=True, frozen=True, gc=False):
    tenant: bytes
    stream: bytes
    over_s: float


class _Form(Struct, array_like=True, frozen=True):
    size_bytes: int
    last_s: float
    roll: bytes
    open: list[_Open]
    over: list[_Over]
    shares: dict[bytes, int]
    is_apart: bool


_FORMS = msgspec.msgpack.Decoder(_Form)


def index_path(path: Path) -> Path:
    return path.with_suffix(SUFFIX)


def indices_in(folder: Path) -> list[tuple[int, Path]]:
    """The numbered files, oldest first."""
    return numbered(folder, SUFFIX)


def write_index(path: Path, size_bytes: int, id: bytes, index: Index, seal: Seal) -> int:
    """Beside the file at `path`, of that size and id. Returns the bytes it takes; 0 where it could not be written."""
    form = _Form(
        size_bytes,
        index.last_s,
        bytes(index.roll),
        [_Open(_encode(name[0]), _encode(name[1]), spot) for name, spot in index.open.items()],
        [_Over(_encode(name[0]), _encode(name[1]), over_s) for name, over_s in index.over.items()],
        {_encode(tenant): number for tenant, number in index.shares.items()},
        index.is_apart,
    )
    data = _MAGIC + id + seal.seal(msgspec.msgpack.encode(form), id + _PLACE)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        with open(os.open(index_path(path), flags, 0o600), "wb") as file:
            return file.write(data)
    except OSError:
        with contextlib.suppress(OSError):
            index_path(path).unlink()
        return 0


def read_index(path: Path, seal: Seal) -> Index | None:
    """Of the file at `path`. None: that file must be read."""
    try:
        id, size_bytes = read_id(path)
        return None if id is None else _read(index_path(path), seal, id, size_bytes)
    except OSError:
        return None


def read_left_index(path: Path, seal: Seal) -> Index | None:
    """At `path`, of a file that is gone. None: nothing is known of that any more."""
    try:
        return _read(path, seal)
    except OSError:
        return None


def _read(path: Path, seal: Seal, id: bytes | None = None, size_bytes: int | None = None) -> Index | None:
    data = path.read_bytes()
    own = data[len(_MAGIC) : _HEAD_BYTES]
    if not data.startswith(_MAGIC) or (id is not None and own != id):
        return None
    opened = seal.open(data[_HEAD_BYTES:], own + _PLACE)
    if opened is None:
        return None
    try:
        form = _FORMS.decode(opened)
        if size_bytes is not None and form.size_bytes != size_bytes:
            return None
        return Index(
            form.last_s,
            Roll(form.roll),
            {(_decode(line.tenant), _decode(line.stream)): line.spot for line in form.open},
            {(_decode(line.tenant), _decode(line.stream)): line.over_s for line in form.over},
            Counter({_decode(tenant): number for tenant, number in form.shares.items()}),
            form.is_apart,
        )
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
