"""One file of a journal: a head, then sealed appends one behind the other. Owns the file; knows no streams' meaning.

An append is there whole or not at all: each is sealed as one, with its place in the file, and the first that does not
open ends the reading. Nothing is fsynced: what `write` took outlives this process, not a loss of power.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from headrace.streams.journal import Name
from headrace.streams.roll import Roll
from headrace.streams.seal import Seal

Append = TypeVar("Append")

SUFFIX = ".journal"
ID_BYTES = 16
_MAGIC = b"HRJ1"
_HEAD_BYTES = len(_MAGIC) + ID_BYTES
_LENGTH_BYTES = 4


@dataclass(slots=True, eq=False)
class Segment:
    """What is known of one file. Of `open` streams it holds something, and more may come of them; `roll` are those
    that were born in it and are over, `over` others of which the end lies here, with its time. `over_s` is when the
    last of all that it holds was over, `last_s` when it was last written. All by the wall clock. `shares` are the
    records of each tenant's streams that ended here; one that `is_apart` is for those who write very much."""

    number: int
    path: Path
    size_bytes: int = 0
    last_s: float = 0.0
    over_s: float = 0.0
    open: set[Name] = field(default_factory=set)
    roll: Roll = field(default_factory=Roll)
    over: dict[Name, float] = field(default_factory=dict)
    shares: Counter[str] = field(default_factory=Counter)
    is_apart: bool = False
    # Of the second file, that says what is in this one.
    index_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        return self.size_bytes + self.index_bytes


def segments_in(folder: Path) -> list[tuple[int, Path]]:
    """The numbered files, oldest first. Others are not ours."""
    return numbered(folder, SUFFIX)


def numbered(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    found = [path for path in folder.glob(f"*{suffix}") if path.stem.isascii() and path.stem.isdigit()]
    return sorted((int(path.stem), path) for path in found)


class SegmentWriter:
    """Makes the file and appends to it. An append that fails leaves the file as it was."""

    def __init__(self, folder: Path, number: int, seal: Seal, began_s: float, *, is_apart: bool = False) -> None:
        self.segment = Segment(number, folder / f"{number:08d}{SUFFIX}", is_apart=is_apart)
        self.began_s = began_s
        self.id = os.urandom(ID_BYTES)
        # Of the next append.
        self.ordinal = 0
        self._seal = seal
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self.segment.path, flags, 0o600)
        try:
            self._write(_MAGIC + self.id)
        except OSError:
            self.close()
            with contextlib.suppress(OSError):
                self.segment.path.unlink()
            raise

    @property
    def is_usable(self) -> bool:
        """False once a failed append could not be taken back: nothing may follow it."""
        return self._file >= 0

    def append(self, data: bytes, at_s: float) -> None:
        sealed = self._seal.seal(data, _place(self.id, self.ordinal))
        self._write(len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed)
        self.ordinal += 1
        self.segment.last_s = at_s

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):  # a disk that fills up takes a part first
                written += os.write(self._file, data[written:] if written else data)
        except OSError:
            if written:
                self._take_back()
            raise
        self.segment.size_bytes += written

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._file, self.segment.size_bytes)
        except OSError:
            self.close()


class SegmentReader(Generic[Append]):
    """The appends of a file, from the one that begins at `begin` and is number `ordinal`, up to the first that is torn,
    changed or not to be decoded: `fault` then says why there are no more. Never raises.

    While one is looked at, `begin` and `ordinal` are its own."""

    def __init__(
        self, path: Path, seal: Seal, decode: Callable[[bytes], Append | None], begin: int = 0, ordinal: int = 0
    ) -> None:
        self.fault = ""
        self.begin = max(begin, _HEAD_BYTES)
        self.ordinal = ordinal
        self._path = path
        self._seal = seal
        self._decode = decode

    def __iter__(self) -> Iterator[Append]:
        try:
            with self._path.open("rb") as file:
                id = id_in(file.read(_HEAD_BYTES))
                file.seek(self.begin)
                data = memoryview(file.read())
        except OSError as error:
            self.fault = error.strerror or "it cannot be read"
            return
        if id is None:
            self.fault = "it is not a journal's file"
            return
        offset, at = self.begin, 0
        while at < len(data):
            self.begin = offset + at
            begin = at + _LENGTH_BYTES
            at = begin + int.from_bytes(data[at:begin], "big")
            if at > len(data):
                self.fault = "its last append is torn"
                return
            opened = self._seal.open(bytes(data[begin:at]), _place(id, self.ordinal))
            append = None if opened is None else self._decode(opened)
            if append is None:
                self.fault = "an append was changed, or written with another key"
                return
            yield append
            self.ordinal += 1


def read_id(path: Path) -> tuple[bytes | None, int]:
    """The id of the file, None where it is none of a journal, and its size. Raises OSError."""
    with path.open("rb") as file:
        return id_in(file.read(_HEAD_BYTES)), os.fstat(file.fileno()).st_size


def id_in(head: bytes) -> bytes | None:
    """The file's, from its first bytes. None: it is none of a journal."""
    is_head = head.startswith(_MAGIC) and len(head) >= _HEAD_BYTES
    return head[len(_MAGIC) : _HEAD_BYTES] if is_head else None


def _place(id: bytes, ordinal: int) -> bytes:
    return id + ordinal.to_bytes(8, "big")
