"""A stream as server-sent events. Owns when bytes are written, and what happens when nobody reads them.

Frames are the dialect's, the last one with its `[DONE]` as well; the journal keeps what was not sent. The status line
waits for the first frame, so that what fails before it is an answer with a status of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from headrace.core.stages import Stage, StageClock
from headrace.gateway.context import Context, StreamOwner
from headrace.gateway.errors import StreamFailed, failure_of
from headrace.gateway.peer import Peer, Send
from headrace.streams.reader import Reader, merge
from headrace.streams.record import Ending, Failure, Record, Usage
from headrace.streams.stream import Stream

PING = b": ping\n\n"
# A reader that finds more records than this at once lags: it gets them as one frame.
MAX_FRAMES_PER_WRITE = 8
# Scores, each with its alternatives, that are worded within a millisecond or two; more are in a thread.
LARGE_FRAME = 1000
# How long an error frame may take to leave before the connection is cut.
LAST_WORDS_S = 2.0
UNREAD = Failure("client_too_slow", "The client did not read its stream in time.", 408)


class Sender:
    __slots__ = (
        "_abort", "_context", "_failed_s", "_failure", "_grace_s", "_is_scored", "_is_started", "_paused_s", "_peer", "_reader",
        "_send", "_service", "_stages", "_start", "_stream", "_writing_s", "_wrote_s", "first_s", "last_s",
    )  # fmt: skip

    def __init__(
        self,
        stream: Stream,
        stages: StageClock,
        context: Context,
        peer: Peer,
        send: Send,
        *,
        start: Callable[[], Awaitable[None]],
        abort: Callable[[], None],
        grace_s: float,
        is_scored: bool = False,
    ) -> None:
        """`start` sends the status line and headers, `abort` cuts the connection."""
        self._stream = stream
        self._stages = stages
        self._context = context
        self._service: StreamOwner = context.service
        self._peer = peer
        self._send = send
        self._start = start
        self._abort = abort
        self._grace_s = grace_s
        self._is_scored = is_scored
        self._reader = Reader(stream)
        self._is_started = False
        self._failure: Failure | None = None
        self._failed_s = 0.0
        self._paused_s: float | None = None
        self._wrote_s = context.clock.now_s()
        # Since when a write waits for the client to take what it was sent before.
        self._writing_s: float | None = None
        # When the first and the last of what the model said was taken by the transport.
        self.first_s: float | None = None
        self.last_s: float | None = None

    async def run(self) -> None:
        """Until the terminal frame was taken by the transport, or nobody is there to take it."""
        self._context.pulse.add(self)
        try:
            await self._pump()
        except StreamFailed:
            raise
        except Exception as error:
            self._service.cancel(self._stream, "internal_error")
            if not self._is_started:
                raise
            await self._end_with(failure_of(error))
            raise
        except asyncio.CancelledError:
            self._service.cancel(self._stream, "cancelled")
            raise
        finally:
            self._context.pulse.discard(self)

    async def _pump(self) -> None:
        reader, peer, stream = self._reader, self._peer, self._stream
        while True:
            if peer.gone_s is not None:
                return await self._outlive(peer.gone_s)
            if self._failure is not None and (stream.ending is None or stream.ending.failure is not None):
                return await self._end_with(self._failure)
            records = reader.take()
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
        if self._is_scored and _num_scores(records) > LARGE_FRAME:
            data = await self._context.beside(self._worded, records)
        else:
            data = self._worded(records)
        if is_last:
            await self._enter_client(records)
        elif self.first_s is None:
            await self._write(data)
            self.first_s = self._wrote_s
            return
        await self._write(data, more=not is_last)
        if not is_last or len(records) > 1:
            self.last_s = self._wrote_s
            self.first_s = self.first_s or self._wrote_s

    def _worded(self, records: list[Record]) -> bytes:
        """Frames of their own, or one where the reader lags; the ending always is one."""
        frame = self._stream.dialect.frame
        if len(records) == 1:
            return frame(records[0])
        if len(records) <= MAX_FRAMES_PER_WRITE and self._context.config.coalesce_s <= 0.0:
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

    async def _enter_client(self, records: list[Record]) -> None:
        ending = records[-1].ending
        assert ending is not None
        self._stages.enter(Stage.CLIENT, self._context.clock.now_s())
        if ending.failure is not None and not self._is_started and len(records) == 1:
            raise StreamFailed(ending.failure)
        await self._context.delay(Stage.CLIENT)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        self._writing_s = self._context.clock.now_s()
        if not self._is_started:
            self._is_started = True
            await self._start()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing_s = None
        self._wrote_s = self._context.clock.now_s()

    async def _end_with(self, failure: Failure) -> None:
        """The terminal frame of a stream that this end broke off: the journal's ending with its number, in the words
        of the cause. What was not read before it is left out."""
        self._stages.enter(Stage.CLIENT, self._context.clock.now_s())
        if not self._is_started:
            raise StreamFailed(failure)
        records = self._stream.records
        ended = records[-1] if self._stream.is_ended else Record(len(records) + 1)
        ending = replace(ended.ending or Ending(Usage()), failure=failure)
        await self._write(self._stream.dialect.frame(replace(ended, ending=ending)), more=False)

    async def _outlive(self, gone_s: float) -> None:
        """Nobody reads any more: the stream goes on for its grace, then it is cancelled."""
        stream, context = self._stream, self._context
        while not stream.is_ended:
            if context.clock.now_s() - gone_s >= self._grace_s or self._failure is not None:
                self._service.cancel(stream, "disconnected")
                return
            await self._peer.wait(stream, ending=True)

    def tick(self, now_s: float) -> None:
        """Heartbeats, grace, and the bound on what was not read; called while `run` waits or writes."""
        if self._failure is not None:
            if now_s - self._failed_s > LAST_WORDS_S:
                self._abort()
        elif self._peer.gone_s is not None:
            self._peer.wake()
        else:
            self._bound_unread(now_s)
            if now_s - self._wrote_s >= self._context.config.heartbeat_s:
                self._peer.wake()

    def _bound_unread(self, now_s: float) -> None:
        config = self._context.config
        if self._writing_s is not None and now_s - self._writing_s > config.max_unread_s:
            return self.fail(UNREAD)
        unread_bytes = self._reader.unread_bytes
        if self._paused_s is None:
            if unread_bytes > config.max_unread_bytes:
                self._paused_s = now_s
                self._service.pause(self._stream)
        elif unread_bytes <= config.max_unread_bytes // 2:
            self._paused_s = None
            self._service.resume(self._stream)
        elif now_s - self._paused_s > config.max_unread_s:
            self.fail(UNREAD)

    def fail(self, failure: Failure) -> None:
        """End with this. Where the client does not take it, the connection is cut soon after."""
        if self._failure is None:
            self._failure = failure
            self._failed_s = self._context.clock.now_s()
            self._service.cancel(self._stream, failure.code)
            self._peer.wake()


def _num_scores(records: list[Record]) -> int:
    return sum(
        len(part.scores) * (1 + len(part.scores[-1].top)) for record in records for part in record.parts if part.scores
    )
