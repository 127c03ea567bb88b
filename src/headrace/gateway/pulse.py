"""The beat of the gateway's loop: looks at every open answer a few times a second, so that none needs a timer.

Owns the set of open answers and the measure of how late the loop runs.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from headrace.core.ports import Clock
from headrace.streams.record import Failure
from headrace.streams.stream import Stream

T = TypeVar("T")
PULSE_S = 0.25
_LOG = logging.getLogger("headrace.gateway")


class Open(Protocol):
    """An answer that waits for a stream."""

    @property
    def stream(self) -> Stream: ...

    def tick(self, now_s: float) -> None: ...

    def fail(self, failure: Failure) -> None:
        """End it soon, by an error."""


class Pulse:
    __slots__ = ("_clock", "_on_beat", "_on_lag", "_open", "lag_s")

    def __init__(
        self, clock: Clock, on_lag: Callable[[float], None], on_beat: Callable[[float], None] | None = None
    ) -> None:
        """`on_lag` is told of every beat how late it came, `on_beat` the time, before the answers are looked at."""
        self._clock = clock
        self._on_beat = on_beat
        self._on_lag = on_lag
        self._open: set[Open] = set()
        # How late the last beat came.
        self.lag_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, answer: Open) -> None:
        self._open.add(answer)

    def discard(self, answer: Open) -> None:
        self._open.discard(answer)

    def tick(self) -> None:
        now_s = self._clock.now_s()
        if self._on_beat is not None:
            self._tell(self._on_beat, now_s)
        for answer in tuple(self._open):
            self._tell(answer.tick, now_s)

    def fail(self, failure: Failure, spared: Callable[[Stream], bool] | None = None) -> None:
        """All of them, but for those whose stream is `spared`."""
        for answer in tuple(self._open):
            if spared is None or not spared(answer.stream):
                self._tell(answer.fail, failure)

    def _tell(self, tell: Callable[[T], None], what: T) -> None:
        """One answer that fails must not take the beat from the others."""
        try:
            tell(what)
        except Exception:  # noqa: BLE001 - a loop of the top
            _LOG.exception("an open answer could not be looked after")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due_s = self._clock.now_s() + PULSE_S
            await asyncio.sleep(PULSE_S)
            self.lag_s = max(self._clock.now_s() - due_s, 0.0)
            self._on_lag(self.lag_s)
            self.tick()
