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
    """`lost` is told of streams that are another's now."""

    def __init__(self, journal: Journal, lost: Callable[[Stream], None]) -> None:
        self._journal = journal
        self._lost = lost
        # Of streams that have said nothing yet: what their first entry must hold.
        self._births: dict[Stream, Callable[[], Birth]] = {}
        self._entries: list[Entry] = []
        self._streams: list[Stream] = []
        self._is_held = False

    def follow(self, stream: Stream, birth: Callable[[], Birth] | None = None) -> None:
        """Write down what it says from now on. `birth` is asked with its first record; one that goes on has none."""
        stream.keeper = self._write
        if birth is not None:
            self._births[stream] = birth

    def forget(self, stream: Stream) -> None:
        """It said nothing, and never will."""
        self._births.pop(stream, None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is written meanwhile goes into one append."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._flush()

    def _write(self, stream: Stream, record: Record) -> None:
        birth = self._births.pop(stream, None)
        self._entries.append(Entry(stream.tenant, stream.id, record, None if birth is None else birth()))
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
