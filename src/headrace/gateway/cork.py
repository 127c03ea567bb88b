"""A transport that holds an answer's head until its body follows, so that both leave in one write.

The application always sends a head and its first bytes one after the other: a write per part would cost every
answer a second system call, and its client a second wake-up.
"""

import asyncio
from time import monotonic
from typing import Any

_HEAD = b"HTTP/1.1 "
_INTERIM = b"HTTP/1.1 100"


class Corked:
    """Stands for the transport it is given, in all but writing. `written_bytes` is what was given to it, and `given_s`
    when the last of that was about to be: what its reader has is never older."""

    __slots__ = ("_held", "_transport", "given_s", "is_closing", "written_bytes")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.written_bytes = 0
        self.given_s = 0.0
        self.is_closing = transport.is_closing

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
