"""One file of a journal: a head, then sealed appends one behind the other. Owns the file; knows no streams' meaning.

An append is there whole or not at all: each is sealed as one, with its place in the file, and the first that does not
open ends the reading. Nothing is fsynced: what `write` took outlives this process, not a loss of power.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.streams.codec import decode_append
from headrace.streams.journal import Entry, Name
from headrace.streams.seal import Seal

SUFFIX = ".journal"
_MAGIC = b"HRJ1"
_ID_BYTES = 16
_HEAD_BYTES = len(_MAGIC) + _ID_BYTES
_LENGTH_BYTES = 4


@dataclass(slots=True)
class Segment:
    """What is known of one file. `open` are its streams that more may come of; `over_s` when the last other one ended."""

    path: Path
    size_bytes: int = 0
    names: set[Name] = field(default_factory=set)
    open: set[Name] = field(default_factory=set)
    over_s: float = 0.0


@dataclass(slots=True)
class Content:
    """What could be read of a file: its appends with their times; `fault` says why the rest could not."""

    appends: list[tuple[float, list[Entry]]] = field(default_factory=list)
    fault: str = ""


def segments_in(folder: Path) -> list[tuple[int, Path]]:
    """The numbered files, oldest first. Others are not ours."""
    found = [path for path in folder.glob(f"*{SUFFIX}") if path.stem.isascii() and path.stem.isdigit()]
    return sorted((int(path.stem), path) for path in found)


class SegmentWriter:
    """Makes the file and appends to it. An append that fails leaves the file as it was."""

    def __init__(self, folder: Path, number: int, seal: Seal, began_s: float) -> None:
        self.segment = Segment(folder / f"{number:08d}{SUFFIX}")
        self.began_s = began_s
        self._seal = seal
        self._id = os.urandom(_ID_BYTES)
        self._appends = 0
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self.segment.path, flags, 0o600)
        try:
            self._write(_MAGIC + self._id)
        except OSError:
            self.close()
            with contextlib.suppress(OSError):
                self.segment.path.unlink()
            raise

    @property
    def is_usable(self) -> bool:
        """False once a failed append could not be taken back: nothing may follow it."""
        return self._file >= 0

    def append(self, data: bytes) -> None:
        sealed = self._seal.seal(data, _place(self._id, self._appends))
        self._write(len(sealed).to_bytes(_LENGTH_BYTES, "big") + sealed)
        self._appends += 1

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


def read_segment(path: Path, seal: Seal) -> Content:
    """All appends from the start of the file up to the first that is torn or changed. Never raises."""
    content = Content()
    try:
        data = path.read_bytes()
    except OSError as error:
        content.fault = error.strerror or "it cannot be read"
        return content
    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEAD_BYTES:
        content.fault = "it is not a journal's file"
        return content
    id, at = data[len(_MAGIC) : _HEAD_BYTES], _HEAD_BYTES
    while at < len(data):
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(data[at:begin], "big")
        if at > len(data):
            content.fault = "its last append is torn"
            break
        opened = seal.open(data[begin:at], _place(id, len(content.appends)))
        append = None if opened is None else decode_append(opened)
        if append is None:
            content.fault = "an append was changed, or written with another key"
            break
        content.appends.append(append)
    return content


def entries_of(contents: Sequence[Content], name: Name) -> list[tuple[float, Entry]]:
    """One stream's, in order, each with its append's time."""
    return [
        (at_s, entry)
        for content in contents
        for at_s, entries in content.appends
        for entry in entries
        if entry.stream == name[1] and entry.tenant == name[0]
    ]


def _place(id: bytes, number: int) -> bytes:
    return id + number.to_bytes(8, "big")
