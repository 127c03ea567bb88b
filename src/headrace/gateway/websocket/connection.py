"""One connection that was upgraded: bytes in, whole messages out, and frames back. Owns what holds whatever is said over
it: how long a message is and may take, how many frames come in, how often pings are answered, when a peer that is
silent or does not read is gone, and how it closes. No extension is spoken, so nothing that comes in grows.

Knows no message and no stream. The opening handshake is over (`handshake`), and so are the checks of who may come in.
"""

import asyncio
from collections.abc import MutableSet
from contextlib import suppress
from typing import Any, Protocol, cast

from wsproto.connection import Connection as Wire
from wsproto.connection import ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Message, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason

from headrace.gateway.context import Context
from headrace.gateway.credit import Credit

# Frames that come in, of any kind: so many at once, and so many a second. Beyond that the peer waits: an attacker gets
# a tenth of the processor, an honest one acknowledges thirty streams.
BURST_FRAMES = 128
FRAMES_PER_S = 4000.0
REST_S = BURST_FRAMES / 2 / FRAMES_PER_S
# Of one message; the first fragments are free.
FREE_FRAGMENTS = 1024
MIN_FRAGMENT_BYTES = 64
# A ping that comes sooner after an answered one is answered by the next beat. Too many within a second are a flood.
PONG_S = 0.1
MAX_PINGS_PER_S = 100
# Beats that a peer may let pass once it was asked whether it is there.
MISSED_BEATS = 2
# How long a peer that does not read is given its last words, and one that was told to close to say so too.
LAST_WORDS_S = 2.0
LINGER_S = 1.0
LINGER_BYTES = 16 << 20


class Talk(Protocol):
    """Who speaks over the connection."""

    def heard(self, message: bytes, began_s: float) -> None:
        """One whole message, of which the first byte came at `began_s`."""

    def flows(self) -> None:
        """Writing waited for the peer, and need not any more."""

    def lost(self) -> None:
        """The connection is gone. Once, and nothing follows."""

    def drain(self) -> None:
        """The server is told to stop."""


class Connection(asyncio.Protocol):
    """`connections` are those that the server waits for when it stops; `check` is to be called every now and then."""

    def __init__(self, context: Context, talk: Talk, connections: MutableSet[Any]) -> None:
        self._context = context
        self._talk: Talk | None = talk
        self._connections = connections
        self._now_s = context.clock.now_s
        self._wire = Wire(ConnectionType.SERVER)
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self._is_deaf = False
        self._ignored_bytes = 0
        # The message that is coming in, and since when.
        self._message = bytearray()
        self._num_fragments = 0
        self._began_s: float | None = None
        self._heard_s = self._now_s()
        self._credit = Credit(BURST_FRAMES, FRAMES_PER_S, self._heard_s)
        self._is_resting = False
        self._timer: asyncio.TimerHandle | None = None
        self._asked_s: float | None = None
        self._ponged_s = self._pings_s = -1.0
        self._num_pings = 0
        self._owed: bytes | None = None
        self._blocked_s: float | None = None

    @property
    def is_open(self) -> bool:
        """What is said now may reach the peer."""
        return self._transport is not None and not self._is_closing

    @property
    def is_writable(self) -> bool:
        """The peer takes what it is sent."""
        return self.is_open and self._blocked_s is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._stop_timer()
        self._transport = None
        self._message.clear()
        # Who speaks here holds this in turn, and the parser is a generator of what holds it: such cycles would keep all of
        # the socket until a collection.
        talk, self._talk = self._talk, None
        if talk is not None:
            talk.lost()
        with suppress(AttributeError):  # of another wsproto: it is collected, then, as any cycle
            self._wire._proto._parse_more.close()

    def say(self, *messages: bytes) -> None:
        """Texts, in one write. To a peer that is gone they are not said."""
        if self._transport is not None and not self._is_closing:
            self._transport.write(b"".join([part for message in messages for part in (text_head(message), message)]))

    def close(self, code: int, reason: str) -> None:
        """Say so, and wait a little for the peer to say so too."""
        if self._transport is None or self._is_closing:
            return
        self._transport.write(self._wire.send(CloseConnection(code, reason)))
        self._is_closing = True
        self._message.clear()
        self._stop_timer()
        self._wake_up()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def shutdown(self) -> None:
        """The server calls this of all its connections when it is told to stop."""
        if self._talk is not None:
            self._talk.drain()

    def pause_writing(self) -> None:
        self._blocked_s = self._now_s()

    def resume_writing(self) -> None:
        """Whoever does not read is not listened to: what it is answered would pile up. Now it is again."""
        self._blocked_s = self._asked_s = None
        self._heard_s = self._now_s()
        if self._talk is not None:
            self._talk.flows()
        if self._timer is None and not self._is_closing:
            self._go_on()

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._now_s()
        self._asked_s = None
        if self._is_closing:
            self._ignored_bytes += len(data)
            if self._ignored_bytes > LINGER_BYTES:
                return self.abort()
        if not self._is_deaf:
            self._wire.receive_data(data)
            if self._timer is None or self._is_closing:
                self._listen()

    def eof_received(self) -> None:
        """It closes by itself: nobody speaks on with half a connection."""

    def check(self) -> None:
        """Whether the peer is there, and reads."""
        if self._transport is None or self._is_closing:
            return
        config, now_s = self._context.config, self._now_s()
        if self._blocked_s is not None:
            if now_s - self._blocked_s > config.max_unread_s + LAST_WORDS_S:
                self.abort()
            return
        if self._began_s is not None and now_s - self._began_s > config.receive_s:
            return self.close(CloseReason.POLICY_VIOLATION, "The message did not arrive in time.")
        if self._owed is not None:
            self._pong(self._owed, now_s)
        if self._asked_s is not None:
            if now_s - self._asked_s > MISSED_BEATS * config.heartbeat_s:
                self.abort()
        elif now_s - self._heard_s >= config.heartbeat_s:
            self._asked_s = now_s
            self._transport.write(self._wire.send(Ping()))

    def _listen(self) -> None:
        """To what came, as far as its number of frames is no burden."""
        now_s = self._now_s()
        self._credit.earn(now_s)
        for event in self._wire.events():
            self._credit.spend()
            self._take(event, now_s)
            if self._transport is None or self._is_deaf:
                return
            if self._is_closing:
                # An answer to the close comes soon, or behind so much that it is not worth looking for.
                self._is_deaf = self._credit.is_spent
                if self._is_deaf:
                    return
            elif self._credit.is_spent or self._blocked_s is not None:
                return self._rest()

    def _rest(self) -> None:
        """Until there is credit again, or until the peer reads."""
        if self._transport is not None and not self._is_resting:
            self._is_resting = True
            self._transport.pause_reading()
        if self._blocked_s is None:
            self._timer = asyncio.get_running_loop().call_later(REST_S, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        if self._transport is not None and not self._is_closing:
            if self._blocked_s is None:
                self._wake_up()
            self._listen()

    def _wake_up(self) -> None:
        if self._transport is not None and self._is_resting:
            self._is_resting = False
            self._transport.resume_reading()

    def _take(self, event: Event, now_s: float) -> None:
        if isinstance(event, CloseConnection):
            self._take_close(event)
        elif self._is_closing:
            return
        elif isinstance(event, TextMessage):
            self._take_text(event, now_s)
        elif isinstance(event, BytesMessage):
            self._refuse(CloseReason.UNSUPPORTED_DATA, "Messages are texts here.")
        elif isinstance(event, (Ping, Pong)):
            self._take_beat(event, now_s)

    def _take_text(self, event: Message[str], now_s: float) -> None:
        self._message += event.data.encode()
        if len(self._message) > self._context.config.max_body_bytes:
            return self._refuse(CloseReason.MESSAGE_TOO_BIG, "The message is too long.")
        if event.message_finished:
            message, self._message = bytes(self._message), bytearray()
            began_s, self._began_s = self._began_s, None
            self._num_fragments = 0
            if self._talk is not None:
                self._talk.heard(message, now_s if began_s is None else began_s)
            return
        if self._began_s is None:
            self._began_s = now_s
        self._num_fragments += event.frame_finished
        if self._num_fragments > FREE_FRAGMENTS + len(self._message) // MIN_FRAGMENT_BYTES:
            self._refuse(CloseReason.POLICY_VIOLATION, "The message comes in too many small fragments.")

    def _take_beat(self, event: Ping | Pong, now_s: float) -> None:
        if now_s - self._pings_s >= 1.0:
            self._pings_s, self._num_pings = now_s, 0
        self._num_pings += 1
        if self._num_pings > MAX_PINGS_PER_S:
            self._refuse(CloseReason.POLICY_VIOLATION, "Too many pings.")
        elif isinstance(event, Ping):
            if now_s - self._ponged_s >= PONG_S:
                self._pong(bytes(event.payload), now_s)
            else:
                self._owed = bytes(event.payload)

    def _pong(self, payload: bytes, now_s: float) -> None:
        assert self._transport is not None
        self._owed = None
        self._ponged_s = now_s
        self._transport.write(self._wire.send(Pong(payload)))

    def _take_close(self, event: CloseConnection) -> None:
        """The peer's, an answer to ours, or the parser's word for what it could not read."""
        assert self._transport is not None
        state = self._wire.state
        if state is ConnectionState.REMOTE_CLOSING:
            self._transport.write(self._wire.send(event.response()))
            self._part()
        elif state is ConnectionState.CLOSED:
            self._part()
        else:
            is_text = event.code == CloseReason.INVALID_FRAME_PAYLOAD_DATA
            self._refuse(event.code, "The message is not in UTF-8." if is_text else "This is not a WebSocket frame.")

    def _part(self) -> None:
        """Both have said so. A peer that does not read would keep what it was sent for ever."""
        assert self._transport is not None
        self._is_closing = self._is_deaf = True
        self._stop_timer()
        self._transport.close()
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def _refuse(self, code: int, reason: str) -> None:
        """Close, and do not listen for anything any more: what comes is not worth being read."""
        self._is_deaf = True
        self.close(code, reason)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def text_head(message: bytes) -> bytes:
    """What stands before a text that is sent whole. Written here since wsproto takes texts as `str`, and what is sent
    lies here as bytes."""
    size_bytes = len(message)
    if size_bytes < 126:
        return b"\x81%c" % size_bytes
    if size_bytes < 1 << 16:
        return b"\x81\x7e" + size_bytes.to_bytes(2, "big")
    return b"\x81\x7f" + size_bytes.to_bytes(8, "big")
