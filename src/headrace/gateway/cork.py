"""A transport that holds what need not leave at once. An answer's head leaves with its body: the application always
sends both one after the other, and a write per part would cost every answer a second system call, and its client a
second wake-up. What streams say leaves at the end of the loop's turn: whoever is woken by a write may take the
processor from here, and streams that come after it would wait for that with their words not even made.
"""

import asyncio
import logging
from time import monotonic
from typing import Any

_HEAD = b"HTTP/1.1 "
_INTERIM = b"HTTP/1.1 100"
# What is held of one stream: with more, whoever writes is to be told to wait.
MOST_HELD_BYTES = 16 << 10
_LOG = logging.getLogger("headrace.gateway")


class Turn:
    """The transports that hold something for the end of the loop's turn, in the order of what they hold."""

    __slots__ = ("_corks",)

    def __init__(self) -> None:
        self._corks: list[Corked] = []

    def add(self, cork: "Corked") -> None:
        if not self._corks:
            asyncio.get_running_loop().call_soon(self._end)
        self._corks.append(cork)

    def _end(self) -> None:
        corks, self._corks = self._corks, []
        for cork in corks:
            try:
                if not cork.is_closing():
                    cork.flush()
            except Exception:  # noqa: BLE001 - a loop of the top: one connection must not silence the others
                _LOG.exception("what a stream said could not be written")
                cork.abort()


class Corked:
    """Stands for the transport it is given, in all but writing. `written_bytes` is what was given to it, and `given_s`
    when the last of that was about to be: what its reader has is never older."""

    __slots__ = ("_held", "_transport", "_turn", "abort", "given_s", "is_closing", "written_bytes")

    def __init__(self, transport: asyncio.Transport, turn: Turn) -> None:
        self._transport = transport
        self._turn = turn
        self._held = b""
        self.written_bytes = 0
        self.given_s = 0.0
        # Asked for with every request.
        self.is_closing = transport.is_closing
        self.abort = transport.abort

    def write(self, data: bytes) -> None:
        self.written_bytes += len(data)
        if self._held:
            held, self._held = self._held, b""
            data = held + data
        elif data.startswith(_HEAD) and not data.startswith(_INTERIM):
            self._held = data
            return
        self.given_s = monotonic()
        self._transport.write(data)

    def write_soon(self, data: bytes) -> None:
        """At the end of the loop's turn, if nothing that is written before takes it along; at once where it is much."""
        self.written_bytes += len(data)
        self._held += data
        if len(self._held) > MOST_HELD_BYTES:
            self.flush()
        else:
            self._turn.add(self)

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self.given_s = monotonic()
            self._transport.write(held)

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
