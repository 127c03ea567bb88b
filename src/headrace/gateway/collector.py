"""A stream that is answered whole: waits for its end, or for the client to leave. Owns the wait."""

import asyncio

from headrace.gateway.context import Context, StreamOwner
from headrace.gateway.errors import StreamFailed
from headrace.gateway.peer import ClientGone, Peer
from headrace.streams.record import Failure
from headrace.streams.stream import Stream


class Collector:
    __slots__ = ("_context", "_failure", "_grace_s", "_peer", "_service", "_stream")

    def __init__(self, stream: Stream, context: Context, peer: Peer, *, grace_s: float) -> None:
        self._stream = stream
        self._context = context
        self._service: StreamOwner = context.service
        self._peer = peer
        self._grace_s = grace_s
        self._failure: Failure | None = None

    @property
    def stream(self) -> Stream:
        return self._stream

    async def run(self) -> None:
        """Until it has ended. StreamFailed where it need not be waited for, ClientGone where nobody does any more."""
        self._context.pulse.add(self)
        try:
            await self._wait()
        except asyncio.CancelledError:
            self._service.cancel(self._stream, "cancelled")
            raise
        finally:
            self._context.pulse.discard(self)
        if self._failure is not None:
            raise StreamFailed(self._failure)

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
