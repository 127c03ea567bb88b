"""HTTP/1.1 for a load: connections that are kept, replies as callbacks, no task per request.

Owns sockets and the pool of them. Knows nothing of what requests say, and takes the time of every piece of a reply
as it comes from the socket: an event loop's own clock is too coarse to measure with.
"""

import asyncio
import ssl
import time
from collections import deque
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

from headrace.core.errors import HeadraceError, InvalidInput

# A server may close what is idle at any moment; what was used just now is safe to use again.
_IDLE_S = 2.0


class Endpoint(Struct, frozen=True):
    """Where a server listens."""

    scheme: str
    host: str
    port: int
    path: str = ""
    ca: str | None = None

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def head(self, method: str, path: str, key: str | None, length: int | None = None) -> bytes:
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"host: {self.authority}", "user-agent: headrace-bench"]
        if key:
            lines.append(f"authorization: Bearer {key}")
        if length is not None:
            lines += ["content-type: application/json", f"content-length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_url(url: str, ca: str | None = None) -> Endpoint:
    """`http://HOST:PORT`, with or without `/v1` at its end."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not url.isprintable():
        raise InvalidInput(f"--url must be like http://127.0.0.1:8080, not {url[:80]!r}", param="--url")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), path, ca)


class Answer(Protocol):
    """Who waits for a reply. `on_end` comes once, last, and says in words what broke, if anything did."""

    is_over: bool

    def on_sent(self, connection: "Connection", now_s: float) -> None: ...

    def on_head(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None: ...

    def on_data(self, data: bytes, now_s: float) -> None: ...

    def on_end(self, broken: str | None, now_s: float) -> None: ...


class Connection(asyncio.Protocol):
    """One request at a time. What comes after its owner dropped it is nobody's."""

    __slots__ = ("_answer", "_headers", "_parser", "_pool", "_transport", "_until_close", "idle_since_s", "now_s")

    def __init__(self, pool: "Pool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._headers: dict[bytes, bytes] = {}
        self._until_close = False
        self.idle_since_s = 0.0
        self.now_s = 0.0

    def send(self, request: bytes, answer: Answer) -> None:
        assert self._answer is None and self._transport is not None
        self._answer = answer
        self._headers = {}
        # The time before: a server on the same core may have answered when the write returns.
        now_s = time.perf_counter()
        self._transport.write(request)
        answer.on_sent(self, now_s)

    def drop(self, *, reset: bool = False) -> None:
        """Leave in the middle of a reply, politely or not."""
        self._answer = None
        if self._transport is not None:
            if reset:
                self._transport.abort()
            else:
                self._transport.close()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.now_s = time.perf_counter()
        self._pool.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, HeadraceError) as error:
            self._end(f"a malformed reply: {error}")
            self.drop(reset=True)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.now_s = time.perf_counter()
        if self._answer is not None:
            whole = self._until_close and error is None
            self._end(None if whole else f"the connection closed within a reply ({error or 'end of file'})")
        self._pool.forget(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        headers = self._headers
        self._until_close = b"content-length" not in headers and b"transfer-encoding" not in headers
        if self._answer is not None:
            self._answer.on_head(self._parser.get_status_code(), headers, self.now_s)

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.on_data(data, self.now_s)

    def on_message_complete(self) -> None:
        if self._answer is None:
            return
        keep = self._parser.should_keep_alive() and self.is_open
        self._end(None)
        if keep:
            self._pool.give_back(self)
        else:
            self.drop()

    def _end(self, broken: str | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.on_end(broken, self.now_s)


class Pool:
    """Connections to one endpoint, dialled when none is idle, at most `most` of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, endpoint: Endpoint, most: int = 20_000) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._most = most
        self._address = endpoint.host
        self._tls: ssl.SSLContext | None = None
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._dials: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[bytes, Answer]] = deque()
        self.received_bytes = 0
        self.dialled = 0

    async def start(self) -> None:
        """Find the address once. Raises InvalidInput for a name that nobody knows."""
        try:
            found = await self._loop.getaddrinfo(self._endpoint.host, self._endpoint.port, type=1)
            self._address = str(found[0][4][0])
            if self._endpoint.scheme == "https":
                self._tls = ssl.create_default_context(cafile=self._endpoint.ca)
        except OSError as error:
            raise InvalidInput(f"--url: {self._endpoint.host}: {error.strerror or error}", param="--url") from None

    def send(self, request: bytes, answer: Answer) -> None:
        """At once where a connection is idle, else when one is there."""
        horizon_s = time.perf_counter() - _IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since_s >= horizon_s:
                connection.send(request, answer)
                return
            connection.drop()
        self._waiting.append((request, answer))
        if len(self._open) + len(self._dials) < self._most:
            self._dial()

    def give_back(self, connection: Connection) -> None:
        while self._waiting:
            request, answer = self._waiting.popleft()
            if not answer.is_over:
                connection.send(request, answer)
                return
        connection.idle_since_s = time.perf_counter()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if self._waiting and len(self._dials) < len(self._waiting):
            self._dial()

    async def close(self) -> None:
        self._waiting.clear()
        for task in self._dials:
            task.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        for connection in list(self._open):
            # At once: a polite end of TLS waits for the other side.
            connection.drop(reset=True)
        while self._open:
            await asyncio.sleep(0)

    def _dial(self) -> None:
        task = self._loop.create_task(self._connect())
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _connect(self) -> None:
        name = self._endpoint.host if self._tls else None
        self.dialled += 1
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self), self._address, self._endpoint.port, ssl=self._tls, server_hostname=name
            )
        except OSError as error:
            self._refuse(f"no connection: {error.strerror or error}")
            return
        self._open.add(connection)
        self.give_back(connection)

    def _refuse(self, why: str) -> None:
        """One dial failed: one of those who wait is told."""
        while self._waiting:
            _, answer = self._waiting.popleft()
            if not answer.is_over:
                answer.on_end(why, time.perf_counter())
                return


class Fetched:
    """A whole reply, for the few questions asked outside the load."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_over = False
        self.status = 0
        self.body = b""
        self.done: asyncio.Future[None] = loop.create_future()

    def on_sent(self, connection: Connection, now_s: float) -> None:
        """Nothing to note."""

    def on_head(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None:
        self.status = status

    def on_data(self, data: bytes, now_s: float) -> None:
        self.body += data

    def on_end(self, broken: str | None, now_s: float) -> None:
        self.is_over = True
        if not self.done.done():
            if broken is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(HeadraceError(broken))


async def fetch(pool: Pool, request: bytes, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Status and body. Raises HeadraceError when there is no answer."""
    answer = Fetched(asyncio.get_running_loop())
    pool.send(request, answer)
    try:
        async with asyncio.timeout(timeout_s):
            await answer.done
    except TimeoutError:
        raise HeadraceError(f"no answer within {timeout_s:g} s") from None
    return answer.status, answer.body
