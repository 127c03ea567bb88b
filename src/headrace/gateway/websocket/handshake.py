"""The offer to go on as a WebSocket (RFC 6455, section 4): what it must hold, and the answer that takes it. Pure.

A page in a browser cannot set headers: it gives its key as a subprotocol, `headrace.key.KEY`, beside `headrace.v1`.
"""

import asyncio
import base64
import binascii
from collections.abc import Iterable, Mapping, MutableSet
from typing import Any, Protocol

from wsproto.utilities import generate_accept_token

from headrace.core.errors import InvalidInput
from headrace.gateway.errors import UpgradeRequired

PATH = "/v1/stream"
SUBPROTOCOL = "headrace.v1"
VERSION = "13"
_KEY_PREFIX = b"headrace.key."
_KEY_BYTES = 16

RawHeaders = list[tuple[bytes, bytes]]


class Offer(Protocol):
    """A connection that may become another protocol's. `connections` are those that the server waits for at its end."""

    @property
    def connections(self) -> MutableSet[Any]: ...

    def become(self, head: bytes, protocol: asyncio.Protocol) -> bool:
        """False where its client has left."""


def is_offer(method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request that offers an upgrade offers this one. One with a body does not."""
    if method != b"GET" or url.partition(b"?")[0] != PATH.encode():
        return False
    found = dict(headers)
    is_bare = b"content-length" not in found and b"transfer-encoding" not in found
    return is_bare and found.get(b"upgrade", b"").strip().lower() == b"websocket"


def with_key(headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
    """The headers of an offer with its key where all requests have it, and nowhere else. A key beside another that is
    there already is not taken for it: who checks keys sees both."""
    found: RawHeaders = []
    for name, value in headers:
        if name == b"sec-websocket-protocol":
            offered = [each.strip() for each in value.split(b",")]
            found += [(b"x-api-key", each[len(_KEY_PREFIX) :]) for each in offered if each.startswith(_KEY_PREFIX)]
            value = b", ".join([each for each in offered if not each.startswith(_KEY_PREFIX)])
            if not value:
                continue
        found.append((name, value))
    return found


def accept(headers: Mapping[str, str]) -> bytes:
    """The head of the answer. UpgradeRequired for another version, InvalidInput for what is no offer of ours."""
    if headers.get("sec-websocket-version", "").strip() != VERSION:
        raise UpgradeRequired(f"WebSocket version {VERSION} is spoken here.")
    key = headers.get("sec-websocket-key", "").strip()
    if not _is_nonce(key):
        raise InvalidInput("Sec-WebSocket-Key must be 16 bytes in base64.", param="Sec-WebSocket-Key")
    lines = [
        b"HTTP/1.1 101 Switching Protocols",
        b"upgrade: websocket",
        b"connection: Upgrade",
        b"sec-websocket-accept: " + generate_accept_token(key.encode("ascii")),
    ]
    offered = headers.get("sec-websocket-protocol")
    if offered is not None:
        if SUBPROTOCOL not in [each.strip() for each in offered.split(",")]:
            raise InvalidInput(f"The subprotocol here is {SUBPROTOCOL}.", param="Sec-WebSocket-Protocol")
        lines.append(b"sec-websocket-protocol: " + SUBPROTOCOL.encode("ascii"))
    return b"\r\n".join((*lines, b"", b""))


def _is_nonce(text: str) -> bool:
    try:
        return len(base64.b64decode(text.encode("ascii"), validate=True)) == _KEY_BYTES
    except (UnicodeError, binascii.Error):
        return False
