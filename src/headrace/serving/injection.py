"""Frames that come late, to prove that the stages tell the truth. Owns the delay; changes no frame and no order."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from headrace.core.messages import Frame
from headrace.core.ports import FrameSink


class LateSink:
    """Hands everything on to `sink`, each thing after `delay_s`."""

    def __init__(self, sink: FrameSink, delay_s: float) -> None:
        self._sink = sink
        self._delay_s = delay_s
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, replica: str, frame: Frame) -> None:
        self._later(lambda: self._sink.take(replica, frame))

    def lost(self, replica: str, keys: Sequence[int], *, is_dead: bool = True) -> None:
        self._later(lambda: self._sink.lost(replica, keys, is_dead=is_dead))

    def _later(self, deliver: Callable[[], None]) -> None:
        # Timers of the same instant may fire in any order: each delivers what has waited longest.
        self._waiting.append(deliver)
        asyncio.get_running_loop().call_later(self._delay_s, lambda: self._waiting.popleft()())
