"""A link over a stream socket, whatever kind: what is sent in a loop turn leaves together at its end, but for a small
message that is the first of its turn. That leaves at once: the other end may wait for it. Reads are cut into messages.

Owns one connection's buffers, deadlines and end. Knows neither addresses nor who may connect. The loop's thread does
everything but `post`, which writes past the loop where nothing waits to be written.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from headrace.transport.reception import Guest, Reception, log
from headrace.transport.wire import PREAMBLE, BadWire, Encoder, Greeting, Limits, Parser

CLOSED_HERE = "closed by this end"
OTHER_LEFT = "the other end left"
# What is handed to the transport at once, so that what it holds stays small and what waits is counted here.
_CHUNK_BYTES = 256 << 10
# Of a message whose writing takes no longer than to come back to it in the next turn.
_SMALL_BYTES = 16 << 10

PeerName = Callable[[asyncio.Transport], str]


class SocketLink(asyncio.Protocol):
    """One end of a connection. The receiver is made when the other end's preamble has come: a stranger never
    reaches one. `gone` is done when the socket is closed, `greeted` with "" or the reason why it never was."""

    def __init__(
        self, reception: Reception, limits: Limits, peer: PeerName, admit: "Callable[[SocketLink], str] | None" = None
    ) -> None:
        """`admit` is asked when the connection is made: empty, or why it is not wanted."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._reception = reception
        self._limits = limits
        self._name_peer = peer
        self._admit = admit
        self._peer = "nobody yet"
        self._guest: Guest | None = None
        self._transport: asyncio.Transport | None = None
        self._why = ""
        self._greeting = Greeting()
        self._parser = Parser(limits.max_message_bytes)
        self._encoder = Encoder(limits.max_message_bytes)
        # Held for all of this, which `post` shares. A transport may call back while it is written to.
        self._lock = threading.RLock()
        self._batch = bytearray()
        self._queue: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._is_flush_due = False
        self._is_paused = False
        # The socket, while it may be written to past the transport; else -1.
        self._fd = -1
        self._timer: asyncio.TimerHandle | None = None
        self._partial_since_s = 0.0
        self.greeted: asyncio.Future[str] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def is_open(self) -> bool:
        return not self._why

    @property
    def pending_bytes(self) -> int:
        if self._transport is None or self.gone.done():
            return 0
        return self._unsent_bytes + self._transport.get_write_buffer_size()

    def send(self, message: Any) -> None:
        if self._why:
            return
        with self._lock:
            size_bytes = self._encoder.append(message, self._batch)
            self._unsent_bytes += size_bytes
        if self.pending_bytes > self._limits.max_pending_bytes:
            self._fail_full()
        elif not self._is_flush_due:
            if size_bytes <= _SMALL_BYTES:
                self._flush()
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def post(self, message: Any) -> None:
        with self._lock:
            if self._why:
                return
            encoded = bytearray()
            self._encoder.append(message, encoded)
            rest = memoryview(encoded)
            if self._is_clear:
                with suppress(OSError):  # full, or broken: the transport finds out
                    rest = rest[os.write(self._fd, rest[:_CHUNK_BYTES]) :]
            if not rest:
                return
            self._close_batch()
            self._queue.append(rest)
            self._unsent_bytes += len(rest)
            is_full = self._unsent_bytes > self._limits.max_pending_bytes
        with suppress(RuntimeError):  # the loop is closed, and the link with it
            self._loop.call_soon_threadsafe(self._fail_full if is_full else self._flush)

    def close(self) -> None:
        """What was sent before still leaves, as far as the other end reads it in time."""
        self._part(CLOSED_HERE)

    def fail(self, why: str) -> None:
        """End at once and say so in the log; what was not sent is lost."""
        if not self._why:
            log.warning("link to %s: %s", self._peer, why)
            self.abandon(why)

    def abandon(self, why: str) -> None:
        self._end(why)
        self._drop()

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._transport = transport
        self._peer = self._name_peer(transport)
        if self._why:
            transport.abort()
            return
        if self._admit is not None and (why := self._admit(self)):
            self.fail(why)
            return
        transport.set_write_buffer_limits(high=_CHUNK_BYTES)
        transport.write(PREAMBLE)
        line = transport.get_extra_info("socket")
        if line is not None and transport.get_extra_info("sslcontext") is None:
            self._fd = line.fileno()
        self._timer = self._loop.call_later(
            self._limits.greeting_s, self.fail, f"no preamble came within {self._limits.greeting_s:g} s"
        )

    def data_received(self, data: bytes) -> None:
        if self._why:
            return
        try:
            if self._guest is not None:
                self._receive(self._guest, data)
            elif (rest := self._greeting.feed(data)) is not None:
                self._greet(rest)
        except BadWire as error:
            self.fail(str(error))

    def eof_received(self) -> None:
        self._part(self._leaving())

    def connection_lost(self, exc: Exception | None) -> None:
        with self._lock:  # the socket is closed after this
            self._fd = -1
        self._end(self._leaving() if exc is None else f"the connection broke: {exc}")
        if self._timer is not None:
            self._timer.cancel()
        self._forget()
        if not self.gone.done():
            self.gone.set_result(None)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if not self._why:
            self._flush()

    def _greet(self, rest: bytes) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        guest = self._reception.greet(self)
        if isinstance(guest, str):
            self.fail(guest)
        elif self._why:  # the receiver closed the link while it was made
            self._loop.call_soon(guest.tell_closed, self._why)
        else:
            self._guest = guest
            if not self.greeted.done():
                self.greeted.set_result("")
            self._receive(guest, rest)

    def _receive(self, guest: Guest, data: bytes) -> None:
        was_partial = self._parser.is_partial
        num_messages = 0
        for body in self._parser.feed(data):
            num_messages += 1
            if why := guest.deliver(body):
                self.fail(why)
            if self._why:
                return
        if self._parser.is_partial and (num_messages or not was_partial):
            self._partial_since_s = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._limits.message_s, self._check_partial)

    def _check_partial(self) -> None:
        """One timer that looks now and then, not one per message: most messages are whole within a turn."""
        self._timer = None
        if not self._parser.is_partial:
            return
        left_s = self._partial_since_s + self._limits.message_s - self._loop.time()
        if left_s <= 0:
            self.fail(f"a message was not complete within {self._limits.message_s:g} s")
        else:
            self._timer = self._loop.call_later(left_s, self._check_partial)

    @property
    def _is_clear(self) -> bool:
        """Nothing is before what is written to the socket now."""
        if self._fd < 0 or self._queue or self._batch or self._transport is None:
            return False
        return not self._transport.get_write_buffer_size()

    def _close_batch(self) -> None:
        if self._batch:
            self._queue.append(memoryview(self._batch))
            self._batch = bytearray()

    def _fail_full(self) -> None:
        self.fail(f"more than {self._limits.max_pending_bytes} bytes wait for the other end to read")

    def _flush(self) -> None:
        self._is_flush_due = False
        if (self._batch or self._queue) and not self._is_paused:
            self._write(everything=False)

    def _write(self, *, everything: bool) -> None:
        if self._transport is None:
            return
        with self._lock:
            self._close_batch()
            queue = self._queue
            while queue and (everything or not self._is_paused):
                part = queue.popleft()
                if len(part) > _CHUNK_BYTES:
                    queue.appendleft(part[_CHUNK_BYTES:])
                    part = part[:_CHUNK_BYTES]
                self._unsent_bytes -= len(part)
                self._transport.write(part)

    def _leaving(self) -> str:
        return f"{OTHER_LEFT} in the middle of a message" if self._parser.is_partial else OTHER_LEFT

    def _part(self, why: str) -> None:
        """Close after what is left to write, or after the linger."""
        if self._why:
            return
        if self._transport is not None:
            self._write(everything=True)
            self._transport.close()
        self._end(why)
        if self._transport is not None and not self.gone.done():
            self._timer = self._loop.call_later(self._limits.linger_s, self._drop)

    def _end(self, why: str) -> None:
        """There is one end, and the receiver hears of it in a turn of its own."""
        if self._why:
            return
        self._why = why
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._guest is not None:
            self._loop.call_soon(self._guest.tell_closed, why)
            self._guest = None  # whoever it speaks to holds this: a cycle would keep both until a collection
        if not self.greeted.done():
            self.greeted.set_result(why)

    def _drop(self) -> None:
        self._forget()
        if self._transport is None:
            if not self.gone.done():
                self.gone.set_result(None)
        else:
            self._transport.abort()

    def _forget(self) -> None:
        with self._lock:
            self._queue.clear()
            self._batch = bytearray()
            self._unsent_bytes = 0
