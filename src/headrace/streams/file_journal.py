"""The journal in a folder of append-only files, for one gateway. Owns the folder; the only one that writes there.

Survives kill -9 of the gateway. A file goes when all its streams have ended and their resume window has passed, or,
the oldest first, when all together are over their bound: their streams then have expired. Where something of a stream
could not be written, nothing of it is from then on but that, so that no later life goes on from an earlier frame.
Beside each file that is full lies an index, so that a life that begins need not read what earlier ones wrote. Tenants
that write very much have files of their own, so that they do not push out what others have kept.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from headrace.core.clock import SystemClock
from headrace.core.ports import Clock
from headrace.streams.bygones import MAX_BYGONES, Bygones
from headrace.streams.codec import encode_append
from headrace.streams.index import Index, Spot, index_path, indices_in, write_index
from headrace.streams.inventory import Inventory, Leftovers, take_inventory
from headrace.streams.joined import EPOCH, GAP, Held, Joined, join, join_all
from headrace.streams.journal import NOBODY, Entry, Expired, Kept, Name, Then
from headrace.streams.lock import lock_folder
from headrace.streams.record import Record
from headrace.streams.roll import digest_of
from headrace.streams.seal import Seal
from headrace.streams.segment import Segment, SegmentWriter, segments_in
from headrace.streams.shares import Shares

_LOG = logging.getLogger("headrace.streams")
_LABEL = "headrace file journal 1"
# How long after a failed write the next is tried.
_RETRY_S = 1.0
_SWEEP_S = 1.0


class FileJournal:
    """`secret` opens what earlier lives sealed; with another one they are as good as gone.

    A stream that has not ended counts as given up when nothing was written of it for `window_s` before `recover`. Of
    what is gone, `max_bygones` are remembered.
    """

    def __init__(
        self,
        folder: Path,
        secret: bytes,
        *,
        window_s: float = 300.0,
        max_bytes: int = 256 << 20,
        segment_bytes: int = 4 << 20,
        segment_s: float = 60.0,
        max_bygones: int = MAX_BYGONES,
        clock: Clock | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._window_s = window_s
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max_bytes // 4) or segment_bytes
        self._segment_s = segment_s
        self._clock = clock or SystemClock()
        self._wall_s = wall_s
        self._lock = lock_folder(folder)
        self._secret = secret
        self._seal = Seal(secret, _LABEL)
        # What earlier lives left, until it was looked at.
        self._old: Leftovers | None = Leftovers(segments_in(folder), indices_in(folder))
        self._looking: asyncio.Future[None] | None = None
        self._left: dict[Name, Held] = {}
        self._lamented: set[str] = set()
        self._next_number = self._old.last_number + 1
        # Oldest first.
        self._segments: list[Segment] = []
        # By whether it is for those who write very much.
        self._writers: dict[bool, SegmentWriter] = {}
        self._shares = Shares()
        self._large: frozenset[str] = frozenset()
        # Some streams lie apart, or will.
        self._has_apart = False
        self._held: dict[Name, Held] = {}
        self._bygones = Bygones(max_bygones)
        # Streams of which something could not be written, and that is not written down yet: since when, and where to.
        self._gaps: dict[Name, tuple[float, bool]] = {}
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
            elif name not in held and name not in born:
                continue
            kept.append(entry)
            names.append(name)
        if kept and not self._is_closed:
            now_s = self._clock.now_s()
            for some, some_names, is_apart in self._split(kept, names):
                can_write = now_s >= self._retry_at_s or self._is_keeping
                spot = self._write(some, now_s, is_apart) if can_write else None
                if spot is not None:
                    self._note(some, some_names, spot, self._writers[is_apart].segment)
                else:
                    self._give_up(some_names, is_apart)
            if now_s >= self._sweep_at_s:
                self._sweep_at_s = now_s + _SWEEP_S
                self.sweep()
        then(NOBODY)

    async def recover(self) -> list[Kept]:
        """Those that have not ended. The others are found where they lie, when they are asked for."""
        await self._look()
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())
        left, self._left = self._left, {}
        faults: dict[str, str] = {}
        joined = await asyncio.to_thread(join_all, left, self._seal, faults, lambda: self._is_closed)
        if self._is_closed:
            return []
        self._lament(faults)
        found = []
        for name, held in left.items():
            if self._held.get(name) is not held:  # over since then
                continue
            stream = joined.get(name, Joined())
            kept = stream.kept()
            if kept is None or kept.ended_s is not None or self._is_past(stream.last_s):
                self._over(name, stream.last_s)
            else:
                found.append(kept)
        return found

    async def find(self, tenant: str, stream: str) -> Kept | Expired | None:
        await self._look()
        name = (tenant, stream)
        place = self._locate(name)
        if not isinstance(place, tuple):
            return place
        segments, spot, is_over = place
        joined = await asyncio.to_thread(join, segments, spot, name, self._seal)
        # Where it is over and its end does not lie there, somebody has read more of it than does.
        return Expired() if is_over and not joined.is_ended else joined.kept() or Expired()

    async def knows(self, tenant: str, stream: str) -> bool:
        """`find` would find it, if its files are whole."""
        await self._look()
        return isinstance(self._locate((tenant, stream)), tuple)

    async def claim(self, tenant: str, stream: str, epoch: int) -> bool:
        """True for what is kept here: its owner before was an earlier life, or is this one."""
        return epoch == EPOCH and await self.knows(tenant, stream)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for task in (self._tending, self._looking):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self.sweep()
        for is_apart in list(self._writers):
            self._end_segment(is_apart)
        os.close(self._lock)

    def sweep(self) -> None:
        """Delete the files that nobody may ask for any more, and the oldest ones beyond the bound."""
        now_s = self._clock.now_s()
        for is_apart in {is_apart for _, is_apart in self._gaps.values()}:
            if now_s >= self._retry_at_s and not self._is_closed:
                self._write((), now_s, is_apart)
        for is_apart in [apart for apart, writer in self._writers.items() if self._is_spent(writer.segment)]:
            self._end_segment(is_apart)
        current = {writer.segment for writer in self._writers.values()}
        for segment in [one for one in self._segments if one not in current and self._is_spent(one)]:
            self._delete(segment)
        self._make_room([one for one in self._segments if one not in current])

    def _make_room(self, old: list[Segment]) -> None:
        """The oldest go, of the large tenants' files or of the others', whichever are more."""
        sizes = {False: 0, True: 0}
        for segment in self._segments:
            sizes[segment.is_apart] += segment.all_bytes
        while old and sum(sizes.values()) > self._max_bytes:
            of_large = sizes[True] >= sizes[False]
            segment = next((one for one in old if one.is_apart is of_large), old[0])
            sizes[segment.is_apart] -= segment.all_bytes
            old.remove(segment)
            self._delete(segment)

    def _split(self, entries: list[Entry], names: list[Name]) -> list[tuple[list[Entry], list[Name], bool]]:
        """What goes to the files of the many and what to those of the large; a stream stays where it was born."""
        if not self._has_apart:
            return [(entries, names, False)]
        parts: dict[bool, tuple[list[Entry], list[Name]]] = {}
        born: set[Name] = set()
        for entry, name in zip(entries, names, strict=True):
            if entry.birth is not None:
                born.add(name)
            is_apart = name[0] in self._large if name in born else self._held[name].segments[0].is_apart
            some, some_names = parts.setdefault(is_apart, ([], []))
            some.append(entry)
            some_names.append(name)
        return [(*part, is_apart) for is_apart, part in parts.items()]

    def _write(self, entries: Sequence[Entry], now_s: float, is_apart: bool) -> Spot | None:
        """Where it lies in the file of this moment; None: nowhere."""
        gaps = self._gaps and [Entry(*name, Record(GAP)) for name, gap in self._gaps.items() if gap[1] is is_apart]
        try:
            writer = self._writer_at(now_s, is_apart)
            spot, at_s = (writer.segment.size_bytes, writer.ordinal), self._wall_s()
            writer.append(encode_append([*gaps, *entries] if gaps else entries, at_s), at_s)
        except OSError as error:
            self._fail(error, now_s)
            return None
        if gaps:
            self._note_gaps(writer.segment)
        if not self._is_keeping:
            self._is_keeping = True
            _LOG.info("the journal in %s keeps streams again", self._folder)
        return spot

    def _writer_at(self, now_s: float, is_apart: bool) -> SegmentWriter:
        """The file of this moment; a new one where the last is full, old or broken."""
        writer = self._writers.get(is_apart)
        if writer is not None:
            is_full = writer.segment.size_bytes >= self._segment_bytes
            if writer.is_usable and not is_full and now_s < writer.began_s + self._segment_s:
                return writer
            self._end_segment(is_apart)
        number, self._next_number = self._next_number, self._next_number + 1
        writer = SegmentWriter(self._folder, number, self._seal, now_s, is_apart=is_apart)
        self._writers[is_apart] = writer
        self._segments.append(writer.segment)
        return writer

    def _end_segment(self, is_apart: bool) -> None:
        """Nothing more comes to this file: say beside it what is in it."""
        writer = self._writers.pop(is_apart)
        writer.close()
        segment = writer.segment
        index = Index(segment.last_s, segment.roll, self._spots(segment), segment.over, segment.shares, is_apart)
        segment.index_bytes = write_index(segment.path, segment.size_bytes, writer.id, index, self._seal)
        segment.over = {}
        self._count([segment])

    def _count(self, segments: Iterable[Segment]) -> None:
        """Who is large is found from files that are full."""
        for segment in segments:
            self._shares.add(segment.shares)
        self._large = self._shares.large(sum(segment.all_bytes for segment in self._segments), self._max_bytes)
        self._has_apart = bool(self._large) or any(segment.is_apart for segment in self._segments)

    def _spots(self, segment: Segment) -> dict[Name, Spot | None]:
        held = [(name, self._held[name]) for name in segment.open]
        return {name: one.spot if one.segments[0] is segment else None for name, one in held}

    def _fail(self, error: OSError, now_s: float) -> None:
        self._retry_at_s = now_s + _RETRY_S
        if self._is_keeping:
            self._is_keeping = False
            _LOG.error("the journal in %s does not keep streams: %s", self._folder, error.strerror)

    def _note(self, entries: Sequence[Entry], names: Sequence[Name], spot: Spot, segment: Segment) -> None:
        for entry, name in zip(entries, names, strict=True):
            if entry.birth is not None:
                self._leave(name)
                self._held[name] = Held([segment], spot)
                segment.open.add(name)
            elif name not in segment.open:
                if name not in self._held:  # it has ended in this append
                    continue
                self._held[name].segments.append(segment)
                segment.open.add(name)
            if entry.record.ending is not None:
                segment.shares[name[0]] += entry.record.number
                if self._held[name].segments[0] is not segment:
                    segment.over[name] = segment.last_s
                self._over(name, segment.last_s)

    def _note_gaps(self, segment: Segment) -> None:
        """They are written down in this file, which stays as long as what they are gaps of."""
        for name in [name for name, gap in self._gaps.items() if gap[1] is segment.is_apart]:
            over_s, _ = self._gaps.pop(name)
            segment.over[name] = over_s
            segment.over_s = max(segment.over_s, over_s)

    def _give_up(self, names: Iterable[Name], is_apart: bool) -> None:
        """Of these something was not kept: nothing that follows would be of use."""
        at_s = self._wall_s()
        for name in names:
            if name in self._held:
                self._over(name, at_s)
                self._gaps[name] = (at_s, is_apart)

    def _over(self, name: Name, at_s: float) -> None:
        self._held.pop(name).end(name, at_s)
        self._gaps.pop(name, None)

    def _leave(self, name: Name) -> None:
        """Nothing more comes of the stream that has this name."""
        self._gaps.pop(name, None)
        held = self._held.pop(name, None)
        for segment in held.segments if held is not None else ():
            segment.open.discard(name)

    def _delete(self, segment: Segment) -> None:
        """With it go the streams that were born in it. Its index stays, to tell that they were here."""
        self._segments.remove(segment)
        self._shares.remove(segment.shares)
        digests = [*segment.roll.digests()]
        for name, spot in self._spots(segment).items():
            if spot is not None:
                digests.append(digest_of(name))
                self._leave(name)
            else:  # its beginning lies in a file that stays
                self._over(name, self._wall_s())
        self._bygones.add(b"".join(digests), index_path(segment.path))
        with contextlib.suppress(OSError):
            segment.path.unlink()

    def _locate(self, name: Name) -> tuple[list[Segment], Spot, bool] | Expired | None:
        """In which files it lies, where its birth does in the first, and whether it is over."""
        held = self._held.get(name)
        if held is not None:
            return list(held.segments), held.spot, False
        digest = digest_of(name)
        for segment in reversed(self._segments):
            row = segment.roll.find(digest)
            if row is not None and self._is_past(row.over_s):
                return Expired()
            if row is not None:
                # Some of these may be of others only: of one whose index was lost it is not known whose they are.
                segments = [one for one in self._segments if segment.number <= one.number <= row.last]
                return segments, (row.begin, row.ordinal), True
        return Expired() if digest in self._bygones else None

    def _is_spent(self, segment: Segment) -> bool:
        return not segment.open and self._is_past(segment.over_s)

    def _is_past(self, over_s: float) -> bool:
        return self._wall_s() >= over_s + self._window_s

    async def _look(self) -> None:
        """At what earlier lives left: once, before anything is looked for."""
        if self._old is None or self._is_closed:
            return
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._take_over(self._old))
        await asyncio.shield(self._looking)

    async def _take_over(self, old: Leftovers) -> None:
        # A seal counts what it seals: that thread has its own.
        seal = Seal(self._secret, _LABEL)
        inventory = await asyncio.to_thread(take_inventory, old, seal, lambda: self._is_closed)
        self._old = None
        self._adopt(inventory)

    def _adopt(self, inventory: Inventory) -> None:
        self._lament(inventory.faults)
        self._bygones.precede(inventory.bygones)
        self._segments[:0] = inventory.segments
        self._count(inventory.segments)
        for name, held in inventory.held.items():
            if name in self._held:  # begun anew since this life began
                continue
            self._held[name] = held
            for segment in held.segments:
                segment.open.add(name)
            if self._is_past(held.segments[-1].last_s):
                self._over(name, held.segments[-1].last_s)
            else:
                self._left[name] = held

    def _lament(self, faults: dict[str, str]) -> None:
        for file in sorted(faults.keys() - self._lamented):
            _LOG.warning("the rest of %s in the journal is lost: %s", file, faults[file])
        self._lamented.update(faults)

    async def _tend(self) -> None:
        """Files expire also where nothing is appended."""
        while True:
            await asyncio.sleep(max(_SWEEP_S, min(30.0, self._window_s / 10)))
            self.sweep()
