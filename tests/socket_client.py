"""A WebSocket client for tests: wsproto's own client side over a connection of asyncio, and what is said as JSON."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Message,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

PATIENCE_S = 60.0


class Refused(Exception):
    """The server did not upgrade."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(status, body)
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def code(self) -> str:
        code: str = json.loads(self.body)["error"]["code"]
        return code


class Closed(Exception):
    """The server closed, with this code; 1006: without a word."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class SocketClient:
    """Pings are answered while something is awaited, and counted as `pings`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._wire = WSConnection(ConnectionType.CLIENT)
        self._text = ""
        self.accepted: AcceptConnection | None = None
        self.answers_pings = True
        self.pings = 0
        self.pongs: list[bytes] = []

    async def open(
        self, key: str | None, *, headers: Mapping[str, str] | None = None, subprotocols: tuple[str, ...] = ()
    ) -> None:
        """Refused, with the answer, where it is not taken."""
        given = {} if key is None else {"authorization": f"Bearer {key}"}
        extra = [(name.encode(), value.encode()) for name, value in {**given, **(headers or {})}.items()]
        await self.send(Request("127.0.0.1", "/v1/stream", extra_headers=extra, subprotocols=list(subprotocols)))
        refused, body = RejectConnection(500), b""
        while True:
            event = await self.event()
            if isinstance(event, AcceptConnection):
                self.accepted = event
                return
            if isinstance(event, RejectConnection):
                refused = event
                if not event.has_body:
                    raise Refused(event.status_code, _plain(event), b"")
            elif isinstance(event, RejectData):
                body += event.data
                if event.body_finished:
                    raise Refused(refused.status_code, _plain(refused), body)

    async def send(self, *events: Event) -> None:
        await self.send_bytes(b"".join([self._wire.send(event) for event in events]))

    async def send_bytes(self, data: bytes) -> bool:
        """False where nobody is there to take them."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            return False
        return not self._writer.is_closing()

    async def say(self, **message: Any) -> None:
        await self.send(TextMessage(json.dumps(message)))

    async def event(self) -> Event:
        """The next; Closed where there is none."""
        while True:
            for event in self._wire.events():
                return event
            try:
                data = await asyncio.wait_for(self._reader.read(1 << 16), PATIENCE_S)
            except ConnectionError:
                data = b""
            if not data:
                raise Closed(1006)
            self._wire.receive_data(data)

    async def hear(self) -> dict[str, Any]:
        """The next message. Closed when the server closes."""
        while True:
            event = await self.event()
            if isinstance(event, CloseConnection):
                with contextlib.suppress(Exception):
                    await self.send(event.response())
                raise Closed(event.code)
            if isinstance(event, Ping):
                self.pings += 1
                if self.answers_pings:
                    await self.send(event.response())
            elif isinstance(event, Pong):
                self.pongs.append(bytes(event.payload))
            elif isinstance(event, Message):
                self._text += event.data
                if event.message_finished:
                    text, self._text = self._text, ""
                    heard: dict[str, Any] = json.loads(text)
                    return heard

    async def hear_end(self) -> list[dict[str, Any]]:
        """All up to and with the next `end`."""
        heard = [await self.hear()]
        while heard[-1]["type"] != "end":
            heard.append(await self.hear())
        return heard

    async def closing(self) -> int:
        """The code that the server closes with, whatever it says before."""
        try:
            while True:
                await self.hear()
        except Closed as closed:
            return closed.code

    async def leave(self) -> None:
        """Without a word."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def _plain(event: RejectConnection) -> dict[str, str]:
    return {name.decode().lower(): value.decode() for name, value in event.headers}


@contextlib.asynccontextmanager
async def connected(port: int, *, is_tls: bool = False) -> AsyncIterator[SocketClient]:
    """With TLS any certificate is good."""
    context = ssl.create_default_context() if is_tls else None
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = SocketClient(*await asyncio.open_connection("127.0.0.1", port, ssl=context))
    try:
        yield client
    finally:
        await client.leave()


@contextlib.asynccontextmanager
async def opened(port: int, key: str | None, *, is_tls: bool = False, **options: Any) -> AsyncIterator[SocketClient]:
    async with connected(port, is_tls=is_tls) as client:
        await client.open(key, **options)
        yield client
