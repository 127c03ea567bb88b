"""Links between hosts: TLS 1.3 in which both ends show a certificate of one authority.

Owns addresses `host:port` and the two sides' contexts. Whoever has no certificate never reaches the wire.
"""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidInput
from headrace.core.ports import Link, Listener
from headrace.transport.connection import SocketListener, dial
from headrace.transport.reception import ReceiverFactory, Reception
from headrace.transport.wire import Limits

# Sent and not confirmed for so long: the other host is gone, whatever TCP still hopes.
_UNCONFIRMED_MS = 10_000


class TlsNetwork:
    """`cert` and `key` are this end's, `ca` signs whom it believes: PEM files, read once. The name or IP address that
    is dialled must be in the other end's certificate."""

    def __init__(self, cert: Path, key: Path, ca: Path, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca)
        self._server.num_tickets = 0  # nobody resumes, so nothing of a session is kept

    async def dial(self, address: str, receiver: ReceiverFactory, incoming: Any) -> Link:
        host, port = _split(address)
        loop = asyncio.get_running_loop()
        return await dial(
            address,
            lambda make: loop.create_connection(
                make,
                host,
                port,
                ssl=self._client,
                server_hostname=host,
                ssl_handshake_timeout=self._limits.greeting_s,
                ssl_shutdown_timeout=self._limits.linger_s,
            ),
            Reception(receiver, incoming),
            self._limits,
            _meet,
        )

    async def listen(self, address: str, receiver: ReceiverFactory, incoming: Any) -> Listener:
        """Port 0 takes a free one, which the listener's address names."""
        host, port = _split(address)
        listener = SocketListener(Reception(receiver, incoming), self._limits, _meet, address)
        try:
            server = await asyncio.get_running_loop().create_server(
                listener.accept,
                host,
                port,
                ssl=self._server,
                ssl_handshake_timeout=self._limits.greeting_s,
                ssl_shutdown_timeout=self._limits.linger_s,
            )
        except OSError as error:
            raise InvalidInput(f"cannot listen at {address}: {error.strerror or error}", param="address") from error
        listener.serve(server, _join(host, server.sockets[0].getsockname()[1]))
        return listener


def _context(protocol: int, cert: Path, key: Path, ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise InvalidInput(f"{ca} is not an authority's certificate: {error.strerror or error}", param="ca") from error
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{cert} and {key} are not a certificate and its key: {error}", param="cert") from error
    return context


def _refuse_password() -> str:
    """OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted")


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InvalidInput(f"an address is host:port, not {address!r}", param="address")
    return host, int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _meet(transport: asyncio.Transport) -> str:
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNCONFIRMED_MS)
    host, port = (transport.get_extra_info("peername") or ("unknown", 0))[:2]
    return _join(host, port)
