"""The static pages, held in memory. Owns their names, types, tags and the headers that fence them in.

What is served is decided when this module loads: a path is looked up, never joined to a folder.
"""

import hashlib
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable

from msgspec import Struct

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Page(Struct, frozen=True):
    """One file as it is sent."""

    body: bytes
    content_type: str
    etag: str


class PageResponse(Struct, frozen=True):
    """What `http.response.start` and `http.response.body` of ASGI take. A HEAD request leaves the body out."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def load_pages(folder: Traversable) -> dict[str, Page]:
    """Pages by path: `index.html` is `/`, another `name.html` is `/name`, everything else `/static/name`."""
    pages = {}
    for file in folder.iterdir():
        stem, _, suffix = file.name.rpartition(".")
        if not stem or suffix not in _CONTENT_TYPES:
            continue
        body = file.read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        pages[_path_of(stem, suffix)] = Page(body=body, content_type=_CONTENT_TYPES[suffix], etag=tag)
    return pages


def page_response(path: str, headers: Mapping[str, str]) -> PageResponse | None:
    """The answer to GET or HEAD of `path`; None where no page has exactly this path. Header names in lower case."""
    page = PAGES.get(path)
    if page is None:
        return None
    is_known = _matches(headers.get("if-none-match", ""), page.etag)
    body = b"" if is_known else page.body
    sent = {
        "content-type": page.content_type,
        "etag": page.etag,
        # Asked for anew each time, answered by 304: a new version of the server is a new page at once.
        "cache-control": "no-cache",
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
    }
    if not is_known:
        sent["content-length"] = str(len(page.body))
    return PageResponse(
        status=304 if is_known else 200,
        headers=[(name.encode("ascii"), value.encode("ascii")) for name, value in sent.items()],
        body=body,
    )


def _path_of(stem: str, suffix: str) -> str:
    if suffix != "html":
        return f"/static/{stem}.{suffix}"
    return "/" if stem == "index" else f"/{stem}"


def _matches(if_none_match: str, etag: str) -> bool:
    offered = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
    return any(tag in ("*", etag) for tag in offered)


PAGES: dict[str, Page] = load_pages(resources.files("headrace.gateway") / "static")
