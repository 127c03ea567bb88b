"""The journal of one stream, in memory: what was said, numbered from 1. One writer; any number of readers.

Owns the records and wakes who waits for more. A reader is a cursor (`streams.reader`): nothing is kept for it here
but a future while it waits.
"""

from asyncio import Future
from collections.abc import Sequence

from headrace.streams.record import Dialect, Ending, Part, Record, Usage


class Stream:
    """`tenant` is the only one that may read it. `fingerprint` names the numerics of the replica that speaks."""

    __slots__ = (
        "_awaiting_end",
        "_ends_bytes",
        "_waiting",
        "created_s",
        "dialect",
        "ending",
        "fingerprint",
        "id",
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
        self._ends_bytes: list[int] = [0]
        self._waiting: list[Future[bool]] = []
        self._awaiting_end: list[Future[bool]] = []

    @property
    def is_ended(self) -> bool:
        return self.ending is not None

    @property
    def text_bytes(self) -> int:
        """Of all that was said: text and arguments of calls, in UTF-8."""
        return self._ends_bytes[-1]

    def bytes_until(self, number: int) -> int:
        """Of all that was said up to and with that record."""
        return self._ends_bytes[number]

    def append(self, parts: Sequence[Part], *, step: int = 0, age_s: float = 0.0, usage: Usage | None = None) -> None:
        """One record of what a step brought."""
        assert self.ending is None, f"stream {self.id} has ended"
        size = 0
        for part in parts:
            text = part.text
            size += len(text) if text.isascii() else len(text.encode(errors="replace"))
            for call in part.calls:
                size += len(call.arguments.encode(errors="replace"))
        self._add(Record(len(self.records) + 1, tuple(parts), usage=usage, step=step, age_s=age_s), size)

    def end(self, ending: Ending, *, age_s: float = 0.0) -> None:
        """The last record."""
        assert self.ending is None, f"stream {self.id} ends twice"
        self.ending = ending
        self._add(Record(len(self.records) + 1, ending=ending, age_s=age_s), 0)

    def _add(self, record: Record, size: int) -> None:
        self.records.append(record)
        self._ends_bytes.append(self._ends_bytes[-1] + size)
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            _tell(waiting)
        if self._awaiting_end and record.ending is not None:
            waiting, self._awaiting_end = self._awaiting_end, []
            _tell(waiting)

    def watch(self, future: "Future[bool]", *, ending: bool = False) -> None:
        """Set it True when there is more; with `ending`, only when the stream has ended."""
        (self._awaiting_end if ending else self._waiting).append(future)

    def unwatch(self, future: "Future[bool]") -> None:
        for waiting in (self._waiting, self._awaiting_end):
            if future in waiting:
                waiting.remove(future)


def _tell(waiting: "list[Future[bool]]") -> None:
    for future in waiting:
        if not future.done():
            future.set_result(True)
