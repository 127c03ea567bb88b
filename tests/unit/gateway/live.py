"""An app behind a real port, and bytes sent to it as they are."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace.gateway.app import Gateway
from headrace.gateway.server import serve

# A machine may have much else to do.
PATIENCE_S = 60.0


class Live:
    def __init__(self, app: Gateway, port: int, stop: asyncio.Event, done: "asyncio.Task[None]") -> None:
        self.app = app
        self.port = port
        self.stop = stop
        self.done = done
        self.retire = asyncio.Event()
        self.hurry = asyncio.Event()
        self.wires: list[Wire] = []

    async def connect(self, *, is_tls: bool = False) -> "Wire":
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.port, ssl=trusting() if is_tls else None))
        self.wires.append(wire)
        return wire


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *parts: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                self._writer.write(part)
                await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of one answer with a length."""
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await asyncio.wait_for(self._reader.readexactly(int(length.split(b":")[1])), PATIENCE_S)
        return int(head.split()[1]), body

    async def line(self) -> bytes:
        return await asyncio.wait_for(self._reader.readline(), PATIENCE_S)

    async def some(self, most: int) -> bytes:
        return await asyncio.wait_for(self._reader.read(most), PATIENCE_S)

    async def rest(self) -> bytes:
        """All until the server closes."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(self._reader.read(), PATIENCE_S)
        return b""

    async def say_all(self, *parts: bytes) -> None:
        """Send, and close this way of the connection."""
        self._writer.writelines(parts)
        self._writer.write_eof()
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await self._writer.wait_closed()


def trusting() -> ssl.SSLContext:
    """A client's that takes any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def write_pair(folder: Path, name: str) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return str(cert_path), str(key_path)


@contextlib.asynccontextmanager
async def running(app: Gateway) -> AsyncIterator[Live]:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    stop, started = asyncio.Event(), asyncio.Event()
    retire, hurry = asyncio.Event(), asyncio.Event()
    serving = serve(app, [listening], app.context.config, stop, retire=retire, hurry=hurry, started=started)
    done = asyncio.create_task(serving)
    await asyncio.wait_for(started.wait(), PATIENCE_S)
    live = Live(app, port, stop, done)
    live.retire, live.hurry = retire, hurry
    try:
        yield live
    finally:
        for wire in live.wires:
            await wire.close()
        stop.set()
        await asyncio.wait_for(done, PATIENCE_S)


def play(story: Coroutine[Any, Any, None]) -> None:
    """On the loop that the product runs on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story)
