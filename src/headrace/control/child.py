"""One process that must live, and the ports through which it is started and ended. Owns what is known of it."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.cluster.local import Command
from headrace.control.restarts import Restarts
from headrace.core.messages import Beat, WorkerState


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...

    def lines(self) -> AsyncIterator[bytes]:
        """What it says on stdout, if its command `talks`."""

    def signal(self, number: int) -> None:
        """Nothing happens to one that has ended."""

    async def wait(self) -> int:
        """Its exit code; minus the signal that ended it."""


class Launcher(Protocol):
    async def start(self, command: Command) -> Process:
        """Raises OSError when the system cannot."""


@dataclass(slots=True)
class Child:
    """`address` is where a worker's beats are heard; the gateway has none and reports on its stdout.
    `command` is asked at each start, since an epoch is larger every time. One that is healthy runs as it should; one
    that serves can also reach whom it needs. `version` is that of the orders which it follows."""

    name: str
    command: Callable[[], Command]
    address: str | None = None
    restarts: Restarts = field(default_factory=Restarts)
    process: Process | None = None
    healthy_since_s: float | None = None
    was_healthy: bool = False
    # Its end was told as a warning, and so is its return.
    is_missed: bool = False
    is_serving: bool = False
    version: int = 0
    beat: Beat | None = None
    # A gateway's: it sees every worker ready.
    is_whole: bool = False
    # It was told to end so that another life of it can begin.
    is_leaving: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive

    @property
    def last_words(self) -> str:
        """Why it failed, if it could still say so."""
        return self.beat.note if self.beat is not None and self.beat.state is WorkerState.FAILED else ""
