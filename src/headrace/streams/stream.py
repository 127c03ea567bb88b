"""One stream in memory: what was said, numbered from 1. One writer; any number of readers.

Owns the records and wakes who waits for more. Where there is a keeper, a record is there to be read once that has
kept it. A reader is a cursor (`streams.reader`): nothing is kept for it here but a future while it waits. A stream that
ended and that nobody reads is folded: its records as bytes, a third of the memory.
"""

from array import array
from asyncio import Future, get_running_loop
from collections.abc import Callable, Sequence

import msgspec

from headrace.streams.record import Dialect, Ending, Failure, Part, Record, Usage

# Records and scores that are folded within a few milliseconds; a stream of more stays as it is.
MAX_FOLDED = 4096
# Of a record, and of a score, as they lie in memory: measured, and rounded up.
RECORD_BYTES = 500
SCORE_BYTES = 160
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Record])


class Stream:
    """`tenant` is the only one that may read it. `fingerprint` names the numerics of the replica that speaks. `keeper`
    is given each record as it is written and says `publish` for each, in that order, at once or later."""

    __slots__ = (
        "_awaiting_end",
        "_ends_bytes",
        "_folded",
        "_unpublished",
        "_waiting",
        "created_s",
        "dialect",
        "ending",
        "fingerprint",
        "id",
        "is_closed",
        "is_moved",
        "keeper",
        "model",
        "records",
        "tenant",
    )

    def __init__(
        self, id: str, tenant: str, dialect: Dialect, *, model: str = "", fingerprint: str = "", created_s: float = 0.0
    ) -> None:
        self.id = id
        self.tenant = tenant
        self.dialect = dialect
        self.model = model
        self.fingerprint = fingerprint
        self.created_s = created_s
        self.records: list[Record] = []
        self.ending: Ending | None = None
        # Bytes of text up to and with each record.
        self._ends_bytes = array("q", (0,))
        self._waiting: list[Future[bool]] = []
        self._awaiting_end: list[Future[bool]] = []
        self._folded: bytes | None = None
        self.keeper: Callable[[Stream, Record], None] | None = None
        self._unpublished: list[Record] = []
        # Its writer has written the ending.
        self.is_closed = False
        # Another gateway speaks for it.
        self.is_moved = False

    @property
    def is_ended(self) -> bool:
        """Its ending is there to be read."""
        return self.ending is not None

    @property
    def text_bytes(self) -> int:
        """Of all that was said: text and arguments of calls, in UTF-8."""
        return self._ends_bytes[-1]

    def bytes_until(self, number: int) -> int:
        """Of all that was said up to and with that record."""
        return self._ends_bytes[number]

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory, but for what all streams take."""
        if self._folded is not None:
            return len(self._folded)
        return len(self.records) * RECORD_BYTES + self.text_bytes + _num_scores(self.records) * SCORE_BYTES

    def bind(self, fingerprint: str) -> None:
        """Who speaks is known, and has said nothing yet or computes the same numbers as who did."""
        if fingerprint != self.fingerprint or not (self.records or self._unpublished):
            self.fingerprint = fingerprint
            self.dialect = self.dialect.bound(self.created_s, fingerprint)

    def append(self, parts: Sequence[Part], *, step: int = 0, age_s: float = 0.0, usage: Usage | None = None) -> None:
        """One record of what a step brought."""
        assert not self.is_closed, f"stream {self.id} has ended"
        self._write(Record(self.num_written + 1, tuple(parts), usage=usage, step=step, age_s=age_s))

    def end(self, ending: Ending, *, age_s: float = 0.0) -> None:
        """The last record."""
        assert not self.is_closed, f"stream {self.id} ends twice"
        self.is_closed = True
        self._write(Record(self.num_written + 1, ending=ending, age_s=age_s))

    def restore(self, records: Sequence[Record]) -> None:
        """What an earlier life of the stream said, or another gateway says of it."""
        for record in records:
            self._add(record)
        self.is_closed = self.is_ended

    @property
    def is_kept(self) -> bool:
        """What it says outlives its gateway."""
        return self.keeper is not None

    @property
    def is_begun(self) -> bool:
        """Its writer has written something."""
        return self.num_written > 0

    @property
    def num_written(self) -> int:
        """Records, with those that are not to be read yet."""
        return len(self.records) + len(self._unpublished)

    def _write(self, record: Record) -> None:
        if self.keeper is None:
            self._add(record)
        else:
            self._unpublished.append(record)
            self.keeper(self, record)

    def publish(self) -> None:
        """The oldest record that waits to be read may be; none waits where it was abandoned."""
        if self._unpublished:
            self._add(self._unpublished.pop(0))

    def abandon(self, failure: Failure) -> None:
        """It goes on elsewhere: here it ends, with nothing kept of that."""
        self.keeper = None
        self._unpublished.clear()
        self.is_closed = self.is_moved = True
        if self.ending is None:  # also where one was written that is not kept
            # It has the number of what was said last: elsewhere the next number is that of another record.
            self._add(Record(len(self.records), ending=Ending(Usage(), failure)))

    def _add(self, record: Record) -> None:
        self.records.append(record)
        self._ends_bytes.append(self._ends_bytes[-1] + (_text_bytes(record.parts) if record.parts else 0))
        if record.ending is not None:
            self.ending = record.ending
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            _tell(waiting)
        if self._awaiting_end and record.ending is not None:
            waiting, self._awaiting_end = self._awaiting_end, []
            _tell(waiting)

    def fold(self) -> None:
        """Nobody reads it, and nothing will follow: keep it small. Until `unfold` it has no records to be read."""
        assert self.ending is not None, f"stream {self.id} has not ended"
        if self._folded is None:
            if len(self.records) + _num_scores(self.records) > MAX_FOLDED:
                return
            try:
                # Copied: what the encoder gives out lies in a piece of memory that was made for more.
                self._folded = bytes(memoryview(_encoder.encode(self.records)))
            except UnicodeEncodeError:  # half a character that no model should say: it stays as it is
                return
        self.records = []
        self._ends_bytes = array("q", (0,))

    def unfold(self) -> None:
        """Somebody reads it again."""
        if self._folded is None or self.records:
            return
        self.records = _decoder.decode(self._folded)
        for record in self.records:
            self._ends_bytes.append(self._ends_bytes[-1] + _text_bytes(record.parts))

    async def ended(self) -> None:
        """Until the last record is there."""
        if self.ending is not None:
            return
        future: Future[bool] = get_running_loop().create_future()
        self.watch(future, ending=True)
        try:
            await future
        finally:
            self.unwatch(future)

    def watch(self, future: "Future[bool]", *, ending: bool = False) -> None:
        """Set it True when there is more; with `ending`, only when the stream has ended."""
        (self._awaiting_end if ending else self._waiting).append(future)

    def unwatch(self, future: "Future[bool]") -> None:
        for waiting in (self._waiting, self._awaiting_end):
            if future in waiting:
                waiting.remove(future)


def _text_bytes(parts: Sequence[Part]) -> int:
    size = 0
    for part in parts:
        text = part.text
        size += len(text) if text.isascii() else len(text.encode(errors="replace"))
        for call in part.calls:
            size += len(call.arguments.encode(errors="replace"))
    return size


def _num_scores(records: Sequence[Record]) -> int:
    """With their alternatives."""
    return sum([1 + len(score.top) for record in records for part in record.parts for score in part.scores])


def _tell(waiting: "list[Future[bool]]") -> None:
    for future in waiting:
        if not future.done():
            future.set_result(True)
