"""Writes what streams say into a journal before anybody reads it. Owns what is on its way there.

Everything that one frame of a worker brings goes in one append. Readers see a record once it is kept; a stream that
another gateway has taken over is told so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.streams.journal import Birth, Entry, Journal, Name
from headrace.streams.record import Record
from headrace.streams.stream import Stream


class Scribe:
    """`birth` says of a stream what its first entry must hold; `lost` is told of streams that are another's now."""

    def __init__(self, journal: Journal, birth: Callable[[Stream], Birth], lost: Callable[[Stream], None]) -> None:
        self._journal = journal
        self._birth = birth
        self._lost = lost
        self._entries: list[Entry] = []
        self._streams: list[Stream] = []
        self._is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is written meanwhile goes into one append."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._flush()

    def write(self, stream: Stream, record: Record) -> None:
        """Keeps it, then publishes it: at once or later, but in order."""
        birth = None
        if not stream.is_born:
            stream.is_born = True
            birth = self._birth(stream)
        self._entries.append(Entry(stream.tenant, stream.id, record, birth))
        self._streams.append(stream)
        if not self._is_held:
            self._flush()

    def _flush(self) -> None:
        if not self._entries:
            return
        entries, self._entries = self._entries, []
        streams, self._streams = self._streams, []
        self._journal.append(entries, lambda lost: self._publish(streams, lost))

    def _publish(self, streams: list[Stream], lost: frozenset[Name]) -> None:
        for stream in streams:
            if lost and (stream.tenant, stream.id) in lost:
                self._lost(stream)
            else:
                stream.publish()
