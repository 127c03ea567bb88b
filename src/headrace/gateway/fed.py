"""A request whose answer is said frame by frame over a line, of which the client moves the window. To everything behind
the gateway's door it is a request like any other: routed, admitted, counted and logged as those of HTTP. Owns how it
differs: its body came in a message, its frames leave as messages.

What is said, and over what, is its face's matter: the socket's, or gRPC's.
"""

import asyncio
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, ClassVar, TypeVar

import msgspec

from headrace.core.stages import Stage
from headrace.gateway.context import Context
from headrace.gateway.errors import failure_of
from headrace.gateway.exchange import Exchange
from headrace.gateway.feed import Feed, Line, Wording
from headrace.gateway.peer import Receive
from headrace.gateway.schemas.sampling import GenerationFields
from headrace.gateway.websocket.messages import Cancel, Resume, Start
from headrace.streams.audience import Audience
from headrace.streams.stream import Stream

T = TypeVar("T")
Asked = Start | Resume | Cancel
_APIS: Mapping[str, bytes] = {"chat": b"/v1/chat/completions", "completions": b"/v1/completions"}
_NOTHING: Mapping[str, str] = {}


class Presence:
    """Whether the line of a request is there: what is to be called when it is lost."""

    __slots__ = ("_line", "_on_lost")

    def __init__(self, line: Line) -> None:
        self._line = line
        self._on_lost: Callable[[], None] | None = None

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """At once where it is lost already; None: nobody asks any more."""
        self._on_lost = on_lost
        if on_lost is not None and not self._line.is_open:
            on_lost()

    def lose(self) -> None:
        if self._on_lost is not None:
            self._on_lost()


class FedExchange(Exchange):
    """`headers` are those that are checked of every request: who asks, and by which name."""

    __slots__ = ("_line", "asked", "feed", "presence")
    # What it is known as in the books, once it was routed as what it asks for: a path, and a word for each kind.
    path: ClassVar[str]
    words: ClassVar[Mapping[type[Asked], str]]

    def __init__(
        self,
        asked: Asked,
        line: Line,
        context: Context,
        headers: Mapping[str, str],
        address: str,
        *,
        began_s: float,
    ) -> None:
        self._line = line
        self.presence = Presence(line)
        self.feed: Feed | None = None
        scope: dict[str, Any] = {"client": (address, 0), "state": {"watch": self.presence.watch}}
        body = b""
        if isinstance(asked, Start):
            headers = {**headers, "content-type": "application/json", **asked.headers}
            scope |= {"method": "POST", "raw_path": _APIS[asked.api]}
            body, asked = bytes(asked.body), msgspec.structs.replace(asked, body=msgspec.Raw())
        else:
            scope["raw_path"] = b"/v1/streams/" + asked.stream.encode()
            if isinstance(asked, Resume):
                scope |= {"method": "GET", "query_string": b"after=%d" % asked.after}
            else:
                scope["method"] = "DELETE"
        # Without its body, which may be large and is needed once.
        self.asked = asked
        # The id is given where those of all requests are.
        super().__init__(scope, _once(body), _unsent, context, headers, request_id="", began_s=began_s)
        self.stages.enter(Stage.AUTHENTICATE, context.clock.now_s())

    def wording(self, stream: Stream) -> Wording:
        raise NotImplementedError

    def started(self, stream: Stream) -> None:
        """It has a stream of its own. Nothing was said of that yet."""

    def fed(self, stream: Stream, feed: Feed) -> None:
        """Frames begin to be said."""

    def refused(self, error: BaseException) -> None:
        """It has no stream, and will have none."""

    def over(self) -> None:
        """Nothing follows on the line. May be said twice."""

    async def parse(self, kind: type[T]) -> T:
        """What is asked over a line is always streamed."""
        body = await super().parse(kind)
        return msgspec.structs.replace(body, stream=True) if isinstance(body, GenerationFields) else body

    async def refuse(self, error: BaseException, headers: Mapping[str, str] = _NOTHING) -> None:
        self._name(failure_of(error).status)
        self.refused(error)
        self.over()

    async def send_raw(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """It is done, and there is nothing to say of it."""
        self._name(status)
        self.over()

    async def stream(self, stream: Stream, *, is_scored: bool = False) -> None:
        self._streamed = stream
        context = self.context
        audience = context.shelf.put(stream, context.service, grace_s=self._grace_s(context.config.disconnect_grace_s))
        self.started(stream)
        try:
            await self._tell(audience, is_opening=True, is_scored=is_scored)
        except asyncio.CancelledError:
            audience.cancel("cancelled")
            raise
        await self._outlive(audience)

    async def resume(self, audience: Audience, after: int) -> None:
        audience.grace_s = self._grace_s(audience.grace_s)
        await self._tell(audience, after=after)

    async def _tell(
        self, audience: Audience, *, after: int = 0, is_opening: bool = False, is_scored: bool = True
    ) -> None:
        assert not isinstance(self.asked, Cancel)
        peer = self._peer()
        try:
            feed = Feed(
                audience,
                self.stages,
                self.context,
                peer,
                self._line,
                self.wording(audience.stream),
                window=self.asked.window,
                after=after,
                is_opening=is_opening,
                is_scored=is_scored,
            )
            self.feed = feed
            self._name(200)
            self.fed(audience.stream, feed)
            await feed.run()
        finally:
            peer.close()
            if self.feed is not None:
                self._first_s, self._last_s = self.feed.first_s, self.feed.last_s
                self.over()

    def _name(self, status: int) -> None:
        """From here on it is known as what it is."""
        self.status = status
        self.route = self.path
        self.method, self.raw_path = self.words[type(self.asked)], self.path.encode()


def _once(body: bytes) -> Receive:
    pieces = [body]

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": pieces.pop(), "more_body": False}

    return receive


async def _unsent(message: MutableMapping[str, Any]) -> None:
    raise AssertionError(f"{message['type']} over a line")
