"""The loop of a worker's links: in a thread of its own while the model loads, then in the engine's, between its turns.

What comes in is computed by the thread that read it. To wake another for it takes longer than reading it: that one sits
on another core, with other things in its caches, and waits for the interpreter. While a step runs nobody reads, and
nothing is lost by that: commands are taken between steps. Owns the loop and who runs it; knows neither links nor engine.
"""

import asyncio
import math
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

# Timers are no finer: one that fires too early finds nothing to do.
_LEAST_S = 0.001


class Turns(Protocol):
    @property
    def is_drained(self) -> bool: ...

    def compute(self) -> bool:
        """One turn but for its `send`; False when there is nothing left to do."""

    def patience_s(self) -> float:
        """How long that holds, if nothing comes in."""

    def send(self) -> None:
        """What the turn brought."""


class LinkLoop:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """In a thread of its own."""
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """On the loop, whoever runs it; returns when it is done."""
        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(work, self._loop).result()
        else:
            self._loop.run_until_complete(work)

    def take_over(self) -> None:
        """From here on the loop runs when its caller's thread runs it."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None

    def drive(self, driver: "Driver") -> None:
        """Turns and links in the calling thread, until there are no more turns. Raises what a turn raised."""
        self.take_over()
        driver.begin(self._loop)
        self._loop.run_forever()
        if driver.error is not None:
            raise driver.error

    def close(self) -> None:
        self.take_over()
        self._loop.close()


class Driver:
    """Turns as callbacks of a loop, which looks at its sockets between two of them."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self.error: Exception | None = None

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread that will run the loop."""
        self._loop = loop
        self._thread = threading.get_ident()
        self._turn_soon()

    def wake(self) -> None:
        """There is something to do. From any thread, or a signal handler; nobody need be told before it has begun."""
        loop = self._loop
        if threading.get_ident() == self._thread:
            self._turn_soon()
        elif loop is not None:
            with suppress(RuntimeError):  # the loop is closed: all turns are over
                loop.call_soon_threadsafe(self._turn_soon)

    def _turn_soon(self) -> None:
        if not self._is_due and self._loop is not None:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        loop, turns = self._loop, self._turns
        if loop is None:
            return  # it was over when this was due
        self._is_due = False
        try:
            is_busy = turns.compute()
            if turns.is_drained:
                self._end(loop)
            elif is_busy:
                self._turn_soon()
            else:
                self._rest(loop)
            turns.send()
        except Exception as error:  # noqa: BLE001 whatever it is, whoever drives hears of it
            self.error = error
            self._end(loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        """There are no more turns, whoever wakes it: the loop runs on for others."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
        loop.stop()

    def _rest(self, loop: asyncio.AbstractEventLoop) -> None:
        """A timer that is there already may come too early, and then another is set: most rests end long before."""
        until_s = loop.time() + max(_LEAST_S, self._turns.patience_s())
        if until_s >= self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = loop.call_at(until_s, self._look), until_s

    def _look(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self._turn_soon()
