"""Several files of tensors poured or hashed at once, one thread to a file: a hash is a chain that only one can follow.

Owns the threads and what the caller hears of them. Reading and hashing are the files' own; both let other threads run.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Lock

from headrace.weights.weight_file import Progress, StoredTensor, Tap, WeightFile

# Opened, used and closed by the thread that pours into it.
OpenTap = Callable[[], AbstractContextManager[Tap]]

_MOST_THREADS = 8
_LOOK_S = 0.05


class _GaveUp(Exception):
    """Another file was bad, or the caller has had enough."""


@dataclass(slots=True)
class _Tally:
    """Bytes of all files together; `give_up` stops every thread at its next slice."""

    done: int = 0
    give_up: bool = False
    lock: Lock = field(default_factory=Lock)

    def advance(self, size_bytes: int) -> None:
        if self.give_up:
            raise _GaveUp
        with self.lock:
            self.done += size_bytes


def hash_ahead(files: Sequence[WeightFile]) -> None:
    """Begin with all of them, and do not wait."""
    threads = ThreadPoolExecutor(min(len(files), _MOST_THREADS), thread_name_prefix="hash")
    for file in files:
        file.hash_ahead(threads)
    threads.shutdown(wait=False)


def pour_files(
    files: Sequence[tuple[WeightFile, Sequence[StoredTensor]]], open_tap: OpenTap, progress: Progress | None
) -> None:
    """Raises what the first file to fail raises, or `progress`, when no thread pours any more."""
    total, tally = sum(file.size_bytes for file, _ in files), _Tally()

    def pour(file: WeightFile, tensors: Sequence[StoredTensor]) -> None:
        with open_tap() as tap:
            file.pour(tensors, tap, tally.advance)

    with ThreadPoolExecutor(min(len(files), _MOST_THREADS), thread_name_prefix="pour") as threads:
        pending: set[Future[None]] = {threads.submit(pour, file, tensors) for file, tensors in files}
        try:
            while pending:
                done, pending = wait(pending, _LOOK_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if progress is not None:
                    progress(tally.done, total)
        except BaseException:
            tally.give_up = True
            for future in pending:
                future.cancel()
            raise
