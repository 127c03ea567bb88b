"""Turns of tenants at what all of them share. Owns who of a tenant is inside and who of it waits.

So many of one tenant are inside at once; its others wait, first come first served, and stand before nobody else's. Knows
nothing of what is done inside. Use from one event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.core.errors import QueueFull

RETRY_S = 1.0


@dataclass(slots=True)
class _Line:
    """Of one tenant. Whoever is woken is inside already: its place was kept by who left."""

    inside: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    # Of all who wait.
    size: int = 0


class Turnstile:
    """`most_waiting` bounds the size of what waits in one line, together: a flood shuts out nobody but itself."""

    def __init__(self, most_inside: int, most_waiting: int) -> None:
        self._most_inside = most_inside
        self._most_waiting = most_waiting
        self._lines: dict[Hashable, _Line] = {}

    def __len__(self) -> int:
        """Lines with anybody inside."""
        return len(self._lines)

    @asynccontextmanager
    async def turn(self, whose: Hashable, size: int) -> AsyncIterator[None]:
        """At once where there is room, else when it is its turn. QueueFull where too much waits already."""
        line = self._lines.get(whose)
        if line is None:
            line = self._lines[whose] = _Line()
        if line.inside < self._most_inside:
            line.inside += 1
        else:
            await self._wait(whose, line, size)
        try:
            yield
        finally:
            self._leave(whose, line)

    async def _wait(self, whose: Hashable, line: _Line, size: int) -> None:
        if line.size + size > self._most_waiting:
            raise QueueFull("Too much text of this tenant waits to be encoded already.", retry_after_s=RETRY_S)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append(woken)
        line.size += size
        try:
            await woken
        except asyncio.CancelledError:
            if not woken.cancelled():  # it gave up when its turn had come
                self._leave(whose, line)
            raise
        finally:
            line.size -= size

    def _leave(self, whose: Hashable, line: _Line) -> None:
        """Its place goes to the next who still waits."""
        while line.waiting:
            woken = line.waiting.popleft()
            if not woken.done():
                woken.set_result(None)
                return
        line.inside -= 1
        if not line.inside:
            del self._lines[whose]
