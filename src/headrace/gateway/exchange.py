"""One HTTP request, past authentication, and its answer. Owns reading the body, answering once, and the headers that
every answer carries; what is asked and answered is an endpoint's matter.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from headrace.core.caller import Caller
from headrace.core.stages import Stage, StageClock
from headrace.gateway.body import check_media, read_body
from headrace.gateway.collector import Collector
from headrace.gateway.context import Context
from headrace.gateway.errors import StreamFailed, error_reply
from headrace.gateway.peer import Peer, Receive, Send
from headrace.gateway.schemas.decode import decode
from headrace.gateway.sender import Sender
from headrace.gateway.websocket.handshake import Offer
from headrace.streams.audience import Audience
from headrace.streams.record import Record
from headrace.streams.stream import Stream

T = TypeVar("T")
MAX_QUERY_FIELDS = 32
_NO_HEADERS: Mapping[str, str] = {}
_API_VERSION = (b"openai-version", b"2020-10-01")
_JSON = (b"content-type", b"application/json")
_JSON_HEADERS = [_JSON, (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_CLOSE = (b"connection", b"close")
_NO_STORE = (b"cache-control", b"no-store")
_NO_SNIFF = (b"x-content-type-options", b"nosniff")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Proxies that buffer a stream make one late answer of it.
    (b"x-accel-buffering", b"no"),
]
# Server-Timing takes no colon in a name.
_METRICS: dict[str, str] = {stage: stage.value.replace(":", "-") + ";dur=%.3f" for stage in Stage}
_MS_PER_S = 1e3
_ON_DISCONNECT = "x-headrace-on-disconnect"
_GRACES = {"cancel": 0.0, "finish": float("inf")}


def server_timing(spent: Mapping[str, float] | Mapping[Stage, float]) -> str:
    """The stages that are over, in milliseconds."""
    return ", ".join(map(_METRICS.__getitem__, spent)) % tuple(map(_MS_PER_S.__mul__, spent.values()))


class Exchange:
    """`headers` have lower-case names. `caller` is None where no key is asked for.

    An endpoint answers by exactly one of `reply`, `stream`, `resume` and `send_raw`; an error it raises is answered
    for it.
    """

    __slots__ = (
        "_first_s", "_is_sent", "_last_s", "_query", "_receive", "_scope", "_send", "_streamed", "began_s", "caller", "context",
        "cors", "error_code", "has_taken_id", "headers", "is_awaited", "method", "model", "path_params", "raw_path", "request_id", "route",
        "stages", "status",
    )  # fmt: skip

    def __init__(
        self,
        scope: Mapping[str, Any],
        receive: Receive,
        send: Send,
        context: Context,
        headers: Mapping[str, str],
        *,
        request_id: str,
        began_s: float,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self.method: str = scope["method"]
        self.raw_path: bytes = scope["raw_path"]
        self.context = context
        self.headers = headers
        self.request_id = request_id
        # The shelf keeps the id for this request, until it is over.
        self.has_taken_id = False
        # Whoever asked has a key and waits: for this processors are kept from halting, where they are.
        self.is_awaited = False
        # When the first byte of the request was here.
        self.began_s = began_s
        self.caller: Caller | None = None
        self.stages = StageClock(Stage.RECEIVE, began_s)
        self.path_params: dict[str, str] = {}
        # For a page of another origin that may read the answer.
        self.cors: list[tuple[bytes, bytes]] = []
        # The path in the table; "other" where there is none.
        self.route = "other"
        # The registered name of the model that it asks for, never what the client wrote; "" while that is not known.
        self.model = ""
        # Of the answer; 0 while there is none.
        self.status = 0
        # Why it was refused, or failed before its stream did; "" where it was not.
        self.error_code = ""
        self._query: dict[str, str] | None = None
        # The whole answer was handed to the connection, and with that the request was over.
        self._is_sent = False
        self._streamed: Stream | None = None
        self._first_s: float | None = None
        self._last_s: float | None = None

    @property
    def peer_address(self) -> str:
        """Of the machine that is connected, whatever headers say; empty where it is not known."""
        client = self._scope.get("client")
        return client[0] if client else ""

    @property
    def answered(self) -> Stream | None:
        """The stream that was opened for the answer."""
        return self._streamed

    @property
    def first_s(self) -> float | None:
        """When the first of what the model said was given to the transport, which lets it go at the end of the turn."""
        return self._first_s

    @property
    def last_s(self) -> float | None:
        return self._last_s

    def over_s(self, now_s: float) -> float:
        """When the request was over: when the last bytes of its answer were handed to the connection, where that was
        its end and the connection can tell. From there on its client may have them and be gone, before anything else
        is done here."""
        given_s = self._scope.get("state", {}).get("given_s") if self._is_sent else None
        return now_s if given_s is None else min(given_s(), now_s)

    @property
    def query(self) -> Mapping[str, str]:
        """The last of each name. Never holds a key that would count."""
        if self._query is None:
            raw = self._scope.get("query_string", b"").decode("latin-1")
            self._query = dict(parse_qsl(raw, keep_blank_values=True)[:MAX_QUERY_FIELDS])
        return self._query

    @property
    def last_event_id(self) -> str | None:
        """What a client that lost a stream says it read last. An empty one is none."""
        return self.headers.get("last-event-id") or None

    @property
    def offer(self) -> Offer | None:
        """The connection, where the request offers to go on as a WebSocket."""
        offer: Offer | None = self._scope.get("state", {}).get("offer")
        return offer

    async def body(self) -> bytes:
        """The whole body, within its bound. ClientGone where it never came whole."""
        context = self.context
        self.stages.enter(Stage.RECEIVE, context.clock.now_s())
        if context.inject:
            await context.delay(Stage.RECEIVE)
        body = await read_body(self._receive, self.headers, context.config.max_body_bytes)
        self.stages.enter(Stage.ADMIT, context.clock.now_s())
        if context.inject:
            await context.delay(Stage.ADMIT)
        return body

    async def parse(self, kind: type[T]) -> T:
        """The body as JSON. InvalidInput with `param` where it is not a `kind`; 415 for other media."""
        check_media(self.headers)
        return decode(await self.body(), kind)

    async def reply(self, body: object, *, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """Answer with JSON; bytes are sent as they are."""
        data = body if type(body) is bytes else msgspec.json.encode(body)
        sent = self.common_headers() + _JSON_HEADERS
        sent.append((b"content-length", b"%d" % len(data)))
        for name, value in headers.items():
            if name == "content-type":
                sent.remove(_JSON)
            sent.append((name.encode("latin-1"), value.encode("latin-1")))
        await self.send_raw(status, sent, data)

    async def refuse(self, error: BaseException, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """Answer with what the catalogue says of an error."""
        answer = error_reply(error)
        await self.reply(answer.body, status=answer.status, headers={**answer.headers, **headers})

    async def send_raw(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._is_sent = True

    async def stream(self, stream: Stream, *, is_scored: bool = False) -> None:
        """Answer with the stream as server-sent events, until its terminal frame or until the client is gone; others
        may then read on, and the request is over when the stream is. `is_scored`: with log-probabilities, so that a
        frame may be large."""
        self._streamed = stream
        context = self.context
        audience = context.shelf.put(stream, context.service, grace_s=self._grace_s(context.config.disconnect_grace_s))
        peer = self._peer()
        sender = self._sender_to(peer, audience, is_opening=True, is_scored=is_scored)
        try:
            await sender.run()
            self._is_sent = peer.gone_s is None and stream.is_ended
        except asyncio.CancelledError:
            audience.cancel("cancelled")
            raise
        finally:
            peer.close()
            self._first_s, self._last_s = sender.first_s, sender.last_s
        await self._outlive(audience)

    async def resume(self, audience: Audience, after: int) -> None:
        """Answer with what follows frame `after` of a stream that another request opened, as that was answered. 204
        where nothing does: it tells browsers not to come again. InvalidInput where that frame was not said yet."""
        audience.grace_s = self._grace_s(audience.grace_s)
        peer = self._peer()
        try:
            sender = self._sender_to(peer, audience, after=after, is_scored=True)
            if sender.is_done:
                sender.close()
                await self.send_raw(204, [*self.common_headers(), _NO_STORE], b"")
            else:
                await sender.run()
        finally:
            peer.close()

    def _sender_to(
        self, peer: Peer, audience: Audience, *, after: int = 0, is_opening: bool = False, is_scored: bool
    ) -> Sender:
        return Sender(
            audience,
            self.stages,
            self.context,
            peer,
            self._send,
            start=self._start_events,
            abort=self._abort,
            after=after,
            is_opening=is_opening,
            is_scored=is_scored,
        )

    async def _outlive(self, audience: Audience) -> None:
        """This client is gone, or was cut off: the books of its request are closed when the stream has ended."""
        try:
            await audience.stream.ended()
        except asyncio.CancelledError:
            audience.cancel("cancelled")
            raise

    async def collect(self, stream: Stream) -> list[Record]:
        """The whole stream, to be answered by `reply`. StreamFailed where it broke; cancelled when the client goes."""
        self._streamed = stream
        context = self.context
        if not stream.is_ended:  # a short one has, when it is opened
            await self._wait_for(stream)
        self.stages.enter(Stage.CLIENT, context.clock.now_s())
        if stream.ending is not None and stream.ending.failure is not None:
            raise StreamFailed(stream.ending.failure)
        if context.inject:
            await context.delay(Stage.CLIENT)
        return stream.records

    async def _wait_for(self, stream: Stream) -> None:
        peer = self._peer()
        try:
            await Collector(stream, self.context, peer, grace_s=self._grace_s(0.0)).run()
        finally:
            peer.close()

    @property
    def chosen_grace_s(self) -> float | None:
        """How long generation goes on without a client, where that said so."""
        return _GRACES.get(self.headers.get(_ON_DISCONNECT, ""))

    def _grace_s(self, default_s: float) -> float:
        chosen_s = self.chosen_grace_s
        return default_s if chosen_s is None else chosen_s

    async def _start_events(self) -> None:
        self.status = 200
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": self.common_headers() + _EVENTS + [_NO_SNIFF]}
        )

    def common_headers(self) -> list[tuple[bytes, bytes]]:
        """Of every answer."""
        passed_ms = (self.context.clock.now_s() - self.began_s) * 1e3
        headers = [
            (b"x-request-id", self.request_id.encode("ascii")),
            (b"openai-processing-ms", b"%d" % passed_ms),
            _API_VERSION,
        ]
        if self.stages.seconds:
            headers.append((b"server-timing", server_timing(self._spent()).encode("ascii")))
        if self.cors:
            headers += self.cors
        if self.context.is_retiring:
            headers.append(_CLOSE)
        return headers

    def _spent(self) -> Mapping[str, float] | Mapping[Stage, float]:
        """As its ending says, if it was cut off: the clock has all of its stay as transfer until workers have said more."""
        ending = self._streamed.ending if self._streamed is not None else None
        if ending is not None and ending.failure is not None and ending.stages:
            return ending.stages
        return self.stages.seconds

    def _peer(self) -> Peer:
        return Peer(self._receive, self.context.clock, self._scope.get("state", {}).get("watch"))

    def _abort(self) -> None:
        """Cut the connection, where the server below gave a way to."""
        abort = self._scope.get("state", {}).get("abort")
        if abort is not None:
            abort()
