"""One request that came over a socket: how it is known to the socket's session, and what is said of it there."""

from collections.abc import Callable, Mapping
from typing import ClassVar

from headrace.gateway.context import Context
from headrace.gateway.exchange import Exchange
from headrace.gateway.fed import Asked, FedExchange
from headrace.gateway.feed import Feed, Line
from headrace.gateway.websocket.handshake import PATH
from headrace.gateway.websocket.messages import Cancel, Resume, Start, write_error, write_started
from headrace.gateway.websocket.wording import SocketWording
from headrace.streams.stream import Stream

# Of the request that opened the socket: what is checked of every request, so also of each that it carries.
_OPENING = frozenset({"host", "origin", "authorization", "x-api-key"})


class SocketExchange(FedExchange):
    """`on_feed` is told when frames begin to be said, `on_over` when nothing follows on the socket."""

    __slots__ = ("_on_feed", "_on_over")
    path = PATH
    words: ClassVar[Mapping[type[Asked], str]] = {Start: "START", Resume: "RESUME", Cancel: "CANCEL"}

    def __init__(
        self,
        asked: Asked,
        line: Line,
        context: Context,
        opened: Exchange,
        *,
        began_s: float,
        on_feed: Callable[[str, Feed], None],
        on_over: Callable[["SocketExchange"], None],
    ) -> None:
        """`opened` is the request that opened the socket: whose key it had may ask."""
        self._on_feed = on_feed
        self._on_over = on_over
        headers = {name: value for name, value in opened.headers.items() if name in _OPENING}
        super().__init__(asked, line, context, headers, opened.peer_address, began_s=began_s)

    def wording(self, stream: Stream) -> SocketWording:
        return SocketWording(stream)

    def started(self, stream: Stream) -> None:
        assert isinstance(self.asked, Start)
        self._line.say(write_started(self.asked.id, stream.id, stream.model))

    def fed(self, stream: Stream, feed: Feed) -> None:
        self._on_feed(stream.id, feed)

    def refused(self, error: BaseException) -> None:
        if isinstance(self.asked, Start):
            self._line.say(write_error(error, id=self.asked.id))
        else:
            self._line.say(write_error(error, stream=self.asked.stream))

    def over(self) -> None:
        self._on_over(self)
