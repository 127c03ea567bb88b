"""One URL into one file, going on where an earlier attempt ended. Knows neither wheels nor models.

Owns the `.part` file: what is in it stays until the download is complete or its hash turns out wrong.
"""

import hashlib
import http.client
import re
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.core.errors import FetchFailed, InvalidModel
from headrace.weights.package_index import Network
from headrace.weights.weight_file import Progress

_MOST_BYTES = 2**36
_CHUNK_BYTES = 2**18
_FRUITLESS_ATTEMPTS = 2
_SCHEMES = ("https", "http", "file")
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class _Broken(Exception):
    """The other side went away; what has arrived is kept."""


def download(url: str, part: Path, sha256: str, network: Network, progress: Progress | None = None) -> None:
    """Fill `part` from `url`, continuing what is there, and check it against `sha256` unless that is ""."""
    if urlsplit(url).scheme not in _SCHEMES:
        told = f"is not a kind of URL that is fetched: {', '.join(_SCHEMES)} are"
        raise InvalidModel(f"{urlsplit(url).scheme}: {told}")
    if "@" in urlsplit(url).netloc:
        raise InvalidModel(f"{_shown(url)}: a URL with a password in it is not fetched")
    opener = _opener(network)
    fruitless = 0
    while True:
        before = _size(part)
        try:
            _continue(opener, url, part, network.timeout_s, progress)
            break
        except _Broken as broken:
            fruitless = 0 if _size(part) > before else fruitless + 1
            if fruitless == _FRUITLESS_ATTEMPTS:
                kept = f" ({_size(part)} bytes are kept: run it again to go on)" if _size(part) else ""
                raise FetchFailed(f"{_shown(url)} could not be downloaded: {broken}{kept}") from broken
    if sha256 and hash_file(part) != sha256:
        part.unlink()
        raise InvalidModel(f"{_shown(url)}: what was downloaded does not have the index's hash; it was deleted")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _continue(
    opener: urllib.request.OpenerDirector, url: str, part: Path, timeout_s: float, progress: Progress | None
) -> None:
    have = _size(part)
    with _open(opener, url, have, timeout_s) as response:
        start, total = _extent(response, have)
        if start != have:
            have = 0
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            while chunk := _read(response):
                have += len(chunk)
                if have > (total or _MOST_BYTES):
                    raise InvalidModel(f"{_shown(url)}: sends more than it announced")
                file.write(chunk)
                if progress is not None:
                    progress(have, max(total, have))
    if have < total:
        raise _Broken(f"the connection broke at byte {have} of {total}")


def _open(opener: urllib.request.OpenerDirector, url: str, have: int, timeout_s: float) -> Any:
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        return opener.open(urllib.request.Request(url, headers=headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:  # there is nothing after what we have: begin again, the hash decides
                return _open(opener, url, 0, timeout_s)
            if error.code >= 500:
                raise _Broken(f"the server says {error.code}") from error
            raise FetchFailed(f"{_shown(url)} could not be downloaded: the server says {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(str(getattr(error, "reason", error))) from error


def _read(response: Any) -> bytes:
    try:
        chunk: bytes = response.read(_CHUNK_BYTES)
        return chunk
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(f"the connection broke ({error})") from error


def _extent(response: Any, have: int) -> tuple[int, int]:
    """Where the answer starts, and how long the whole is (0: not said)."""
    match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if response.status == 206 and match is not None and int(match[1]) == have:
        total = 0 if match[2] == "*" else int(match[2])
        return have, _bounded(total)
    if response.status == 206:
        raise _Broken("the server sends another part than was asked for")
    length = response.headers.get("Content-Length", "0")
    return 0, _bounded(int(length) if length.isdecimal() else 0)


def _bounded(total: int) -> int:
    if total > _MOST_BYTES:
        raise InvalidModel(f"the download would have {total} bytes, more than {_MOST_BYTES}")
    return total


def _opener(network: Network) -> urllib.request.OpenerDirector:
    try:
        context = ssl.create_default_context(cafile=network.cafile)
    except (OSError, ssl.SSLError) as error:
        raise FetchFailed(f"{network.cafile}: the certificates that pip is set to use cannot be read") from error
    proxies = None if network.proxy is None else {"http": network.proxy, "https": network.proxy}
    return urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=context)
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _shown(url: str) -> str:
    """Without what may be a secret: user, password, query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
