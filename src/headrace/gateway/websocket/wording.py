"""A stream as messages over a socket: the same JSON as in server-sent events, always with `headrace` in it. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from headrace.gateway.dialects.chat import ChatDialect
from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.dialects.envelope import chunk_of
from headrace.gateway.websocket.messages import frame_head, write_end, write_frame
from headrace.streams.record import Dialect, Failure, Record
from headrace.streams.stream import Stream


class SocketWording:
    __slots__ = ("_frame", "_head", "_id")

    def __init__(self, stream: Stream) -> None:
        self._id = stream.id
        self._head = frame_head(stream.id)
        self._frame = told_more(stream.dialect).frame

    def frames(self, records: Sequence[Record]) -> list[tuple[int, bytes]]:
        frame, head = self._frame, self._head
        worded = [(record.number, frame(record)) for record in records if record.ending is None]
        return [(number, write_frame(head, number, chunk_of(data))) for number, data in worded if data]

    def end(self, record: Record, failure: Failure | None = None) -> bytes:
        return write_end(self._id, record, failure)


def told_more(dialect: Dialect) -> Dialect:
    """The same dialect, with `headrace` in every chunk, whether the client that opened the stream asked for it or not."""
    if isinstance(dialect, (ChatDialect, CompletionDialect)):
        return type(dialect)(dialect.heading, replace(dialect.wants, metadata=True), dialect.num_choices)
    return dialect
