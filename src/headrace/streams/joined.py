"""Streams put together from the files of a journal. Owns when what lies there is a stream, whole up to where it came.

Reads of each file no more than it must. Knows nothing of which files there are. May run in a thread.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from headrace.streams.codec import decode_entries_of
from headrace.streams.index import Spot
from headrace.streams.journal import Birth, Entry, Kept, Name
from headrace.streams.record import Record
from headrace.streams.roll import Row, digest_of
from headrace.streams.seal import Seal
from headrace.streams.segment import Segment, SegmentReader

# Of a record that stands for those that could not be written: it follows none, so its stream is known to have a gap.
GAP = 1 << 62
# One living writer: nobody else can have claimed anything.
EPOCH = 0


@dataclass(slots=True)
class Held:
    """A stream that more may come of: the files in which it lies, oldest first, and where its birth lies in the
    first."""

    segments: list[Segment]
    spot: Spot

    def end(self, name: Name, over_s: float) -> None:
        """Nothing more comes of it: the file that it was born in says so from now on."""
        self.segments[0].roll.add(Row(digest_of(name), over_s, self.segments[-1].number, *self.spot))
        for segment in self.segments:
            segment.open.discard(name)
            segment.over_s = max(segment.over_s, over_s)


@dataclass(slots=True)
class Joined:
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
        return Kept(self.birth, self.records, EPOCH, self.last_s if self.is_ended else None)


def join(segments: Iterable[Segment], spot: Spot, name: Name, seal: Seal) -> Joined:
    """One stream, up to its end; its birth lies there in the first of the files."""
    joined = Joined()
    for segment in segments:
        # Of most appends it is enough to see that the id is nowhere in them.
        reader = SegmentReader(segment.path, seal, partial(_entries_with, name=name), *spot)
        for at_s, entries in reader:
            for entry in entries:
                joined.add(entry, at_s)
            if joined.is_ended:
                return joined
        spot = (0, 0)
    return joined


def join_all(
    held: Mapping[Name, Held], seal: Seal, faults: dict[str, str], stop: Callable[[], bool]
) -> dict[Name, Joined]:
    """These streams, in one pass over the files that hold any of them."""
    joined: dict[Name, Joined] = {}
    wanted: dict[Segment, set[Name]] = {}
    for name, one in held.items():
        for segment in one.segments:
            wanted.setdefault(segment, set()).add(name)
    for segment in sorted(wanted, key=lambda segment: segment.number):
        names = wanted[segment]
        spots = [held[name].spot if held[name].segments[0] is segment else (0, 0) for name in names]
        reader = SegmentReader(segment.path, seal, partial(decode_entries_of, names=names), *min(spots))
        for at_s, entries in reader:
            for entry in entries:
                joined.setdefault((entry.tenant, entry.stream), Joined()).add(entry, at_s)
            if stop():
                return {}
        if reader.fault:
            faults[segment.path.name] = reader.fault
    return joined


def _entries_with(data: bytes, name: Name) -> tuple[float, list[Entry]] | None:
    if name[1].encode("utf-8", "surrogatepass") not in data:
        return 0.0, []
    return decode_entries_of(data, {name})
