"""Frames on their way to one gateway: numbered, kept until acknowledged.

Owns the ring and its bound in bytes. It never makes anybody wait: past the bound it says so, and the engine's side
pauses that gateway's sequences before its next step, until half of the room is free again.
"""

import threading
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from headrace.core.messages import Frame

DEFAULT_BYTES = 8 << 20
# Of an event and of a frame, beside their arrays and texts.
_EVENT_BYTES = 160
_FRAME_BYTES = 160
_KEY_BYTES = 9


class Outbox:
    """`add` is called by the engine's thread, `acknowledge` by the links'. What waits for that one counts as well."""

    def __init__(self, crowded: Callable[[bool], None], max_bytes: int = DEFAULT_BYTES) -> None:
        self._crowded = crowded
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: deque[tuple[Frame, int]] = deque()
        self._next_number = 1
        self.size_bytes = 0
        self.is_full = False

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def add(self, frame: Frame) -> Frame:
        """The frame with its number, to be sent."""
        frame = replace(frame, number=self._next_number)
        self._next_number += 1
        size = frame_bytes(frame)
        with self._lock:
            self._kept.append((frame, size))
            self.size_bytes += size
            if self.size_bytes > self._max_bytes and not self.is_full:
                self.is_full = True
                self._crowded(True)
        return frame

    def acknowledge(self, number: int) -> None:
        """Frames up to `number` were taken over. Numbers seen before, or never given, change nothing."""
        kept = self._kept
        if number >= self._next_number:
            return
        with self._lock:
            while kept and kept[0][0].number <= number:
                self.size_bytes -= kept.popleft()[1]
            if self.is_full and self.size_bytes <= self._max_bytes // 2:
                self.is_full = False
                self._crowded(False)


def frame_bytes(frame: Frame) -> int:
    """About what a frame takes on its way, without encoding it."""
    size = _FRAME_BYTES + len(frame.keys) + len(frame.indices) + len(frame.tokens) + len(frame.counters)
    size += _EVENT_BYTES * (len(frame.ended) + len(frame.refused)) + _KEY_BYTES * len(frame.accepted)
    for end in frame.ended:
        size += len(end.message)
    for refusal in frame.refused:
        size += len(refusal.message) + _KEY_BYTES * len(refusal.keys)
    if frame.scores is not None:
        scores = frame.scores
        size += len(scores.owners) + len(scores.positions) + len(scores.logprobs)
        size += len(scores.top_ids) + len(scores.top_logprobs)
    return size
