"""Links within one process, for tests.

Messages are encoded, bounded and decoded as on a socket, so that whatever passes here passes there. An address is any
name. All ends of one network live on one loop.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

from headrace.core.errors import InvalidInput, Unreachable
from headrace.core.ports import Link, Listener
from headrace.transport.link import CLOSED_HERE, OTHER_LEFT
from headrace.transport.reception import Guest, ReceiverFactory, Reception, log
from headrace.transport.wire import Encoder, Limits, Parser


class MemoryNetwork:
    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._listeners: dict[str, _MemoryListener] = {}

    async def dial(self, address: str, receiver: ReceiverFactory, incoming: Any) -> Link:
        await asyncio.sleep(0)
        listener = self._listeners.get(address)
        if listener is None:
            raise Unreachable(f"nobody answers at {address}")
        here = _MemoryLink(address, self._limits)
        there = _MemoryLink(f"{address} (dialled)", self._limits)
        here.other, there.other = there, here
        why = listener.accept(there) or here.greet(Reception(receiver, incoming))
        if why:
            here.abandon(why)
            there.abandon(why)
            raise Unreachable(f"{address} does not answer as it should: {why}")
        return here

    async def listen(self, address: str, receiver: ReceiverFactory, incoming: Any) -> Listener:
        if address in self._listeners:
            raise InvalidInput(f"somebody listens at {address}", param="address")
        listener = _MemoryListener(self._listeners, address, Reception(receiver, incoming), self._limits)
        self._listeners[address] = listener
        return listener


class _MemoryListener:
    def __init__(
        self, listeners: "dict[str, _MemoryListener]", address: str, reception: Reception, limits: Limits
    ) -> None:
        self._listeners = listeners
        self._address = address
        self._reception = reception
        self._limits = limits
        self._links: list[_MemoryLink] = []

    @property
    def address(self) -> str:
        return self._address

    def accept(self, link: "_MemoryLink") -> str:
        """Why it was not taken; empty when it was."""
        self._links = [other for other in self._links if other.is_open]
        if len(self._links) >= self._limits.max_links:
            return f"{self._address} has {len(self._links)} links already"
        self._links.append(link)
        return link.greet(self._reception)

    async def close(self) -> None:
        if self._listeners.get(self._address) is self:
            del self._listeners[self._address]
        for link in self._links:
            link.close()
        await asyncio.sleep(0)


class _MemoryLink:
    """One end. What it sends waits here, encoded, until the other end takes it in a turn of its own."""

    other: "_MemoryLink"

    def __init__(self, peer: str, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer = peer
        self._limits = limits
        self._encoder = Encoder(limits.max_message_bytes)
        self._outgoing: deque[bytearray] = deque()
        self._pending_bytes = 0
        self._is_handover_due = False
        self._guest: Guest | None = None
        self._why = ""

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    @property
    def is_open(self) -> bool:
        return not self._why

    def greet(self, reception: Reception) -> str:
        guest = reception.greet(self)
        if isinstance(guest, str):
            return guest
        self._guest = guest
        if self._why:  # the receiver closed the link while it was made
            self._loop.call_soon(guest.tell_closed, self._why)
        return ""

    def send(self, message: Any) -> None:
        if not self._why:
            self._line_up(_encoded(message, self._encoder))

    def post(self, message: Any) -> None:
        buffer = _encoded(message, Encoder(self._limits.max_message_bytes))
        with suppress(RuntimeError):  # the loop is closed, and the link with it
            self._loop.call_soon_threadsafe(self._line_up, buffer)

    def _line_up(self, buffer: bytearray) -> None:
        if self._why:
            return
        self._pending_bytes += len(buffer)
        self._outgoing.append(buffer)
        if self._pending_bytes > self._limits.max_pending_bytes:
            self.fail(f"more than {self._limits.max_pending_bytes} bytes wait for the other end to read")
        elif not self._is_handover_due:
            self._is_handover_due = True
            self._loop.call_soon(self._hand_over)

    def close(self) -> None:
        """What was sent before still arrives."""
        if self._end(CLOSED_HERE):  # after the handover that is due, if one is
            self._loop.call_soon(self.other._end, OTHER_LEFT)

    def fail(self, why: str) -> None:
        if not self._why:
            log.warning("link to %s: %s", self._peer, why)
            self.abandon(why)

    def abandon(self, why: str) -> None:
        self._outgoing.clear()
        self._pending_bytes = 0
        if self._end(why):
            self._loop.call_soon(self.other._end, OTHER_LEFT)

    def _hand_over(self) -> None:
        """What is sent meanwhile waits for the next turn, or two ends could keep each other busy for ever."""
        self._is_handover_due = False
        for _ in range(len(self._outgoing)):
            if not self._outgoing:  # this end was abandoned while the other received
                return
            buffer = self._outgoing.popleft()
            self._pending_bytes -= len(buffer)
            self.other._take(buffer)

    def _take(self, buffer: bytearray) -> None:
        if self._why or self._guest is None:
            return
        for body in Parser(self._limits.max_message_bytes).feed(bytes(buffer)):
            why = self._guest.deliver(body)
            if why:
                self.fail(why)

    def _end(self, why: str) -> bool:
        if self._why:
            return False
        self._why = why
        if self._guest is not None:
            self._loop.call_soon(self._guest.tell_closed, why)
            self._guest = None  # as over a socket
        return True


def _encoded(message: Any, encoder: Encoder) -> bytearray:
    buffer = bytearray()
    encoder.append(message, buffer)
    return buffer
