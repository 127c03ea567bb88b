"""A client that takes one server-sent event a second, and no more than it has room for: what `serve_slow_readers` is about.

Its socket looks to the server like one far away: segments of an Ethernet's size and a small window, so that what it does
not read waits at the server and not in the kernel of a loopback device, which takes megabytes.
"""

import asyncio
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from serve_rig import Server

SEGMENT_BYTES = 1400
WINDOW_BYTES = 2048
TAKE_BYTES = 512
# Before it is connected an answer may take long: a thousand are asked for at once.
PATIENCE_S = 120.0


class Lost(Exception):
    """The connection ended before the stream did."""


@dataclass(slots=True)
class SlowReader:
    """One stream, a frame a second until the server has had enough of that; the rest at once, on another connection if
    need be. `frames` counts what came slowly, `behind` what was left for later."""

    one: Server
    id: str
    body: dict[str, Any]
    frames: int = 0
    behind: int = 0
    after: int = 0
    repeated: int = 0
    cut_s: float | None = None
    error: str = ""
    is_over: bool = False
    _buffer: bytearray = field(default_factory=bytearray)

    async def run(self) -> str:
        """How it ended."""
        try:
            await self._read("POST", "/v1/completions", is_slow=True)
        except (Lost, OSError):
            self.cut_s = time.monotonic()
        while not self.is_over and not self.error:
            try:
                await self._read("GET", f"/v1/streams/{self.id}?after={self.after}", is_slow=False)
            except (Lost, OSError) as lost:
                return f"lost: {lost}"
        return self.error or "finished"

    async def _read(self, method: str, path: str, *, is_slow: bool) -> None:
        url = urlsplit(self.one.url)
        connection = socket.socket()
        connection.setblocking(False)
        if is_slow:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        loop = asyncio.get_running_loop()
        self._buffer.clear()
        try:
            await loop.sock_connect(connection, (url.hostname, url.port))
            asked = json.dumps(self.body).encode() if method == "POST" else b""
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {self.one.key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(asked)}\r\nx-request-id: {self.id}\r\n\r\n"
            )
            await loop.sock_sendall(connection, head.encode() + asked)
            status = await asyncio.wait_for(self._line(connection, TAKE_BYTES), PATIENCE_S)
            if b" 200 " not in status:
                self.error = status.decode(errors="replace").strip()
                return
            await self._hear(connection, is_slow=is_slow)
        finally:
            connection.close()

    async def _hear(self, connection: socket.socket, *, is_slow: bool) -> None:
        due_s, number = time.monotonic(), 0
        while not self.is_over:
            line = await self._line(connection, TAKE_BYTES if is_slow else 1 << 16)
            if line.startswith(b"id: "):
                number = int(line[4:])
            elif line.startswith(b"data: [DONE]"):
                self.is_over = True
            elif line.startswith(b"data: {"):
                said = json.loads(line[6:])
                if "error" in said:  # where it was cut off this has the number of the last frame
                    self.error = said["error"]["code"]
                    continue
                self.repeated += number <= self.after
                self.after = number
                if is_slow:
                    self.frames += 1
                    due_s += 1.0
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                else:
                    self.behind += 1

    async def _line(self, connection: socket.socket, most_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        while (end := self._buffer.find(b"\n")) < 0:
            data = await loop.sock_recv(connection, most_bytes)
            if not data:
                raise Lost("closed")
            self._buffer += data
        line = bytes(self._buffer[: end + 1])
        del self._buffer[: end + 1]
        return line
