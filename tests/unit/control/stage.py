"""Processes and workers that a story moves by hand, for the supervisor."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from headrace.cluster.local import Command
from headrace.control.orders import Report, Step
from headrace.core.event import EngineLoad
from headrace.core.messages import PROTOCOL, Beat, FromGateway, Hello, Welcome, WorkerCard, WorkerState
from headrace.core.ports import Link
from headrace.transport.memory import MemoryNetwork


class ActedProcess:
    """Lives until `end` or a signal that it does not `resist`."""

    def __init__(self, pid: int, command: Command) -> None:
        self.pid = pid
        self.command = command
        self.signals: list[int] = []
        self.resists: set[int] = {signal.SIGHUP}
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def is_alive(self) -> bool:
        return not self._code.done()

    async def lines(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._lines.get()

    def say(self, line: bytes) -> None:
        self._lines.put_nowait(line)

    def signal(self, number: int) -> None:
        if self.is_alive:
            self.signals.append(number)
            if number not in self.resists:
                self.end(0 if number == signal.SIGTERM else -number)

    def end(self, code: int) -> None:
        if self.is_alive:
            self._code.set_result(code)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)


class ActedWorker:
    """A worker's end of the wire: says what state it is in, when asked and when that changes."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._links: list[Link] = []
        self._beat: Beat | None = None
        self._listener: Any = None

    async def is_in(self, state: WorkerState, pid: int, note: str = "") -> None:
        card = WorkerCard("w", "m", 0, pid, epoch=1)
        self._beat = Beat(state, card, EngineLoad(0.0, 0.0, 0, 0, 4, 16, 0, 16), note=note)
        if self._listener is None:
            self._listener = await self._network.listen(self._address, self._greet, FromGateway)
        for link in self._links:
            link.send(self._beat)
        await asyncio.sleep(0.3)

    async def leave(self) -> None:
        await self._listener.close()
        self._listener = None
        self._links.clear()

    def _greet(self, link: Link) -> "ActedWorker":
        self._links.append(link)
        return self

    def received(self, message: Any) -> None:
        assert isinstance(message, Hello) and self._beat is not None
        self._links[-1].send(Welcome(PROTOCOL, self._beat.card, self._beat.state))
        self._links[-1].send(self._beat)

    def closed(self, why: str) -> None:
        pass


class ActedLauncher:
    """Keeps what was started, by the command's first word; `refuse` makes starting fail."""

    def __init__(self, started: Callable[[ActedProcess], None] = lambda process: None) -> None:
        self.started: dict[str, list[ActedProcess]] = {}
        self.refuse: OSError | None = None
        self._tell = started
        self._pids = iter(range(100, 10_000))

    async def start(self, command: Command) -> ActedProcess:
        if self.refuse is not None:
            raise self.refuse
        process = ActedProcess(next(self._pids), command)
        self.started.setdefault(command.argv[0], []).append(process)
        self._tell(process)
        return process

    def last(self, name: str) -> ActedProcess:
        return self.started[name][-1]


def reported(step: Step, version: int = 0, note: str = "", *, is_whole: bool = False) -> bytes:
    return msgspec.json.encode(Report(step, version, note, is_whole)) + b"\n"


SERVING = reported(Step.SERVING)
LISTENING = reported(Step.LISTENING)
