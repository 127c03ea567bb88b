"""Workers and gateways as processes of this machine. Owns how one is started; does not decide when.

A child is in a process group of its own, so that a terminal's Ctrl-C reaches only its parent, and it dies when
its parent does.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping

from msgspec import Struct

_MOST_LINE_BYTES = 1 << 16


class Command(Struct, frozen=True):
    """A command of this product. `fds` are open in the child under the same numbers; `talks` connects its stdout
    to the parent. Otherwise its stdout is the parent's stderr, whose own stdout is for results."""

    argv: tuple[str, ...]
    fds: tuple[int, ...] = ()
    talks: bool = False


class LocalProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def lines(self) -> AsyncIterator[bytes]:
        """What it says on stdout, if its command `talks`."""
        stream = self._process.stdout
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:  # longer than its bound: dropped
                continue
            if not line:
                return
            yield line

    def signal(self, number: int) -> None:
        """Nothing happens to one that has ended."""
        # Not `send_signal`: that looks first whether the child has ended, and so takes its code from who waits for it.
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def wait(self) -> int:
        """Its exit code; minus the signal that ended it."""
        return await self._process.wait()


class LocalProcesses:
    """Starts commands with this interpreter. `environment` is all that a child sees of ours."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)

    async def start(self, command: Command) -> LocalProcess:
        """Raises OSError when the system cannot."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headrace.cli.main",
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if command.talks else 2,
            limit=_MOST_LINE_BYTES,
            pass_fds=command.fds,
            env=self._environment,
            process_group=0,
        )
        return LocalProcess(process)
