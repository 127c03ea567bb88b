"""The server's certificate. Owns the TLS context and takes new files into it while connections go on."""

import asyncio
import logging
import ssl
from pathlib import Path

_LOG = logging.getLogger("headrace.gateway")
POLL_S = 2.0


class Certificate:
    """Connections that are made after a change see the new files. Files that do not fit are left, and said so once."""

    def __init__(self, cert: str, key: str) -> None:
        self._paths = (Path(cert), Path(key))
        self._seen = self._marks()
        self.context = _load(*self._paths)

    def reload_if_changed(self) -> bool:
        """Whether new files are in use now."""
        marks = self._marks()
        if marks == self._seen or None in marks:
            return False
        self._seen = marks
        try:
            # Tried apart: a context that was given half of a pair would answer nobody.
            _load(*self._paths)
            self.context.load_cert_chain(*self._paths, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            _LOG.error("the new TLS files cannot be used, the old ones stay: %s", error)
            return False
        _LOG.info("new TLS certificate in use")
        return True

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.reload_if_changed()

    def _marks(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_mark, self._paths))


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _load(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key, password=_no_password)
    return context


def _no_password() -> str:
    """Without this a terminal would be asked, and the loop wait for it."""
    raise ssl.SSLError("the key is encrypted: give one that is not")
