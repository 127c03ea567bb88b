"""The journal in a folder of append-only files, for one gateway. Owns the folder; the only one that writes there.

Survives kill -9 of the gateway. A file goes when all its streams have ended and their resume window has passed, or,
the oldest first, when all together are over their bound: their streams then have expired. Where something of a stream
could not be written, nothing of it is from then on but that, so that no later life goes on from an earlier frame.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError
from headrace.core.ports import Clock
from headrace.streams.codec import encode_append
from headrace.streams.journal import NOBODY, Birth, Entry, Expired, Kept, Name, Then
from headrace.streams.record import Record
from headrace.streams.seal import Seal
from headrace.streams.segment import Content, Segment, SegmentWriter, entries_of, read_segment, segments_in

_LOG = logging.getLogger("headrace.streams")
_LABEL = "headrace file journal 1"
_LOCK = "lock"
# How long after a failed write the next is tried.
_RETRY_S = 1.0
_SWEEP_S = 1.0
_MAX_EXPIRED = 100_000
# Of a record that stands for those that could not be written: it follows none, so its stream is known to have a gap.
_GAP = 1 << 62
# One living writer: nobody else can have claimed anything.
_EPOCH = 0


@dataclass(slots=True)
class _Held:
    """In which files a stream lies. `over_s`: since when nothing more of it will be kept, by the wall clock."""

    segments: list[Segment]
    over_s: float | None = None


@dataclass(slots=True)
class _Joined:
    """A stream put together from files: unusable where its beginning or something in the middle is missing."""

    birth: Birth | None = None
    records: list[Record] = field(default_factory=list)
    last_s: float = 0.0
    has_gap: bool = False

    def add(self, entry: Entry, at_s: float) -> None:
        if entry.birth is not None:  # the id was given away again
            self.birth, self.records, self.has_gap = entry.birth, [], False
        elif self.birth is None or entry.record.number > self.records[-1].number + 1:
            self.has_gap = True
        if not self.has_gap and (not self.records or entry.record.number > self.records[-1].number):
            self.records.append(entry.record)
        self.last_s = at_s

    @property
    def is_ended(self) -> bool:
        return bool(self.records) and self.records[-1].ending is not None

    def kept(self) -> Kept | None:
        if self.birth is None or self.has_gap:
            return None
        return Kept(self.birth, self.records, _EPOCH, self.last_s if self.is_ended else None)


class FileJournal:
    """`secret` opens what earlier lives sealed; with another one they are as good as gone.

    A stream that has not ended counts as given up when nothing was written of it for `window_s` before `recover`.
    """

    def __init__(
        self,
        folder: Path,
        secret: bytes,
        *,
        window_s: float = 300.0,
        max_bytes: int = 256 << 20,
        segment_bytes: int = 16 << 20,
        segment_s: float = 60.0,
        clock: Clock | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._window_s = window_s
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max_bytes // 4)
        self._segment_s = segment_s
        self._clock = clock or SystemClock()
        self._wall_s = wall_s
        self._lock = _lock(folder)
        self._seal = Seal(secret, _LABEL)
        found = segments_in(folder)
        self._old = [path for _, path in found]
        self._next_number = found[-1][0] + 1 if found else 1
        self._segments: list[Segment] = []
        self._writer: SegmentWriter | None = None
        self._held: dict[Name, _Held] = {}
        # Digests of names, oldest first: an id may be long, and there are many.
        self._expired: dict[bytes, None] = {}
        # Of what else lies here: streams of which something could not be written, and that is not written down yet.
        self._gaps: dict[Name, None] = {}
        self._is_keeping = True
        self._retry_at_s = 0.0
        self._sweep_at_s = 0.0
        self._tending: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_keeping(self) -> bool:
        return self._is_keeping

    def append(self, entries: Sequence[Entry], then: Then) -> None:
        held, kept, names = self._held, [], []
        born: set[Name] = set()
        for entry in entries:
            name = (entry.tenant, entry.stream)
            if entry.birth is not None:
                born.add(name)
            elif ((known := held.get(name)) is None or known.over_s is not None) and name not in born:
                continue
            kept.append(entry)
            names.append(name)
        if kept and not self._is_closed:
            now_s = self._clock.now_s()
            if (now_s >= self._retry_at_s or self._is_keeping) and self._write(kept, now_s):
                self._note(kept, names)
            else:
                self._give_up(names)
            if now_s >= self._sweep_at_s:
                self._sweep_at_s = now_s + _SWEEP_S
                self.sweep()
        then(NOBODY)

    async def recover(self) -> list[Kept]:
        paths, self._old = self._old, []
        contents = await asyncio.to_thread(_read_all, paths, self._seal)
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())
        return self._adopt(paths, contents)

    async def find(self, tenant: str, stream: str) -> Kept | Expired | None:
        name = (tenant, stream)
        held = self._held.get(name)
        if held is None:
            return Expired() if _digest(name) in self._expired else None
        if self._is_past(held.over_s):
            return Expired()
        paths = [segment.path for segment in held.segments]
        contents = await asyncio.to_thread(_read_all, paths, self._seal)
        joined = _Joined()
        for at_s, entry in entries_of(contents, name):
            joined.add(entry, at_s)
        return joined.kept() or Expired()

    async def claim(self, tenant: str, stream: str, epoch: int) -> bool:
        """True for what is kept here: its owner before was an earlier life, or is this one."""
        held = self._held.get((tenant, stream))
        return held is not None and not self._is_past(held.over_s) and epoch == _EPOCH

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._tending is not None:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
            self._tending = None
        self.sweep()
        self._end_segment()
        os.close(self._lock)

    def sweep(self) -> None:
        """Delete the files that nobody may ask for any more, and the oldest ones beyond the bound."""
        now_s = self._clock.now_s()
        if self._gaps and now_s >= self._retry_at_s and not self._is_closed:
            self._write((), now_s)
        if self._writer is not None and self._is_spent(self._writer.segment):
            self._end_segment()
        current = None if self._writer is None else self._writer.segment
        for segment in [one for one in self._segments if one is not current and self._is_spent(one)]:
            self._delete(segment)
        total_bytes = sum(segment.size_bytes for segment in self._segments)
        while total_bytes > self._max_bytes and self._segments[0] is not current:
            total_bytes -= self._segments[0].size_bytes
            self._delete(self._segments[0])

    def _write(self, entries: Sequence[Entry], now_s: float) -> bool:
        gaps = [Entry(*name, Record(_GAP)) for name in self._gaps]
        try:
            writer = self._writer_at(now_s)
            writer.append(encode_append([*gaps, *entries] if gaps else entries, self._wall_s()))
        except OSError as error:
            self._fail(error, now_s)
            return False
        self._note_gaps(writer.segment)
        if not self._is_keeping:
            self._is_keeping = True
            _LOG.info("the journal in %s keeps streams again", self._folder)
        return True

    def _writer_at(self, now_s: float) -> SegmentWriter:
        """The file of this moment; a new one where the last is full, old or broken."""
        writer = self._writer
        if writer is not None:
            is_full = writer.segment.size_bytes >= self._segment_bytes
            if writer.is_usable and not is_full and now_s < writer.began_s + self._segment_s:
                return writer
            self._end_segment()
        number, self._next_number = self._next_number, self._next_number + 1
        self._writer = SegmentWriter(self._folder, number, self._seal, now_s)
        self._segments.append(self._writer.segment)
        return self._writer

    def _end_segment(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _fail(self, error: OSError, now_s: float) -> None:
        self._retry_at_s = now_s + _RETRY_S
        if self._is_keeping:
            self._is_keeping = False
            _LOG.error("the journal in %s does not keep streams: %s", self._folder, error.strerror)

    def _note(self, entries: Sequence[Entry], names: Sequence[Name]) -> None:
        assert self._writer is not None
        segment = self._writer.segment
        for entry, name in zip(entries, names, strict=True):
            if entry.birth is not None:
                self._leave(name)
                self._held[name] = _Held([segment])
                segment.names.add(name)
                segment.open.add(name)
            elif name not in segment.names:
                self._held[name].segments.append(segment)
                segment.names.add(name)
                segment.open.add(name)
            if entry.record.ending is not None:
                self._over(name, self._wall_s())

    def _note_gaps(self, segment: Segment) -> None:
        """They are written down in this file, which stays as long as what they are gaps of."""
        for name in self._gaps:
            held = self._held[name]
            if segment not in held.segments:
                held.segments.append(segment)
                segment.names.add(name)
            segment.over_s = max(segment.over_s, held.over_s or 0.0)
        self._gaps.clear()

    def _give_up(self, names: Iterable[Name]) -> None:
        """Of these something was not kept: nothing that follows would be of use."""
        for name in names:
            if name in self._held:
                self._over(name, self._wall_s())
                self._gaps[name] = None

    def _over(self, name: Name, at_s: float) -> None:
        held = self._held[name]
        held.over_s = at_s
        for segment in held.segments:
            segment.open.discard(name)
            segment.over_s = max(segment.over_s, at_s)

    def _leave(self, name: Name) -> None:
        """Forget where an earlier stream of this name lies."""
        self._gaps.pop(name, None)
        held = self._held.pop(name, None)
        for segment in held.segments if held is not None else ():
            segment.open.discard(name)
            segment.names.discard(name)

    def _delete(self, segment: Segment) -> None:
        self._segments.remove(segment)
        for name in list(segment.names):
            self._leave(name)
            self._expire(name)
        with contextlib.suppress(OSError):
            segment.path.unlink()

    def _expire(self, name: Name) -> None:
        self._expired[_digest(name)] = None
        if len(self._expired) > _MAX_EXPIRED:
            del self._expired[next(iter(self._expired))]

    def _is_spent(self, segment: Segment) -> bool:
        return not segment.open and self._is_past(segment.over_s)

    def _is_past(self, over_s: float | None) -> bool:
        return over_s is not None and self._wall_s() >= over_s + self._window_s

    def _adopt(self, paths: Sequence[Path], contents: Sequence[Content]) -> list[Kept]:
        """Take over what earlier lives left, oldest file first."""
        joined: dict[Name, _Joined] = {}
        old: list[Segment] = []
        for path, content in zip(paths, contents, strict=True):
            # A file of which nothing can be read expires as if its last stream had ended when it was last written.
            last_s = content.appends[-1][0] if content.appends else _written_s(path)
            segment = Segment(path, _size_bytes(path), over_s=last_s)
            old.append(segment)
            if content.fault:
                _LOG.warning("the rest of %s in the journal is lost: %s", path.name, content.fault)
            for at_s, entries in content.appends:
                for entry in entries:
                    name = (entry.tenant, entry.stream)
                    joined.setdefault(name, _Joined()).add(entry, at_s)
                    segment.names.add(name)
        self._segments[:0] = old
        return [kept for name, stream in joined.items() if (kept := self._adopt_one(name, stream, old)) is not None]

    def _adopt_one(self, name: Name, stream: _Joined, old: Sequence[Segment]) -> Kept | None:
        kept = stream.kept()
        if kept is None or self._is_past(stream.last_s):
            self._expire(name)
            return None
        if name in self._held:  # begun anew since this life began
            return None
        self._held[name] = _Held([segment for segment in old if name in segment.names])
        if kept.ended_s is not None:
            self._over(name, kept.ended_s)
        else:
            for segment in self._held[name].segments:
                segment.open.add(name)
        return kept

    async def _tend(self) -> None:
        """Files expire also where nothing is appended."""
        while True:
            await asyncio.sleep(max(_SWEEP_S, min(30.0, self._window_s / 10)))
            self.sweep()


def _lock(folder: Path) -> int:
    """Held until the process is gone, however it goes."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HeadraceError(f"the journal's folder {folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise HeadraceError(f"the journal in {folder} is already written by another gateway") from error
    except OSError as error:
        os.close(lock)
        raise HeadraceError(f"the journal's folder {folder} cannot be locked: {error.strerror}") from error
    return lock


def _read_all(paths: Sequence[Path], seal: Seal) -> list[Content]:
    return [read_segment(path, seal) for path in paths]


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _digest(name: Name) -> bytes:
    return blake2b("\0".join(name).encode("utf-8", "surrogatepass"), digest_size=8).digest()
