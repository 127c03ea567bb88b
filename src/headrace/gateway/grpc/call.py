"""One call: the line over which its chunks leave, what the client says meanwhile, and the status it ends with.

Owns when a client that takes nothing is cut off. What is asked is answered by the gateway as any other request; that
answer may outlive the call, for a stream does.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import ClassVar

from grpc.aio import EOF, ServicerContext

from headrace.core.errors import HeadraceError, InvalidInput
from headrace.gateway.context import Context
from headrace.gateway.credit import Credit
from headrace.gateway.errors import failure_of
from headrace.gateway.fed import Asked, FedExchange
from headrace.gateway.feed import Feed
from headrace.gateway.grpc.asking import Said, read, read_ack, read_size
from headrace.gateway.grpc.status import Metadata, code_of, trailer_of
from headrace.gateway.grpc.wording import ChunkWording
from headrace.gateway.websocket.messages import Resume, Start
from headrace.streams.record import Failure
from headrace.streams.stream import Stream

SERVICE = "headrace.v1.Inference"
# How long a client that is broken off may take to be told so.
LAST_WORDS_S = 2.0
# Messages that come in over one connection, whatever number of calls it has: so many at once, and so many a second.
# Beyond that they wait at the client.
BURST_MESSAGES = 128
MESSAGES_PER_S = 2000.0
REST_S = BURST_MESSAGES / 2 / MESSAGES_PER_S


class Call:
    """A line (`gateway.feed.Line`): writable while nothing waits to be taken by the transport."""

    def __init__(self, rpc: ServicerContext, context: Context, kind: type[Said], credit: Credit) -> None:
        self._rpc = rpc
        self._credit = credit
        self._context = context
        self._kind = kind
        self._waiting: deque[bytes] = deque()
        self._is_writing = False
        self._is_named = False
        self._more = asyncio.Event()
        self._over = asyncio.Event()
        self._fed = asyncio.Event()
        self._feed: Feed | None = None
        self._exchange: CallExchange | None = None
        # The stream that is read, and what the call ends with if not well.
        self._stream_id = ""
        self._failure: Failure | None = None
        self.is_open = True

    @property
    def is_writable(self) -> bool:
        return self.is_open and not self._waiting and not self._is_writing

    def say(self, *messages: bytes) -> None:
        if self.is_open:
            self._waiting.extend(messages)
            self._more.set()

    def feed(self, stream: Stream, feed: Feed) -> None:
        """From here on the client may move the window."""
        self._stream_id = stream.id
        self._feed = feed if self.is_open else None
        self._fed.set()
        self._more.set()

    def close(self, failure: Failure | None = None) -> None:
        """Nothing follows. To say so twice is once."""
        if not self._over.is_set():
            self._failure = failure
            self._over.set()
            self._more.set()

    async def run(self, exchange: "CallExchange") -> None:
        """Until the last chunk was taken and the status is said. `exchange` is being answered."""
        self._exchange = exchange
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._listen())]
        try:
            await self._over.wait()
            left_s = self._context.config.max_unread_s if self._failure is None else LAST_WORDS_S
            taken, _ = await asyncio.wait(tasks[:1], timeout=left_s)
            if not taken:
                # No status can pass what waits before it: the transport is to reset the stream.
                raise asyncio.CancelledError
        finally:
            self._lose()
            for task in tasks:
                task.cancel()
            # Both hold this in turn: a cycle would keep all of the call, and its stream, until a collection.
            self._exchange = self._feed = None
            await asyncio.gather(*tasks, return_exceptions=True)
        self._end(self._stream_id or exchange.request_id)

    def _end(self, request_id: str) -> None:
        """Not by `abort`: what that raises is kept by the call, with all that it was raised through."""
        trailer: Metadata = (("x-request-id", request_id),)
        failure = self._failure
        if failure is not None:
            self._rpc.set_code(code_of(failure))
            self._rpc.set_details(failure.message)
            trailer += trailer_of(failure)
        self._rpc.set_trailing_metadata(trailer)

    def _lose(self) -> None:
        """The client is gone, or is listened to no more."""
        self.is_open = False
        if self._exchange is not None:
            self._exchange.presence.lose()

    async def _write(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            self._is_writing = True
            if self._stream_id and not self._is_named:
                self._is_named = True
                await self._rpc.send_initial_metadata((("x-request-id", self._stream_id),))
            while self._waiting:
                await self._rpc.write(self._waiting.popleft())
            self._is_writing = False
            if self._over.is_set():
                return
            if self._feed is not None:
                self._feed.wake()

    async def _listen(self) -> None:
        """Until the client has said all. One that says what it may not is broken off; its stream can be resumed."""
        try:
            while (data := await self._rpc.read()) is not EOF:
                said = read(data, self._kind)
                await self._fed.wait()
                self._hear(said)
                await self._rest()
        except HeadraceError as error:
            self.close(failure_of(error))
            self._lose()

    async def _rest(self) -> None:
        """Until the connection has credit for what comes next."""
        now_s = self._context.clock.now_s
        self._credit.earn(now_s())
        self._credit.spend()
        while self._credit.is_spent:
            await asyncio.sleep(REST_S)
            self._credit.earn(now_s())

    def _hear(self, said: Said) -> None:
        feed = self._feed
        assert feed is not None
        match said.WhichOneof("message"):
            case "cancel":
                feed.cancel()
            case "ack":
                feed.ack(read_ack(said))
            case "window":
                feed.resize(read_size(said))
            case _:
                raise InvalidInput("A call is for one stream: say ack, window or cancel now.")


class CallExchange(FedExchange):
    """What a call asks for. Its end is the call's end."""

    __slots__ = ("_call", "_wording")
    path = f"/{SERVICE}"
    words: ClassVar[Mapping[type[Asked], str]] = {Start: "PREDICT", Resume: "RESUME"}

    def __init__(
        self,
        asked: Start | Resume,
        call: Call,
        context: Context,
        headers: Mapping[str, str],
        address: str,
        *,
        began_s: float,
    ) -> None:
        self._call = call
        self._wording: ChunkWording | None = None
        super().__init__(asked, call, context, headers, address, began_s=began_s)

    def wording(self, stream: Stream) -> ChunkWording:
        self._wording = ChunkWording(stream)
        return self._wording

    def fed(self, stream: Stream, feed: Feed) -> None:
        self._call.feed(stream, feed)

    def refused(self, error: BaseException) -> None:
        self._call.close(failure_of(error))

    def over(self) -> None:
        self._call.close(None if self._wording is None else self._wording.failure)
