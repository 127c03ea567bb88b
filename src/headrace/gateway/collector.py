"""A stream that is answered whole: waits for its end, or for the client to leave. Owns the wait."""

import asyncio

from headrace.core.stages import Stage, StageClock
from headrace.gateway.context import Context, StreamOwner
from headrace.gateway.errors import StreamFailed
from headrace.gateway.peer import ClientGone, Peer
from headrace.streams.record import Failure, Record
from headrace.streams.stream import Stream


class Collector:
    __slots__ = ("_context", "_failure", "_grace_s", "_peer", "_service", "_stages", "_stream")

    def __init__(self, stream: Stream, stages: StageClock, context: Context, peer: Peer, *, grace_s: float) -> None:
        self._stream = stream
        self._stages = stages
        self._context = context
        self._service: StreamOwner = context.service
        self._peer = peer
        self._grace_s = grace_s
        self._failure: Failure | None = None

    @property
    def stream(self) -> Stream:
        return self._stream

    async def run(self) -> list[Record]:
        """All records. StreamFailed where the stream broke, ClientGone where nobody waits for it any more."""
        self._context.pulse.add(self)
        try:
            await self._wait()
        except asyncio.CancelledError:
            self._service.cancel(self._stream, "cancelled")
            raise
        finally:
            self._context.pulse.discard(self)
        self._stages.enter(Stage.CLIENT, self._context.clock.now_s())
        ending = self._stream.ending
        failure = self._failure or (ending.failure if ending is not None else None)
        if failure is not None:
            raise StreamFailed(failure)
        await self._context.delay(Stage.CLIENT)
        return self._stream.records

    async def _wait(self) -> None:
        stream, peer = self._stream, self._peer
        while not stream.is_ended and self._failure is None:
            if peer.gone_s is not None and self._context.clock.now_s() - peer.gone_s >= self._grace_s:
                self._service.cancel(stream, "disconnected")
                raise ClientGone
            await peer.wait(stream, ending=True)

    def tick(self, now_s: float) -> None:
        if self._peer.gone_s is not None:
            self._peer.wake()

    def fail(self, failure: Failure) -> None:
        if self._failure is None and not self._stream.is_ended:
            self._failure = failure
            self._service.cancel(self._stream, failure.code)
            self._peer.wake()
