"""Writes what streams say into a journal before anybody reads it. Owns what is on its way there.

Everything that one frame of a worker brings goes in one append. Readers see a record once it is kept; a stream that
another gateway has taken over is told so.
"""

import logging
from collections.abc import Callable

from headrace.streams.journal import NOBODY, Birth, Entry, Journal, Name
from headrace.streams.record import Ending, Failure, Record, Usage
from headrace.streams.stream import Stream

log = logging.getLogger("headrace.serving")


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

    def held(self) -> "Scribe":
        """To be entered: what is written meanwhile goes into one append."""
        return self

    def __enter__(self) -> None:
        self._is_held = True

    def __exit__(self, *error: object) -> None:
        self._is_held = False
        if self._entries:
            self._flush()

    def bury(self, birth: Birth, number: int, failure: Failure) -> None:
        """End a stream that nobody can speak for any more, in the journal alone: it is not asked for again."""
        ending = Record(number, ending=Ending(Usage(), failure))
        self._append([Entry(birth.tenant, birth.stream, ending)], [])

    def _write(self, stream: Stream, record: Record) -> None:
        birth = self._births.pop(stream, None)
        try:
            born = None if birth is None else birth()
        except Exception:
            # It says nothing else before this, so nothing of it is on its way.
            log.exception("stream %s cannot be kept", stream.id)
            stream.keeper = None
            stream.publish()
            return
        self._entries.append(Entry(stream.tenant, stream.id, record, born))
        self._streams.append(stream)
        if not self._is_held:
            self._flush()

    def _flush(self) -> None:
        entries, self._entries = self._entries, []
        streams, self._streams = self._streams, []
        self._append(entries, streams)

    def _append(self, entries: list[Entry], streams: list[Stream]) -> None:
        """A journal does not raise. If one did, the readers of all these streams would wait for ever."""

        def then(lost: frozenset[Name]) -> None:
            told, streams[:] = streams[:], []
            self._publish(told, lost)

        try:
            self._journal.append(entries, then)
        except Exception:
            log.exception("the journal failed to take %d records", len(entries))
            then(NOBODY)

    def _publish(self, streams: list[Stream], lost: frozenset[Name]) -> None:
        for stream in streams:
            if lost and (stream.tenant, stream.id) in lost:
                self._lost(stream)
            else:
                stream.publish()
