"""Tensors read in a thread of their own, some way ahead of who takes them: decoding lets other threads run, and so does
what becomes of the tensors.

Owns the thread and how far it may go. Knows no file.
"""

from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread

import numpy as np
from numpy.typing import NDArray

Named = tuple[str, NDArray[np.float32]]

_MOST_BYTES = 2**23


class ReadAhead:
    """To be iterated over once. What reading raises is raised as soon as it is known. `close` breaks it off after the tensor
    that is being read, and waits for the thread: the files may be closed after it."""

    def __init__(self, tensors: Iterator[Named], most_bytes: int = _MOST_BYTES) -> None:
        """Reads on while what waits to be taken, and what was taken last, are less than `most_bytes`: beside a tensor that is
        larger than that none is held."""
        self._tensors = tensors
        self._most_bytes = most_bytes
        self._changed = Condition()
        self._waiting: deque[Named] = deque()
        self._held_bytes = self._taken_bytes = 0
        self._is_closed = self._is_over = False
        self._error: BaseException | None = None
        self._thread = Thread(target=self._read, name="read ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> "ReadAhead":
        return self

    def __next__(self) -> Named:
        with self._changed:
            self._held_bytes -= self._taken_bytes
            self._taken_bytes = 0
            self._changed.notify()
            self._changed.wait_for(lambda: self._waiting or self._is_over)
            if self._error is not None:
                raise self._error
            if not self._waiting:
                raise StopIteration
            found = self._waiting.popleft()
            self._taken_bytes = found[1].nbytes
            return found

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._waiting.clear()

    def _read(self) -> None:
        try:
            for found in self._tensors:
                if not self._put(found):
                    break
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is for who takes the tensors
            self._error = error
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _put(self, found: Named) -> bool:
        with self._changed:
            self._waiting.append(found)
            self._held_bytes += found[1].nbytes
            self._changed.notify()
            self._changed.wait_for(lambda: self._is_closed or self._held_bytes < self._most_bytes)
            return not self._is_closed
