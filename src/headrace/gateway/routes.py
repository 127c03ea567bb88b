"""The routes: what is answered, by whom, to whom. Owns matching; authentication is a part of a route.

Decided on the path as it came, byte by byte: nothing is decoded, joined or redirected first. A path that is not
in the table is not public.
"""

import re
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from msgspec import Struct

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange

Endpoint = Callable[["Exchange", Any], Awaitable[None]]
_SEGMENT = rb"[A-Za-z0-9._:@+~-]+"
# A name may hold / : @ + as they are or escaped, in either case.
_SEGMENTS = rb"(?:[A-Za-z0-9._:@+~/-]|%(?:2[Ff]|3[Aa]|40|2[Bb]))+"
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")
MAX_PATH_BYTES = 1024


class Access(Enum):
    """PUBLIC needs nothing, KEY a key we know, METRICS a peer on this machine or a key of that scope."""

    PUBLIC = "public"
    KEY = "key"
    METRICS = "metrics"


class Route(Struct, frozen=True):
    """`path` may hold `{name}`, one segment, and end in `{name:path}`, one or more. `endpoint(exchange, service)`.

    `body`, `reply` and `query`, the fields of a query, are for the OpenAPI document; `events` marks a reply that may be
    a stream. `is_probe`: also
    answered while the server is full, drains, or is asked by another name.
    """

    method: str
    path: str
    access: Access
    endpoint: Endpoint
    summary: str
    body: type | None = None
    reply: type | None = None
    query: tuple[str, ...] = ()
    events: bool = False
    media: str = "application/json"
    is_probe: bool = False
    # Shown in the document.
    listed: bool = True


class Resource:
    """What is behind one path: its routes by method. All of them have the same access."""

    __slots__ = ("access", "allow", "is_probe", "path", "routes")

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = {route.method: route for route in routes}
        first = next(iter(self.routes.values()))
        if any(route.access is not first.access for route in self.routes.values()):
            raise ValueError(f"{first.path}: all methods of a path have the same access")
        self.path = first.path
        self.access = first.access
        self.is_probe = first.is_probe
        if "GET" in self.routes:
            self.routes["HEAD"] = self.routes["GET"]
        self.allow = ", ".join(sorted(self.routes))


class RouteTable:
    """All routes. `find` is one dictionary look-up for a path without parameters."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        by_path: dict[str, list[Route]] = {}
        for route in self.routes:
            known = by_path.setdefault(route.path, [])
            if any(other.method == route.method for other in known):
                raise ValueError(f"two routes for {route.method} {route.path}")
            known.append(route)
        self._exact = {path.encode(): Resource(same) for path, same in by_path.items() if "{" not in path}
        self._patterns = [(_pattern(path), Resource(same)) for path, same in by_path.items() if "{" in path]

    def find(self, raw_path: bytes) -> tuple[Resource | None, dict[str, str]]:
        resource = self._exact.get(raw_path)
        if resource is not None:
            return resource, {}
        if len(raw_path) <= MAX_PATH_BYTES:
            for pattern, resource in self._patterns:
                match = pattern.fullmatch(raw_path)
                if match is not None:
                    found = {name: unquote_to_bytes(value).decode() for name, value in match.groupdict().items()}
                    return (resource, found) if all(map(_is_plain, found.values())) else (None, {})
        return None, {}


def _is_plain(value: str) -> bool:
    return not any(segment in ("", ".", "..") for segment in value.split("/"))


def _pattern(path: str) -> re.Pattern[bytes]:
    parts: list[bytes] = []
    end = 0
    for match in _PARAMETER.finditer(path):
        name, many = match.group(1).encode(), match.group(2)
        segment = _SEGMENTS if many else _SEGMENT
        parts += [re.escape(path[end : match.start()].encode()), rb"(?P<%b>%b)" % (name, segment)]
        end = match.end()
    parts.append(re.escape(path[end:].encode()))
    return re.compile(b"".join(parts))
