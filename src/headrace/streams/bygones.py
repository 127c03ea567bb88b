"""Streams that were kept once, and whose file is gone: so many digests as fit. Owns the indices that outlived their file.

Oldest go first; an index that tells of none goes at once. Knows that a stream was here, and nothing else of it.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from headrace.streams.roll import DIGEST_BYTES, find_digest

MAX_BYGONES = 100_000


class Bygones:
    __slots__ = ("_most", "_num", "_shelves")

    def __init__(self, most: int = MAX_BYGONES) -> None:
        self._most = most
        self._num = 0
        self._shelves: deque[tuple[bytes, Path]] = deque()

    def __len__(self) -> int:
        return self._num

    def __contains__(self, digest: bytes) -> bool:
        return any(find_digest(digests, digest, DIGEST_BYTES) >= 0 for digests, _ in self._shelves)

    def add(self, digests: bytes, path: Path) -> None:
        """Of the streams of one file, and where its index lies, if it has one."""
        self._shelves.extend(_telling([(digests, path)]))
        self._num += len(digests) // DIGEST_BYTES
        self._trim()

    def precede(self, older: Sequence[tuple[bytes, Path]]) -> None:
        """Those of files that went before all that are here."""
        self._shelves.extendleft(reversed(_telling(older)))
        self._num += sum(len(digests) // DIGEST_BYTES for digests, _ in older)
        self._trim()

    def _trim(self) -> None:
        # What is past the bound goes file by file; the newest stays, however many it tells of.
        while self._num > self._most and len(self._shelves) > 1:
            digests, path = self._shelves.popleft()
            self._num -= len(digests) // DIGEST_BYTES
            _unlink(path)


def _telling(shelves: Sequence[tuple[bytes, Path]]) -> list[tuple[bytes, Path]]:
    """Those that tell of any stream. Long ones lie in many files in which none was born."""
    for digests, path in shelves:
        if not digests:
            _unlink(path)
    return [shelf for shelf in shelves if shelf[0]]


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
