"""A connection of uvicorn's, fenced in. Owns the limits that hold whatever is asked: how long a request may take to
arrive, how many headers it has and how long they are, how its body is cut into pieces, how long an answer may lie
unread. Of offers to upgrade to another protocol one is handed on, that of a WebSocket at its path (`websocket.handshake`),
and the others are not taken.

Knows no route and no key. What it refuses it answers in the shape of the catalogue, and closes.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from time import monotonic
from typing import Any, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from headrace.core.config import GatewayConfig
from headrace.core.errors import HeadraceError, InvalidInput, TooLarge
from headrace.gateway.context import Context
from headrace.gateway.cork import Corked, Turn
from headrace.gateway.cycle import Cycle
from headrace.gateway.errors import HeadersTooLarge, ReceiveTimeout, error_reply
from headrace.gateway.websocket.handshake import is_offer, with_key

_MALFORMED = "This is not a request that HTTP/1.1 allows."
# Chunks this small on average are an attack on the processor. The first ones are free.
_FREE_CHUNKS = 1024
_MIN_CHUNK_BYTES = 64
_SLACK_BYTES = 64 << 10
# A refused client is listened to while it goes on sending, so that what it was told reaches it: not through more silence
# than this, and for no more time than a request has, nor more bytes.
_LINGER_S = 5.0
_LINGER_BYTES = 16 << 20
# Of an answer that lies unread, within `max_unread_s`.
_MIN_TAKEN_BYTES = 64 << 10
# What an offer of HTTP/2 puts beside `upgrade` into Connection; both are between this connection's ends.
_OFFERS = frozenset({b"upgrade", b"http2-settings"})
_without_blanks = methodcaller("rstrip", b" \t")


class FencedProtocol(HttpToolsProtocol):
    """One per connection; several requests follow each other on it."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        context: Context,
        turn: Turn,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._context = context
        self._turn = turn
        self._limits: GatewayConfig = context.config
        self._deadline: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[], None] | None = None
        self._refusal: HeadraceError | None = None
        # To be told when all that came before is answered; what comes behind is not looked at.
        self._postponed: HeadraceError | None = None
        # Of the message that is coming in.
        self._in_head = True
        self._is_begun = False
        # Whether `cycle` answers the message that is coming in, not an earlier one.
        self._has_cycle = False
        self._is_refused = False
        self._is_ending = False
        self._is_offer = False
        self._has_eof = False
        # What came behind an offer that is being decided on.
        self._early: bytearray | None = None
        # Since when something lies unsent, and how much the client must have taken to be given more time.
        self._unsent_s: float | None = None
        self._goal_bytes = 0
        self._began_s = 0.0
        # Names and values of its headers in turn, and then those of its trailers, as they came.
        self._fields: list[bytes] = []
        self._wire_bytes = 0
        self._num_chunks = 0
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Corked(transport, self._turn))  # type: ignore[arg-type]
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()
        # What waits behind another request on this connection will never be asked for again.
        self.pipeline.clear()
        # They refer to this in turn: the cycle would keep all of the request until a collection.
        self.scope = self.cycle = None  # type: ignore[assignment]

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A client that closed and one that has only said all look alike until something is sent to them. What is
        answered at once is sent; what waits for a worker is not, since for those that left it must end at once."""
        is_open = self.cycle is not None and not self.cycle.response_complete
        is_coming = self._is_begun and self._postponed is None
        if is_coming or not is_open or self._on_lost is not None or self.scheme != "http":
            return None
        self._has_eof = True
        self.cycle.keep_alive = False
        return True

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Call it when the connection is lost: at once where it is lost already."""
        self._on_lost = on_lost
        if on_lost is None:
            return
        if self.transport.is_closing():
            on_lost()
        elif self._has_eof:
            self.transport.close()

    def given_s(self) -> float:
        """When the connection was given the last bytes of an answer."""
        given_s: float = self.transport.given_s  # type: ignore[attr-defined]
        return given_s

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._early is not None:
            self._early += data
            if len(self._early) > _SLACK_BYTES:
                self.flow.pause_reading()
            return
        self._wire_bytes += len(data)
        if self._is_over:
            if self._wire_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        self._feed(data)
        if not (self._is_begun or self._wire_bytes):
            return  # what came was whole, as most requests are
        if self._is_over or self.transport.is_closing():
            return
        # Only what is still to come needs a timer.
        if self._is_begun and self._deadline is None:
            self._arm()
        if self._in_head:
            # Empty lines before a request begin none, and have its time all the same.
            if self._deadline is None and self._wire_bytes and not self._is_answering_another():
                self._arm()
            # What came with the end of another request is not counted as it came.
            if self._wire_bytes > self._limits.max_header_bytes or (self._is_begun and self._is_too_long):
                self._refuse(_headers_too_large(self._limits))
        elif self._wire_bytes > 2 * self._limits.max_body_bytes + _SLACK_BYTES:
            self._refuse(TooLarge("The body is too long."))

    def _feed(self, data: bytes) -> None:
        """The parser stops at an offer to upgrade as if its body were of the other protocol. So such a request is
        parsed again without the offer, and what follows is its body."""
        rest = memoryview(data)
        try:
            while True:
                try:
                    return self.parser.feed_data(rest)
                except httptools.HttpParserUpgrade as offer:
                    rest = rest[offer.args[0] :]
                    if self._is_for_socket():
                        self._early, rest = bytearray(rest), memoryview(b"")
                        self.headers = with_key(self.headers)
                    self.parser.feed_data(self._without_offer())
        except httptools.HttpParserError:
            self.send_400_response(_MALFORMED)

    def _is_for_socket(self) -> bool:
        if self._is_answering_another() or self.parser.get_http_version() != "1.1":
            return False
        return is_offer(self.parser.get_method(), self.url, self.headers)

    def become(self, head: bytes, protocol: asyncio.Protocol) -> bool:
        """The offer is taken: what follows `head` is of another protocol. False where nobody waits for it any more."""
        if self.cycle is None or self.transport.is_closing() or self._has_eof:
            if self.cycle is not None:
                self.cycle.disconnected = True
            self.transport.close()
            return False
        early, self._early = bytes(self._early or b""), None
        self.cycle.response_started = self.cycle.response_complete = True
        self._disarm()
        self.connections.discard(self)
        self.transport.write(head)
        self.transport.flush()  # type: ignore[attr-defined]
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        self.flow.resume_reading()
        self.scope = self.cycle = self.parser = None  # type: ignore[assignment]
        if early:
            protocol.data_received(early)
        return True

    def _without_offer(self) -> bytes:
        """The head of the request that was parsed last."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(token for token in value.split(b",") if token.strip().lower() not in _OFFERS)
            if name not in _OFFERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        self._limits = self._context.config
        self._in_head = self._is_begun = True
        self._has_cycle = False
        self._num_chunks = self._body_bytes = 0
        self._began_s = monotonic()
        self.url = b""
        self.headers = []
        self._fields = []

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._limits.max_header_bytes:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        fields = self._fields
        fields += (name, value)
        if len(fields) > 2 * self._limits.max_headers:
            self._refuse_head()
        # Trailers come after the body: they are counted and dropped.
        if not self._in_head:
            self._check_size()

    def _check_size(self) -> None:
        if self._is_too_long:
            self._refuse_head()

    @property
    def _is_too_long(self) -> bool:
        """The line and its fields, each of which has four bytes around its name and its value."""
        fields = self._fields
        return len(self.url) + sum(map(len, fields)) + 2 * len(fields) > self._limits.max_header_bytes

    def _refuse_head(self) -> NoReturn:
        self._refusal = _headers_too_large(self._limits)
        raise self._refusal

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._check_size()
        fields, parser = self._fields, self.parser
        # The parser leaves blanks behind a value, which are no part of it (RFC 9112, 5.1).
        self.headers = list(zip(map(bytes.lower, fields[::2]), map(_without_blanks, fields[1::2]), strict=True))
        version, found = parser.get_http_version(), dict(self.headers)
        if (b"host" not in found and version == "1.1") or (
            b"transfer-encoding" in found and not _is_chunked(self.headers)
        ):
            raise InvalidInput(_MALFORMED)
        self._is_offer = parser.should_upgrade()
        if self._is_offer:
            if parser.get_method() == b"CONNECT":
                raise InvalidInput(_MALFORMED)
            return
        self._answer(
            version,
            waits_to_continue=b"expect" in found and _is_continued(self.headers),
            keep_alive=version != "1.0" and parser.should_keep_alive(),
        )

    def _answer(self, version: str, *, waits_to_continue: bool, keep_alive: bool) -> None:
        """Begin to, unless an earlier request of this connection is still being answered."""
        earlier = self.cycle
        self.cycle = Cycle(
            self._asgi_scope(version),
            self.transport,
            self.flow,
            self.logger,
            self.access_logger,
            False,
            self.server_state.default_headers,
            asyncio.Event(),
            waits_to_continue,
            keep_alive,
            self.on_response_complete,
        )
        self._has_cycle = True
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _asgi_scope(self, version: str) -> Any:
        """What the application reads of it. Paths are decided on as they came."""
        url = httptools.parse_url(self.url)
        if url.path is None:
            raise InvalidInput(_MALFORMED)
        state: dict[str, Any] = {
            "began_s": self._began_s,
            "abort": self.transport.abort,
            "watch": self.watch,
            "given_s": self.given_s,
        }
        if self._early is not None:
            state["offer"] = self
        return {
            "type": "http",
            "http_version": version,
            "method": self.parser.get_method().decode("ascii"),
            "scheme": self.scheme,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self.headers,
            "client": self.client,
            "state": state,
        }

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > _FREE_CHUNKS + self._body_bytes // _MIN_CHUNK_BYTES:
            self._refusal = InvalidInput("The body comes in too many small chunks.")
            raise self._refusal

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._is_offer:
            return
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()
        self.headers, self._fields = [], []
        self._in_head, self._is_begun, self._has_cycle = True, False, False
        self._wire_bytes = 0
        self._disarm()

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            elif self._postponed is not None:
                error, self._postponed = self._postponed, None
                self._refuse(error)
        if self._early is not None:
            early, self._early = bytes(self._early), None
            if early:
                self.data_received(early)
        # Reading stops while a request waits behind another; its time begins when reading goes on.
        if self._is_begun and self._deadline is None and not self.transport.is_closing():
            self._arm()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for whatever its parser refuses."""
        self._refuse(self._refusal or InvalidInput(_MALFORMED))

    def check(self, now_s: float) -> None:
        """To be called every now and then: so that no answer needs a timer for what its client does after it."""
        self._check_unsent(now_s)
        if self._is_idle and now_s - self.given_s() > self.timeout_keep_alive:
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        """All that was asked is answered, and nothing of another request has come."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and self._deadline is None and not self._is_begun and not self.pipeline

    def _check_unsent(self, now_s: float) -> None:
        """Cut a connection whose client does not take what it was sent. An answer that watches its client has a bound
        of its own."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes or self._on_lost is not None:
            self._unsent_s = None
            return
        taken_bytes = self.transport.written_bytes - unsent_bytes  # type: ignore[attr-defined]
        if self._unsent_s is None or taken_bytes >= self._goal_bytes:
            self._unsent_s = now_s
            self._goal_bytes = taken_bytes + min(unsent_bytes, _MIN_TAKEN_BYTES)
        elif now_s - self._unsent_s > self._context.config.max_unread_s:
            self.transport.abort()

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self._context.config.receive_s, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_answering_another():
            self._arm()
        elif not self._is_begun and not self._wire_bytes:
            self.transport.close()
        else:
            self._refuse(ReceiveTimeout("The request did not arrive in time."))

    def _is_answering_another(self) -> bool:
        """An earlier request of this connection is still being answered."""
        if self.pipeline or self._postponed is not None:
            return True
        return not self._has_cycle and self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: HeadraceError) -> None:
        """Answer and close, behind what is answered to earlier requests; or only close where an answer to this one is on
        its way already."""
        self._disarm()
        if self._is_answering_another():
            self._postpone(error)
            return
        is_answered = self._has_cycle and self.cycle.response_complete
        if self._has_cycle and self.cycle.response_started and not is_answered:
            self.transport.abort()
            return
        self._is_refused = True
        if not is_answered:
            self.transport.write(_raw_answer(error))
            if self._has_cycle:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
        if self._is_ending:
            self.transport.close()
        else:
            self._linger()

    def _postpone(self, error: HeadraceError) -> None:
        self._postponed = error
        self._wire_bytes = 0
        # What is refused has come in part, and is not to be run.
        if self._has_cycle:
            self.pipeline.popleft()

    @property
    def _is_over(self) -> bool:
        """Nothing more is taken from this connection."""
        return self._is_refused or self._postponed is not None

    def shutdown(self) -> None:
        """The server calls this when it is told to stop: who was refused is not waited for."""
        self._is_ending = True
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    def _linger(self) -> None:
        """Closed at once, the kernel would answer what still comes with a reset, and the answer would be lost."""
        # Over TLS a connection has no end of its own to be said.
        self.transport.flush()  # type: ignore[attr-defined]
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._wire_bytes = 0
        self._listen_on(0, self.loop.time() + self._context.config.receive_s)

    def _listen_on(self, heard_bytes: int, until_s: float) -> None:
        """Until it is silent: nothing came since `heard_bytes`."""
        left_s = until_s - self.loop.time()
        self._deadline = self.loop.call_later(min(_LINGER_S, left_s), self._hush, heard_bytes, until_s)

    def _hush(self, heard_bytes: int, until_s: float) -> None:
        if self._wire_bytes == heard_bytes or self.loop.time() >= until_s:
            self.transport.abort()
        else:
            self._listen_on(self._wire_bytes, until_s)


def fenced(context: Context) -> Any:
    """What uvicorn makes a connection with."""
    return partial(FencedProtocol, context=context, turn=Turn())


def _is_continued(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether its client waits to be told so before it sends the body."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)


def _is_chunked(headers: list[tuple[bytes, bytes]]) -> bool:
    """Its body comes in chunks, and is not coded in any other way."""
    return all(value.strip().lower() == b"chunked" for name, value in headers if name == b"transfer-encoding")


def _headers_too_large(limits: GatewayConfig) -> HeadersTooLarge:
    return HeadersTooLarge(
        f"The headers may be {limits.max_headers} at most, with {limits.max_header_bytes} bytes in all."
    )


def _raw_answer(error: HeadraceError) -> bytes:
    answer = error_reply(error)
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(answer.body)
    return STATUS_LINE[answer.status] + head + answer.body
