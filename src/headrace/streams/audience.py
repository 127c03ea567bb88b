"""The readers of one stream: who is there, since when nobody is. Owns what follows from that for the sequences.

A stream with any reader goes on. It pauses while every reader is held or behind by more than the bound, so that a slow one
never stalls the others; without readers it goes on for its grace, then it is cancelled. How long one reader may lag is
the matter of who writes to it. Knows no protocol that clients speak.
"""

from collections.abc import Callable
from typing import Protocol

from headrace.core.errors import InvalidInput
from headrace.streams.reader import Reader
from headrace.streams.stream import Stream

# How long it counts as read elsewhere after that was said; it is said twice a second.
ELSEWHERE_S = 2.0


class Owner(Protocol):
    """Who generates the stream."""

    def cancel(self, stream: Stream, why: str) -> None: ...

    def pause(self, stream: Stream) -> None: ...

    def resume(self, stream: Stream) -> None: ...


class Audience:
    """`grace_s` is how long the stream goes on without a reader; each of them may change it. `on_over` is called
    whenever the stream has ended and the last reader has left."""

    __slots__ = ("_elsewhere_s", "_empty_s", "_is_paused", "_on_over", "_owner", "_readers", "grace_s", "stream")

    def __init__(
        self, stream: Stream, owner: Owner, now_s: float, *, grace_s: float, on_over: Callable[["Audience"], None]
    ) -> None:
        self.stream = stream
        self.grace_s = grace_s
        self._owner = owner
        self._on_over = on_over
        self._readers: list[Reader] = []
        self._empty_s = now_s
        # Until when it is read elsewhere, as far as is known.
        self._elsewhere_s = now_s
        self._is_paused = False

    def __len__(self) -> int:
        return len(self._readers)

    def enter(self, after: int = 0) -> Reader:
        """A reader of what follows frame `after`. InvalidInput where that was not said yet."""
        stream = self.stream
        stream.unfold()
        try:
            reader = Reader(stream, after)
        except InvalidInput:
            if stream.is_ended and not self._readers:
                stream.fold()
            raise
        self._readers.append(reader)
        return reader

    def leave(self, reader: Reader, now_s: float) -> None:
        """It reads no more; to say so twice is once."""
        if not self._remove(reader) or self._readers:
            return
        self._empty_s = now_s
        if self.stream.is_ended:
            self._on_over(self)
        elif self.grace_s <= 0.0 and now_s >= self._elsewhere_s:
            self._owner.cancel(self.stream, "disconnected")
        else:
            self._set_paused(False)

    def stay(self, now_s: float) -> None:
        """It is read elsewhere: it waits for nobody here, and its grace begins now."""
        self._empty_s = max(self._empty_s, now_s)
        self._elsewhere_s = now_s + ELSEWHERE_S
        self._set_paused(False)

    def wait(self, until_s: float) -> None:
        """Nobody left it, they were lost: its grace begins no sooner than then."""
        self._empty_s = max(self._empty_s, until_s)

    def expel(self, reader: Reader, why: str, now_s: float) -> None:
        """It lags beyond its time, and does not count any more. A stream that nobody else reads is cancelled for that;
        one that has ended waits until it leaves."""
        if self.stream.is_ended or not self._remove(reader) or self._readers:
            return
        self._empty_s = now_s
        if now_s >= self._elsewhere_s:
            self._owner.cancel(self.stream, why)

    def tick(self, now_s: float, max_unread_bytes: int) -> None:
        """To be called a few times a second."""
        if self.stream.is_ended:
            if not self._readers:
                self._on_over(self)
        elif self._readers:
            unread_bytes = [reader.unread_bytes for reader in self._readers if not reader.is_held]
            least_bytes = min(unread_bytes, default=max_unread_bytes + 1)
            if least_bytes > max_unread_bytes:
                self._set_paused(now_s >= self._elsewhere_s)
            elif least_bytes <= max_unread_bytes // 2:
                self._set_paused(False)
        elif now_s - self._empty_s >= self.grace_s and now_s >= self._elsewhere_s:
            self._owner.cancel(self.stream, "disconnected")

    def cancel(self, why: str) -> None:
        """Whoever reads is told so."""
        if not self.stream.is_ended:
            self._owner.cancel(self.stream, why)

    def _remove(self, reader: Reader) -> bool:
        if reader not in self._readers:
            return False
        self._readers.remove(reader)
        return True

    def _set_paused(self, paused: bool) -> None:
        if paused is not self._is_paused:
            self._is_paused = paused
            (self._owner.pause if paused else self._owner.resume)(self.stream)
