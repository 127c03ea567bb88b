"""A stream as server-sent events, to one reader. Owns when bytes are written, and how long that reader may lag.

Frames are the dialect's, the last one with its `[DONE]` as well; the journal keeps what was not sent. Every record is a
frame of its own, however many are written at once, so that the bytes do not depend on when they were read; only a
reader that lags gets records merged. The status line waits for the first frame, so that what fails before it is an
answer with a status of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from headrace.core.stages import Stage, StageClock
from headrace.gateway.context import Context
from headrace.gateway.errors import StreamFailed
from headrace.gateway.peer import Peer, Send
from headrace.gateway.telling import UNREAD, Telling
from headrace.streams.audience import Audience
from headrace.streams.reader import merge
from headrace.streams.record import Ending, Failure, Record, Usage

PING = b": ping\n\n"
# A reader lags when more records than this came while one write waited for it: it gets what it missed as one frame.
MAX_MISSED = 8
# Frames of a write, of which a reader that comes late finds many. A plain one takes a microsecond or two to word.
MAX_FRAMES_PER_WRITE = 256
# Records that become one frame.
MAX_MERGED = 4096
# How long an error frame may take to leave before the connection is cut.
LAST_WORDS_S = 2.0


class Sender(Telling):
    __slots__ = ("_abort", "_failed_s", "_is_lagging", "_is_started", "_send", "_start", "_writing_s", "_wrote_s")

    def __init__(
        self,
        audience: Audience,
        stages: StageClock,
        context: Context,
        peer: Peer,
        send: Send,
        *,
        start: Callable[[], Awaitable[None]],
        abort: Callable[[], None],
        after: int = 0,
        is_opening: bool = True,
        is_scored: bool = False,
    ) -> None:
        """`start` sends the status line and headers, `abort` cuts the connection."""
        super().__init__(audience, stages, context, peer, after=after, is_opening=is_opening, is_scored=is_scored)
        self._send = send
        self._start = start
        self._abort = abort
        self._is_started = False
        self._failed_s = 0.0
        # Whether the last write waited while much was said.
        self._is_lagging = False
        self._wrote_s = context.clock.now_s()
        # Since when a write waits for the client to take what it was sent before.
        self._writing_s: float | None = None

    @property
    def is_done(self) -> bool:
        """There is nothing to be sent, and there will be nothing."""
        return self._reader.is_done

    @property
    def _has_begun(self) -> bool:
        return self._is_started

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            # Both are of the exchange that holds this: a cycle would keep all of the request until a collection.
            del self._start, self._abort

    async def _pump(self) -> None:
        reader, peer, stream = self._reader, self._peer, self._stream
        while True:
            if peer.gone_s is not None:
                return
            if self._failure is not None and (stream.ending is None or stream.ending.failure is not None):
                return await self._end_with(self._failure)
            records = reader.take(MAX_MERGED if self._is_lagging else MAX_FRAMES_PER_WRITE)
            if records:
                await self._write_records(records)
                if reader.is_done:
                    return
            elif self._context.clock.now_s() - self._wrote_s >= self._context.config.heartbeat_s:
                await self._write(PING)
            else:
                await peer.wait(stream)

    async def _write_records(self, records: list[Record]) -> None:
        coalesce_s = self._context.config.coalesce_s
        if coalesce_s > 0.0:
            records = await self._gather(records, coalesce_s)
        is_last = records[-1].ending is not None
        data = await self._word(self._worded, records)
        if is_last:
            await self._wait_for_client(records)
        elif self.first_s is None:
            await self._write(data)
            self.first_s = self._wrote_s
            return
        await self._write(data, more=not is_last)
        if not is_last or len(records) > 1:
            self.last_s = self._wrote_s
            self.first_s = self.first_s or self._wrote_s

    def _worded(self, records: list[Record]) -> bytes:
        """Frames of their own, or one where the reader lags or all are gathered; the ending always is one."""
        frame = self._stream.dialect.frame
        if len(records) == 1:
            return frame(records[0])
        if not self._is_lagging and self._context.config.coalesce_s <= 0.0:
            return b"".join([frame(record) for record in records])
        if records[-1].ending is None:
            return frame(merge(records))
        return frame(merge(records[:-1])) + frame(records[-1])

    async def _gather(self, records: list[Record], coalesce_s: float) -> list[Record]:
        """What comes until the interval since the last write is over; the first and the last frame do not wait."""
        left_s = coalesce_s - (self._context.clock.now_s() - self._wrote_s)
        if self.first_s is None or left_s <= 0.0 or records[-1].ending is not None:
            return records
        await asyncio.sleep(left_s)
        return records + self._reader.take()

    async def _wait_for_client(self, records: list[Record]) -> None:
        ending = records[-1].ending
        assert ending is not None
        self._enter_client()
        if ending.failure is not None and len(self._stream.records) == 1 and not self._is_started:
            raise StreamFailed(ending.failure)
        if self._context.inject:
            await self._context.delay(Stage.CLIENT)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        self._writing_s = self._context.clock.now_s()
        num_said = len(self._stream.records)
        if not self._is_started:
            self._is_started = True
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_lagging = len(self._stream.records) - num_said > MAX_MISSED
        self._writing_s = None
        self._wrote_s = self._context.clock.now_s()

    async def _end_with(self, failure: Failure) -> None:
        self._enter_client()
        if not self._is_started:
            raise StreamFailed(failure)
        ending = replace(self._stream.ending or Ending(Usage()), failure=failure)
        frame = self._stream.dialect.frame(Record(self._reader.cursor, ending=ending))
        await self._write(frame, more=False)

    def tick(self, now_s: float) -> None:
        """Heartbeats as well. A reader that does not take what it is sent is cut off alone; the stream goes on if there
        are others."""
        config, writing_s = self._context.config, self._writing_s
        if self._failure is not None:
            if now_s - self._failed_s > LAST_WORDS_S:
                self._abort()
            return
        is_stuck = writing_s is not None and now_s - writing_s > config.max_unread_s
        if is_stuck or self._is_behind_too_long(now_s):
            self._break_off(UNREAD, now_s)
            self._audience.expel(self._reader, UNREAD.code, now_s)
        if now_s - self._wrote_s >= config.heartbeat_s:
            self._peer.wake()

    def fail(self, failure: Failure) -> None:
        """Where the client does not take it, the connection is cut soon after."""
        if self._failure is None:
            self._break_off(failure, self._context.clock.now_s())
            self._audience.cancel(failure.code)

    def _break_off(self, failure: Failure, now_s: float) -> None:
        self._failure = failure
        self._failed_s = now_s
        self._peer.wake()
