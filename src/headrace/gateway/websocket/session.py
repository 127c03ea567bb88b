"""What one socket asks and hears. Owns which streams are open on it, how many may be, and what is said to a message that
is none of ours. Each request of it is answered by the gateway as any other is; bytes and time are the connection's.
"""

import asyncio

from wsproto.frame_protocol import CloseReason

from headrace.core.errors import HeadraceError, InvalidInput, Refused
from headrace.gateway.context import Context
from headrace.gateway.exchange import Exchange
from headrace.gateway.feed import Feed
from headrace.gateway.websocket.connection import Connection
from headrace.gateway.websocket.exchange import SocketExchange
from headrace.gateway.websocket.messages import Ack, Cancel, Resize, Resume, Start, read, read_about, write_error

MAX_OPEN = 32
# Of streams that are not read here, beside those that are.
MAX_CANCELLING = 8
# Messages that are none of ours: this many close the socket.
MAX_MISUNDERSTOOD = 10
# What only moves a stream is short: to read much of it is work for nothing.
MAX_MOVING_BYTES = 4096


class Session:
    """`opened` is the request that was upgraded. Made with its loop running; `connection` is to be set before anything is
    heard."""

    def __init__(self, opened: Exchange) -> None:
        self._opened = opened
        self._context: Context = opened.context
        self._open: set[SocketExchange] = set()
        self._feeds: dict[str, Feed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_misunderstood = 0
        self._is_draining = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.connection: Connection

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Until the socket is gone, and what it began is over."""
        try:
            await self._over
            while self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            self.connection.abort()
            for task in self._tasks:
                task.cancel()
            raise

    def heard(self, message: bytes, began_s: float) -> None:
        try:
            found = read(message)
            if len(message) > MAX_MOVING_BYTES and not isinstance(found, Start):
                raise InvalidInput("the message is too long for what it says")
        except InvalidInput as error:
            return self._misunderstand(message, error)
        feed = None if isinstance(found, (Start, Resume)) else self._feeds.get(found.stream)
        if isinstance(found, (Ack, Resize)):
            # Where there is none it comes late, of a stream that is over here, which is no fault.
            if feed is not None:
                self._move(feed, found)
        elif isinstance(found, Cancel) and feed is not None:
            feed.cancel()
        else:
            self._begin(found, began_s)

    def flows(self) -> None:
        for feed in tuple(self._feeds.values()):
            feed.wake()

    def lost(self) -> None:
        for exchange in tuple(self._open):
            exchange.presence.lose()
        if not self._over.done():
            self._over.set_result(None)

    def drain(self) -> None:
        """Nothing new is taken on; the socket closes with the last of what is open."""
        self._is_draining = True
        self._leave()

    def _begin(self, asked: Start | Resume | Cancel, began_s: float) -> None:
        """A request of its own, with the key that opened the socket, if that is still one."""
        error = self._obstacle(asked)
        if error is not None:
            name = {"id": asked.id} if isinstance(asked, Start) else {"stream": asked.stream}
            return self.connection.say(write_error(error, **name))
        exchange = SocketExchange(
            asked,
            self.connection,
            self._context,
            self._opened,
            began_s=began_s,
            on_feed=self._feed,
            on_over=self._forget,
        )
        self._open.add(exchange)
        task = asyncio.get_running_loop().create_task(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: SocketExchange) -> None:
        try:
            await self._context.answer(exchange)
        finally:
            self._forget(exchange)

    def _obstacle(self, asked: Start | Resume | Cancel) -> HeadraceError | None:
        if isinstance(asked, Cancel):
            if len(self._open) < MAX_OPEN + MAX_CANCELLING:
                return None
            return Refused("Too much is being cancelled on this socket.", retry_after_s=1.0)
        if len(self._open) >= MAX_OPEN:
            return Refused(f"At most {MAX_OPEN} streams may be open on one socket.", retry_after_s=1.0)
        if isinstance(asked, Resume):
            coming = [other.asked.stream for other in self._open if isinstance(other.asked, Resume)]
            if asked.stream in self._feeds or asked.stream in coming:
                return InvalidInput("This stream is open on this socket already.", param="stream")
        return None

    def _feed(self, stream_id: str, feed: Feed) -> None:
        self._feeds[stream_id] = feed

    def _forget(self, exchange: SocketExchange) -> None:
        """Nothing follows of it here."""
        if exchange not in self._open:
            return
        self._open.discard(exchange)
        for stream_id in [stream_id for stream_id, feed in self._feeds.items() if feed is exchange.feed]:
            del self._feeds[stream_id]
        self._leave()

    def _leave(self) -> None:
        if self._is_draining and not self._open:
            self.connection.close(CloseReason.GOING_AWAY, "The server is shutting down.")

    def _move(self, feed: Feed, found: Ack | Resize) -> None:
        if isinstance(found, Resize):
            return feed.resize(found.size)
        try:
            feed.ack(found.seq)
        except InvalidInput as error:
            self.connection.say(write_error(error, stream=found.stream))

    def _misunderstand(self, message: bytes, error: InvalidInput) -> None:
        id, stream_id = read_about(message)
        self.connection.say(write_error(error, id=id, stream=stream_id))
        self._num_misunderstood += 1
        if self._num_misunderstood >= MAX_MISUNDERSTOOD:
            self.connection.close(CloseReason.POLICY_VIOLATION, "Too many messages that are not understood.")
