"""Who may come in: by which name this server is asked, from which page, with which key. Owns these decisions.

A name is checked because a page elsewhere can make its own name point here; it cannot change what the browser then
sends as Host and Origin.
"""

import ipaddress
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import methodcaller

from headrace.accounts.keys import MAX_KEY_BYTES, KeyRing
from headrace.core.caller import Caller
from headrace.core.config import GatewayConfig
from headrace.core.errors import Forbidden, InvalidInput, Refused, Unauthenticated

_LOG = logging.getLogger("headrace.gateway")
_SCHEME = "Bearer "
_SAFE_METHODS = ("GET", "HEAD")
# Given twice, two readers of one request could believe different ones.
_SINGLE = frozenset(
    {b"authorization", b"x-api-key", b"host", b"content-length", b"content-type", b"origin", b"content-encoding"}
)
_MAX_KNOWN_HOSTS = 1000
_decoded = methodcaller("decode", "latin-1")


def plain_headers(raw: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """By lower-case name. InvalidInput where one that must be alone is not."""
    texts = map(_decoded, chain.from_iterable(raw))
    headers = dict(zip(texts, texts, strict=True))  # of each pair the name, and then the value
    return headers if len(headers) == len(raw) else _joined(raw)


def _joined(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Where some come more than once."""
    headers: dict[str, str] = {}
    for name, value in raw:
        key = name.decode("latin-1")
        if key in headers:
            if name in _SINGLE:
                raise InvalidInput(f"The header {key} is there twice.")
            headers[key] += ", " + value.decode("latin-1")
        else:
            headers[key] = value.decode("latin-1")
    return headers


class Door:
    __slots__ = ("_any_host", "_hosts", "_keys", "_listens_wide", "_origins", "_seen")

    def __init__(self, keys: KeyRing, config: GatewayConfig) -> None:
        self._keys = keys
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        self._hosts = {"localhost", _bare(config.host), *map(_bare, config.allowed_hosts)}
        self._any_host = "*" in config.allowed_hosts
        self._listens_wide = not _is_loopback(_bare(config.host))
        self._origins = {origin.lower().rstrip("/") for origin in config.allowed_origins}
        # Host headers as they come, once they were found good.
        self._seen: set[str] = set()

    def check_host(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if host in self._seen or self._any_host:
            return
        if not self._is_known_host(host):
            raise Forbidden("This server does not answer to that Host. The setting is gateway.allowed_hosts.")
        if len(self._seen) < _MAX_KNOWN_HOSTS:
            self._seen.add(host)

    def _is_known_host(self, host: str) -> bool:
        name = _bare(host)
        if name in self._hosts or _is_loopback(name):
            return True
        # A page that rebinds a name shows that name, never an address.
        return self._listens_wide and _address(name) is not None

    def check_origin(self, method: str, headers: Mapping[str, str]) -> bool:
        """Whether the request is from a page elsewhere that may call. Forbidden: from one that may not change things."""
        origin = headers.get("origin")
        if origin is None:
            return False
        origin = origin.lower()
        if origin in self._origins:
            return True
        if method not in _SAFE_METHODS and origin.partition("://")[2] != headers.get("host", "").lower():
            raise Forbidden("Pages of that Origin may not call this server. The setting is gateway.allowed_origins.")
        return False

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """By `Authorization: Bearer` or `x-api-key`, and nothing else. Unauthenticated without a key that we know."""
        bearer = headers.get("authorization")
        key = headers.get("x-api-key")
        if bearer is not None:
            if not bearer.startswith(_SCHEME):
                raise Unauthenticated("Give your key as: Authorization: Bearer KEY")
            if key is not None and key != bearer[len(_SCHEME) :]:
                raise InvalidInput("Two different keys: give one of Authorization and x-api-key.")
            key = bearer[len(_SCHEME) :]
        if not key or len(key) > MAX_KEY_BYTES or key != key.strip():
            raise Unauthenticated("Give your key as: Authorization: Bearer KEY")
        try:
            caller = self._keys.find(key)
        except Exception:  # noqa: BLE001 - whatever keeps keys from being checked lets nobody in
            _LOG.exception("keys cannot be checked")
            raise Refused("Keys cannot be checked now. Try again shortly.", retry_after_s=1.0) from None
        if caller is None:
            raise Unauthenticated("This key is not known here.")
        return caller


def is_loopback_peer(address: str) -> bool:
    return _is_loopback(address)


def _bare(host: str) -> str:
    """Without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and ":" not in name and port.isdecimal() else host


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return name == "localhost" if address is None else address.is_loopback
