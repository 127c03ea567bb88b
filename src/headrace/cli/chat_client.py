"""A client of the chat API on the standard library. Owns one request at a time; keeps no history."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from headrace.core.errors import HeadraceError, InvalidInput

# Where `headrace serve` listens if nobody says otherwise.
USUAL_URL = "http://127.0.0.1:8080"
_SILENCE_S = 120.0
_MOST_LINE_BYTES = 1 << 20


class Message(Struct, frozen=True):
    role: str
    content: str


class ServerError(HeadraceError):
    """What the server answered instead of a reply."""

    code = "server_error"


class NotReady(ServerError):
    """No worker of the model is there now; one that starts, or starts again, will be."""

    code = "unreachable"
    status = 503


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Problem(Struct):
    message: str = "the server gave no reason"
    # Some servers have numbers here.
    code: Any = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    error: _Problem | None = None


class ChatClient:
    """`fields` go into every request as they are; those that are None are left out."""

    def __init__(self, url: str, key: str, fields: Mapping[str, Any], *, cacert: str | None = None) -> None:
        self._scheme, self._host, self._port, path = parse_url(url)
        self._base = f"{path.rstrip('/').removesuffix('/v1')}/v1"
        self._key = key
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._cacert = cacert
        # Whether the last reply ended because it was long enough.
        self.is_cut = False

    def knock(self) -> None:
        """Raises ServerError where nobody is there, or the key is not taken."""
        with self._connected() as connection:
            connection.request("GET", f"{self._base}/models", headers={"Authorization": f"Bearer {self._key}"})
            response = connection.getresponse()
            # Not every server that talks can name its models.
            if response.status not in (200, 404):
                raise _refusal(response)

    def reply(self, messages: Sequence[Message]) -> Iterator[str]:
        """The reply's text as it comes. Leaving the iterator ends the reply. Raises ServerError; before any text NotReady."""
        with self._connected() as connection:
            yield from self._stream(connection, messages)

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        connection = self._connect()
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            where = f"{self._scheme}://{self._host}{f':{self._port}' if self._port else ''}"
            raise ServerError(
                f"{where}: {reason}; is a server running there? (headrace serve; --url says where)"
            ) from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._scheme == "http":
            return http.client.HTTPConnection(self._host, self._port, timeout=_SILENCE_S)
        try:
            context = ssl.create_default_context(cafile=self._cacert)
        except (OSError, ssl.SSLError):
            raise InvalidInput(f"--cacert {self._cacert}: not a certificate", param="--cacert") from None
        return http.client.HTTPSConnection(self._host, self._port, timeout=_SILENCE_S, context=context)

    def _stream(self, connection: http.client.HTTPConnection, messages: Sequence[Message]) -> Iterator[str]:
        body = {**self._fields, "stream": True, "messages": messages}
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        # Who closes the connection wants no more of the reply.
        headers["X-Headrace-On-Disconnect"] = "cancel"
        connection.request("POST", f"{self._base}/chat/completions", msgspec.json.encode(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(response)
        self.is_cut = False
        while line := response.readline(_MOST_LINE_BYTES):
            data = line.rstrip(b"\r\n")
            if not data.startswith(b"data:"):
                continue
            if data == b"data: [DONE]":
                return
            chunk = _decode(data[5:])
            if chunk.error is not None:
                raise ServerError(chunk.error.message)
            for choice in chunk.choices:
                self.is_cut |= choice.finish_reason == "length"
                if choice.delta.content:
                    yield choice.delta.content
        raise ServerError("the reply broke off")


def parse_url(url: str) -> tuple[str, str, int | None, str]:
    """Scheme, host, port and path of a server's address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise InvalidInput(f"--url {url[:200]!r} is not http://host:port", param="--url")
    return parts.scheme, host, port, parts.path


def _decode(data: bytes) -> _Chunk:
    try:
        return msgspec.json.decode(data, type=_Chunk)
    except msgspec.MsgspecError:
        raise ServerError("the server sent what is no chunk of a reply") from None


def _refusal(response: http.client.HTTPResponse) -> ServerError:
    body = response.read(_MOST_LINE_BYTES)
    try:
        problem = msgspec.json.decode(body, type=_Chunk).error
    except msgspec.MsgspecError:
        problem = None
    retry = response.getheader("Retry-After")
    again = f"; try again in {retry} s" if retry else ""
    is_coming = response.status == NotReady.status and problem is not None and problem.code == NotReady.code
    kind = NotReady if is_coming else ServerError
    return kind(f"{response.status}: {problem.message if problem else response.reason}{again}")
