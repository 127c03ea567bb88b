"""Streams that ended and that a gateway has left where others keep them: how much that is, and which go first. Owns the
count; deletes nothing, and reads no clock.
"""

from collections import deque


class EndedStreams:
    """At most `max_bytes` of those that ended within `window_s`; the others are gone by themselves."""

    def __init__(self, max_bytes: int, window_s: float) -> None:
        self._max_bytes = max_bytes
        self._window_s = window_s
        # When it ended, its key, its bytes; the oldest first.
        self._kept: deque[tuple[float, str, int]] = deque()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: str, size_bytes: int, now_s: float) -> list[str]:
        """The keys of those that must go for it; it may be among them."""
        while self._kept and now_s - self._kept[0][0] >= self._window_s:
            self._size_bytes -= self._kept.popleft()[2]
        self._kept.append((now_s, key, size_bytes))
        self._size_bytes += size_bytes
        surplus = []
        while self._size_bytes > self._max_bytes:
            _, oldest, gone_bytes = self._kept.popleft()
            self._size_bytes -= gone_bytes
            surplus.append(oldest)
        return surplus
