"""Encoding off the caller's loop. Owns the threads and the bound on bytes that wait; knows no template.

Small texts and large ones have lanes of their own, so that a megabyte does not stand in front of a
greeting.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from headrace.core.errors import InvalidInput, QueueFull, Refused
from headrace.text.fitting import Room, encode_within
from headrace.text.tokenizer import Piece, Tokenizer

# A slow core's pace; only for the guess of when to come back.
_BYTES_PER_S = 1_000_000


@dataclass(slots=True)
class _Job:
    """Prompts are dropped when nobody waits for them any more, wherever the job stands in its lane."""

    prompts: Sequence[Sequence[Piece]] | None
    rooms: Sequence[Room] | None
    size_bytes: int


class TokenizerPool:
    """`max_pending_bytes` bounds what waits or runs, of all callers together. Use from one event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_threads: int = 2,
        max_pending_bytes: int = 64 << 20,
        large_bytes: int = 64 << 10,
    ) -> None:
        self.tokenizer = tokenizer
        self._max_pending_bytes = max_pending_bytes
        self._large_bytes = large_bytes
        self._num_threads = num_threads
        self._small = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenise")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="tokenise-large")
        self._lock = Lock()
        self._pending_bytes = 0
        self._is_closed = False

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    async def encode(self, parts: Sequence[Piece], room: Room | None = None) -> list[int]:
        """Ids of one prompt; QueueFull if too much waits already."""
        return (await self.encode_batch([parts], None if room is None else [room]))[0]

    async def encode_batch(
        self, prompts: Sequence[Sequence[Piece]], rooms: Sequence[Room] | None = None
    ) -> list[list[int]]:
        """Ids of several prompts, which wait and are refused together. Cancelling drops what has not begun."""
        job = self._admit(prompts, rooms)
        is_large = job.size_bytes >= self._large_bytes
        lane = self._large if is_large else self._small
        future = lane.submit(self._run, job, is_large)
        future.add_done_callback(lambda _: self._release(job))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and (task is None or not task.cancelling()):
                raise self._closed() from None  # the pool gave up, not the caller
            raise
        finally:
            del future  # it holds an error whose traceback holds this frame

    def close(self) -> None:
        """Refuse what waits and what comes; what runs finishes unseen. May be called twice."""
        self._is_closed = True
        for lane in (self._small, self._large):
            lane.shutdown(wait=False, cancel_futures=True)

    def _admit(self, prompts: Sequence[Sequence[Piece]], rooms: Sequence[Room] | None) -> _Job:
        size = sum(_size_bytes(part) for parts in prompts for part in parts)
        if size > self._max_pending_bytes:
            raise InvalidInput(f"A text has at most {self._max_pending_bytes} bytes.")
        with self._lock:
            pending = self._pending_bytes
            if self._is_closed:
                raise self._closed()
            if pending + size > self._max_pending_bytes:
                wait_s = pending / _BYTES_PER_S / self._num_threads
                raise QueueFull(f"{pending} bytes of text wait to be encoded already.", retry_after_s=wait_s)
            self._pending_bytes += size
        return _Job(prompts, rooms, size)

    def _run(self, job: _Job, is_large: bool) -> list[list[int]]:
        prompts = job.prompts
        if prompts is None:
            return []
        if job.rooms is None:
            return self.tokenizer.encode_batch(prompts, one_by_one=is_large)
        return encode_within(self.tokenizer, prompts, job.rooms, one_by_one=is_large)

    def _release(self, job: _Job) -> None:
        job.prompts = None
        with self._lock:
            self._pending_bytes -= job.size_bytes

    def _closed(self) -> Refused:
        return Refused("The tokeniser is shutting down.", retry_after_s=1.0)


def _size_bytes(part: Piece) -> int:
    """Never less than the length in UTF-8, and known without reading the text."""
    if isinstance(part, int):
        return 0
    return len(part) if part.isascii() else 4 * len(part)
