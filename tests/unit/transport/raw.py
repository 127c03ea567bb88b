"""A client of a unix socket that says whatever it likes."""

import asyncio
import socket
from types import TracebackType


class RawClient:
    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

    async def __aenter__(self) -> "RawClient":
        await asyncio.get_running_loop().sock_connect(self._socket, self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    async def say(self, data: bytes) -> bool:
        """Whether the other end was still there to take it."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def leave(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    async def hear_all(self) -> bytes:
        """Everything until the other end closes."""
        heard = b""
        while True:
            try:
                part = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
            except ConnectionResetError:
                return heard
            if not part:
                return heard
            heard += part
