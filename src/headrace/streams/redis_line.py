"""Commands to Redis in order, without waiting for each other's reply. Owns one connection and what waits for it.

Where the server is gone, or does not answer in time, everything that waits is told so at once and nothing is held up;
the commands themselves wait, within a bound of bytes, and are sent again when there is a server. So a command may run
twice, and must not mind. Knows nothing of what the commands mean.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

_LOG = logging.getLogger("headrace.streams")
Tag = TypeVar("Tag")
Command = tuple[str | bytes | int | float, ...]
_RETRY_S = 0.2
# A command that the server refuses by itself, so often, is given up.
_MAX_TRIES = 3
_BATCH = 64
_STOP_S = 0.05


class _StoodStill(Exception):
    """This process did, for so long that a reply seems to be late. That says nothing of the server."""


class _Item(Generic[Tag]):
    __slots__ = ("data", "size_bytes", "tag", "tries")

    def __init__(self, tag: Tag, data: list[bytes]) -> None:
        self.tag = tag
        self.data = data
        self.size_bytes = sum(map(len, data))
        self.tries = 0


class RedisLine(Generic[Tag]):
    """`answered` gets each command's tag and reply, in order. While the line is down it gets None at once, and the
    reply later if one comes; `dropped` gets the tags of those that never will be sent. `greeting` is said first on
    every connection.
    """

    def __init__(
        self,
        client: "Redis",
        greeting: Callable[[], Sequence[Command]],
        answered: Callable[[Tag, Any], None],
        dropped: Callable[[Tag], None],
        *,
        max_bytes: int,
        reply_s: float,
    ) -> None:
        pool: Any = client.connection_pool
        self._pool = pool
        self._greeting = greeting
        self._answered = answered
        self._dropped = dropped
        self._max_bytes = max_bytes
        self._reply_s = reply_s
        self._encoder = pool.make_connection()
        self._unsent: deque[_Item[Tag]] = deque()
        self._flying: deque[_Item[Tag]] = deque()
        self._waiting_bytes = 0
        self._more = asyncio.Event()
        self._in_flight = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._task: asyncio.Task[None] | None = None
        self.is_up = True

    def send(self, tag: Tag, command: Command) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        item = _Item(tag, self._encoder.pack_command(*command))
        if self._waiting_bytes + item.size_bytes > self._max_bytes:
            self._lower("too much waits for it")
            self._dropped(tag)
            self._answered(tag, None)
            return
        self._unsent.append(item)
        self._waiting_bytes += item.size_bytes
        self._drained.clear()
        self._more.set()
        if not self.is_up:
            self._answered(tag, None)

    async def close(self, timeout_s: float) -> None:
        """What waits is sent first, if that can be done in time."""
        if self._task is None:
            return
        if self.is_up:
            await asyncio.wait([waiting := asyncio.ensure_future(self._drained.wait())], timeout=timeout_s)
            waiting.cancel()
        await stop(self._task)
        if self.is_up:
            self._lower("it was closed", is_quiet=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._converse()
            except (RedisError, OSError) as error:  # TimeoutError is an OSError
                self._lower(str(error) or "it does not answer")
            except _StoodStill:
                continue  # whoever took our streams meanwhile is found out with what is sent again
            except Exception:  # noqa: BLE001 - a loop of the top: without it every stream would wait for ever
                _LOG.exception("the journal in Redis failed")
                self._lower("it failed")
            await asyncio.sleep(_RETRY_S)

    async def _converse(self) -> None:
        """One connection, until it breaks."""
        self._unsent.extendleft(reversed(self._flying))
        self._flying.clear()
        connection = self._pool.make_connection()
        connection.socket_timeout = None  # we have our own
        try:
            async with asyncio.timeout(self._reply_s):
                await connection.connect()
                for command in self._greeting():
                    await connection.send_command(*command, check_health=False)
                    await connection.read_response()
            self._raise()
            await self._exchange(connection)
        finally:
            await connection.disconnect(nowait=True)

    async def _exchange(self, connection: Any) -> None:
        """Write and read side by side; the first that fails ends both."""
        both = [asyncio.create_task(self._write(connection)), asyncio.create_task(self._read(connection))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                await stop(task)
        errors = [error for task in both if not task.cancelled() and (error := task.exception()) is not None]
        raise errors[0]

    async def _write(self, connection: Any) -> None:
        while True:
            self._more.clear()
            while self._unsent:
                batch: list[bytes] = []
                for _ in range(min(_BATCH, len(self._unsent))):
                    item = self._unsent.popleft()
                    self._flying.append(item)
                    batch += item.data
                self._in_flight.set()
                await connection.send_packed_command(batch, check_health=False)
            await self._more.wait()

    async def _read(self, connection: Any) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            while not self._flying:
                self._in_flight.clear()
                await self._in_flight.wait()
            item = self._flying[0]
            began_s = now_s()
            try:
                async with asyncio.timeout(self._reply_s):
                    # It must not close the connection under the writer, which would then open another.
                    reply = await connection.read_response(disconnect_on_error=False)
            except TimeoutError:
                if now_s() - began_s > 2 * self._reply_s:
                    raise _StoodStill from None
                raise
            except NoScriptError:
                raise  # the next greeting loads it
            except ResponseError:
                item.tries += 1
                if item.tries >= _MAX_TRIES:
                    self._pop()
                    self._dropped(item.tag)
                    self._answered(item.tag, None)
                raise
            self._pop()
            self._answered(item.tag, reply)
            self._raise()

    def _pop(self) -> None:
        self._waiting_bytes -= self._flying.popleft().size_bytes
        if not self._flying and not self._unsent:
            self._drained.set()

    def _raise(self) -> None:
        """Up again once all that waited has been sent and answered."""
        if not self.is_up and not self._flying and not self._unsent:
            self.is_up = True
            _LOG.info("the journal in Redis keeps streams again")

    def _lower(self, why: str, *, is_quiet: bool = False) -> None:
        if not self.is_up:
            return
        self.is_up = False
        if not is_quiet:
            _LOG.error("the journal in Redis does not keep streams: %s", why)
        for item in [*self._flying, *self._unsent]:
            self._answered(item.tag, None)


async def stop(task: "asyncio.Task[None]") -> None:
    """Cancelled until it is done: the client's `wait_for` swallows a cancellation that comes with a reply (Python 3.11)."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_STOP_S)
