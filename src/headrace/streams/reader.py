"""A reader of a stream: a cursor into its journal. Owns the cursor and, while it waits, one future."""

import asyncio
from collections.abc import Sequence

from headrace.core.errors import InvalidInput
from headrace.streams.record import CallDelta, Part, Record
from headrace.streams.stream import Stream


class Reader:
    """Begins behind record `after`. Many may read one stream, each at its own pace."""

    __slots__ = ("_stream", "cursor", "is_held")

    def __init__(self, stream: Stream, after: int = 0) -> None:
        if not 0 <= after <= len(stream.records):
            raise InvalidInput(f"This stream has no frame {after} yet.", param="after")
        self._stream = stream
        self.cursor = after
        # Whoever it reads for lets it wait, however little is unread.
        self.is_held = False

    @property
    def is_done(self) -> bool:
        """The ending was read: nothing will follow."""
        return self._stream.ending is not None and self.cursor == len(self._stream.records)

    @property
    def unread_bytes(self) -> int:
        """Text that was said and not yet taken here."""
        stream = self._stream
        return stream.text_bytes - stream.bytes_until(self.cursor)

    def take(self, most: int | None = None) -> list[Record]:
        """What there is behind the cursor, all or the first `most`; the cursor moves past it. May be nothing."""
        cursor = self.cursor
        found = self._stream.records[cursor : None if most is None else cursor + most]
        self.cursor += len(found)
        return found

    async def next(self) -> list[Record]:
        """All there is behind the cursor, at least one; not to be asked once `is_done`."""
        await self.wait()
        return self.take()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until there is something to take: True; False when the time was up before."""
        stream = self._stream
        if self.cursor < len(stream.records):
            return True
        assert stream.ending is None, "a reader waits behind the ending"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        stream.watch(future)
        if timeout_s is None:
            try:
                return await future
            finally:
                stream.unwatch(future)
        timer = loop.call_later(timeout_s, _expire, future)
        try:
            return await future
        finally:
            timer.cancel()
            stream.unwatch(future)


def _expire(future: "asyncio.Future[bool]") -> None:
    if not future.done():
        future.set_result(False)


def merge(records: Sequence[Record]) -> Record:
    """Neighbouring records as one frame, with the last one's number: for a reader that lags."""
    if len(records) == 1:
        return records[0]
    by_choice: dict[tuple[int, bool], list[Part]] = {}
    for record in records:
        for part in record.parts:
            by_choice.setdefault((part.choice, part.is_prompt), []).append(part)
    last = records[-1]
    return Record(
        last.number,
        tuple(map(_join, by_choice.values())),
        last.ending,
        merged=len(records) - 1 + sum(record.merged for record in records),
        usage=next((record.usage for record in reversed(records) if record.usage is not None), None),
        step=last.step,
        age_s=last.age_s,
    )


def _join(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    return Part(
        parts[0].choice,
        tuple(token for part in parts for token in part.ids),
        "".join([part.text for part in parts]),
        tuple(score for part in parts for score in part.scores),
        join_calls([call for part in parts for call in part.calls]),
        parts[-1].finish,
        parts[0].index,
        parts[0].offset,
        parts[0].is_prompt,
        parts[0].cached,
    )


def join_calls(calls: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Fragments of one call become one; its id and name are in the first."""
    by_index: dict[int, list[CallDelta]] = {}
    for call in calls:
        by_index.setdefault(call.index, []).append(call)
    return tuple(
        CallDelta(
            index,
            deltas[0].id,
            deltas[0].name,
            "".join([delta.arguments for delta in deltas]),
            deltas[-1].broken_text,
            deltas[-1].place,
        )
        for index, deltas in by_index.items()
    )
