"""One file of tensors: an open descriptor, where the tensors lie, and one pass over its bytes.

Owns reading and hashing: every byte of the file is read once, in order, hashed, and if it belongs to a tensor decoded
or poured as it is. Who has something to wait for before it can pour has the file hashed ahead, and reads it once more.
Nothing is mapped, so a file that shrinks under us is an error and not a signal. Knows no file format and no model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.core.errors import InvalidModel
from headrace.core.proc import new_pages

if TYPE_CHECKING:
    from headrace.weights.encodings import Encoding

Progress = Callable[[int, int], None]  # bytes done, bytes in all

# Decoding works best in a slice that stays in the cache; hashing and skipping do not care.
_SLICE_BYTES = 2**17
_SKIP_BYTES = 2**20
# Larger arrays are new memory each time, whoever is asked for them.
_LARGE_BYTES = 2**25
# Long: between slices a thread must get the interpreter back from one that imports modules.
_AHEAD_BYTES = 2**24


class StoredTensor(Struct, frozen=True):
    """Where a tensor lies in its file. `paired_heads`: its rows are that many heads with interleaved halves."""

    name: str
    dims: tuple[int, ...]
    encoding: Encoding
    offset: int
    size_bytes: int
    paired_heads: int = 0


class Advance(Protocol):
    def __call__(self, size_bytes: int) -> None: ...


class Tap(Protocol):
    """Where one thread pours what it reads, as it is stored."""

    def lend(self) -> memoryview:
        """Room for the next slice: of at least one block, and its borrower's until it is taken."""
        ...

    def take(self, tensor: StoredTensor, start: int, raw: memoryview) -> None:
        """What was read into the room that was lent last: whole blocks, from this byte of the tensor on."""
        ...

    def is_finite(self, tensor: StoredTensor) -> bool:
        """Whether all numbers of a tensor are, that was taken to its end."""
        ...


class WeightFile:
    """Open until `close`. `sha256` is there once `read_tensors` was consumed, or `hash` was called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sha256 = ""
        self._ahead: Future[None] | None = None
        self._is_closing = False
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise InvalidModel(f"{path.name}: cannot be read ({error.strerror})") from error
        status = os.fstat(self._descriptor)
        if not S_ISREG(status.st_mode):
            self.close()
            raise InvalidModel(f"{path.name}: is not a file")
        self.size_bytes = status.st_size
        self._written_ns = status.st_mtime_ns

    def close(self) -> None:
        self._is_closing = True
        if self._ahead is not None and not self._ahead.cancel():
            self._ahead.exception()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Exactly that many bytes; the caller has bounded them."""
        self._check(offset, size_bytes)
        data = bytearray(size_bytes)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def read_tensors(
        self, tensors: Sequence[StoredTensor], advance: Advance
    ) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The tensors in the order in which they lie, each as a new C-contiguous array. Hashes the whole file, if
        it is not hashed ahead."""
        hasher = self._hasher()
        place = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            self._skip(hasher, place, tensor.offset, advance)
            yield tensor.name, self._read_tensor(tensor, hasher, advance)
            place = tensor.offset + tensor.size_bytes
        self._skip(hasher, place, self.size_bytes, advance)
        self._finish(hasher)

    def pour(self, tensors: Sequence[StoredTensor], tap: Tap, advance: Advance) -> None:
        """The tensors in the order in which they lie, a slice at a time and not decoded. Hashes the whole file, if it is not
        hashed ahead."""
        hasher = self._hasher()
        place = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            self._skip(hasher, place, tensor.offset, advance)
            self._pour_tensor(tensor, tap, hasher, advance)
            place = tensor.offset + tensor.size_bytes
        self._skip(hasher, place, self.size_bytes, advance)
        self._finish(hasher)

    def hash_ahead(self, threads: Executor) -> None:
        """Begin to hash in one of these threads; `hash` waits for it, `close` breaks it off."""

        def advance(size_bytes: int) -> None:
            if self._is_closing:
                raise self._was_closed()

        self._ahead = threads.submit(self._hash, _AHEAD_BYTES, advance)

    def hash(self) -> str:
        """The file's sha256, from the last pass if there was one."""
        if self._ahead is not None:
            if self._ahead.cancelled():
                raise self._was_closed()
            self._ahead.result()
        if not self.sha256:
            self._hash(_SKIP_BYTES, lambda size_bytes: None)
        return self.sha256

    def _hasher(self) -> hashlib._Hash | None:
        """For a pass over all bytes, if nobody else hashes them."""
        return hashlib.sha256() if self._ahead is None else None

    def _hash(self, slice_bytes: int, advance: Advance) -> None:
        hasher = hashlib.sha256()
        self._skip(hasher, 0, self.size_bytes, advance, slice_bytes)
        self._finish(hasher)

    def _read_tensor(self, tensor: StoredTensor, hasher: hashlib._Hash | None, advance: Advance) -> NDArray[np.float32]:
        encoding = tensor.encoding
        out = _new_array(tensor.size_bytes // encoding.block_bytes * encoding.block_values)
        slice_bytes = _SLICE_BYTES // encoding.block_bytes * encoding.block_bytes
        buffer = memoryview(bytearray(min(slice_bytes, tensor.size_bytes)))
        done = 0
        with np.errstate(all="ignore"):
            for offset in range(0, tensor.size_bytes, slice_bytes):
                raw = buffer[: min(slice_bytes, tensor.size_bytes - offset)]
                self._fill(raw, tensor.offset + offset)
                if hasher is not None:
                    hasher.update(raw)
                values = encoding.decode(np.frombuffer(raw, np.uint8))
                if not np.isfinite(values).all():
                    raise self._not_finite(tensor)
                out[done : done + len(values)] = values
                done += len(values)
                advance(len(raw))
        return _as_halves(out.reshape(tensor.dims), tensor.paired_heads)

    def _pour_tensor(self, tensor: StoredTensor, tap: Tap, hasher: hashlib._Hash | None, advance: Advance) -> None:
        block, start = tensor.encoding.block_bytes, 0
        while start < tensor.size_bytes:
            room = tap.lend()
            raw = room[: min(len(room) // block * block, tensor.size_bytes - start)]
            self._fill(raw, tensor.offset + start)
            if hasher is not None:
                hasher.update(raw)
            tap.take(tensor, start, raw)
            start += len(raw)
            advance(len(raw))
        if not tap.is_finite(tensor):
            raise self._not_finite(tensor)

    def _skip(
        self, hasher: hashlib._Hash | None, start: int, end: int, advance: Advance, slice_bytes: int = _SKIP_BYTES
    ) -> None:
        """Hash what lies between; with nothing to hash it, nothing is read."""
        if hasher is None:
            return advance(end - start)
        buffer = memoryview(bytearray(min(slice_bytes, max(0, end - start))))
        for offset in range(start, end, slice_bytes):
            raw = buffer[: min(slice_bytes, end - offset)]
            self._fill(raw, offset)
            hasher.update(raw)
            advance(len(raw))

    def _not_finite(self, tensor: StoredTensor) -> InvalidModel:
        told = f"tensor {tensor.name} holds a number that is not finite"
        return InvalidModel(f"{self.path.name}: {told}", param=tensor.name)

    def _was_closed(self) -> InvalidModel:
        return InvalidModel(f"{self.path.name}: was closed before it was read")

    def _finish(self, hasher: hashlib._Hash | None) -> None:
        status = os.fstat(self._descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self._written_ns):
            raise InvalidModel(f"{self.path.name}: changed while it was read")
        if hasher is not None:
            self.sha256 = hasher.hexdigest()

    def _fill(self, buffer: memoryview, offset: int) -> None:
        if self._descriptor < 0:
            raise self._was_closed()
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise InvalidModel(f"{self.path.name}: cannot be read ({error.strerror})") from error
            if count == 0:
                raise InvalidModel(f"{self.path.name}: ends at byte {offset + done}, too early")
            done += count

    def _check(self, offset: int, size_bytes: int) -> None:
        if size_bytes < 0 or offset < 0 or offset + size_bytes > self.size_bytes:
            raise InvalidModel(f"{self.path.name}: ends at byte {self.size_bytes}, too early")


def read_files(
    files: Sequence[tuple[WeightFile, Sequence[StoredTensor]]], progress: Progress | None
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """All tensors of several files, one after another; `progress` hears of every slice."""
    total = sum(file.size_bytes for file, _ in files)
    done = 0

    def advance(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if progress is not None:
            progress(done, total)

    for file, tensors in files:
        yield from file.read_tensors(tensors, advance)


def _new_array(count: int) -> NDArray[np.float32]:
    return np.empty(count, np.float32) if 4 * count < _LARGE_BYTES else np.frombuffer(new_pages(4 * count), np.float32)


def _as_halves(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of rotary rows: (0, d/2, 1, d/2 + 1, ...) of each head becomes (0, 1, ..., d - 1)."""
    if not heads:
        return rows
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2)
    halves = _new_array(rows.size)
    np.copyto(halves.reshape(pairs.shape), pairs)
    return halves.reshape(rows.shape)
