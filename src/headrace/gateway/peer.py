"""The client at the other end of an answer that takes a while: whether it is still there, and being woken.

The connection says when it is lost, where it can (`gateway.protocol`); else one task listens per answer. None does
per chunk.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace.core.ports import Clock
from headrace.streams.stream import Stream

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
# Takes what to call when the connection is lost; None: nothing any more.
Watch = Callable[[Callable[[], None] | None], None]


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Peer:
    __slots__ = ("_clock", "_listener", "_receive", "_wake", "_watch", "gone_s")

    def __init__(self, receive: Receive, clock: Clock, watch: Watch | None = None) -> None:
        self._receive = receive
        self._clock = clock
        self._wake: asyncio.Future[bool] | None = None
        # When it went away.
        self.gone_s: float | None = None
        self._watch = watch
        self._listener: asyncio.Task[None] | None = None
        if watch is not None:
            watch(self._left)
        else:
            self._listener = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        self.gone_s = self._clock.now_s()
        self.wake()

    def wake(self) -> None:
        """Whoever waits looks again."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(False)

    async def wait(self, stream: Stream, *, ending: bool = False) -> None:
        """Until the stream says more (with `ending`: has ended), or `wake`."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._wake = future
        stream.watch(future, ending=ending)
        is_told = False
        try:
            is_told = await future
        finally:
            self._wake = None
            if not is_told:
                stream.unwatch(future)

    def close(self) -> None:
        if self._watch is not None:
            self._watch(None)
        if self._listener is not None:
            self._listener.cancel()
