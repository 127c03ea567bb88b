"""Processes of this machine: started with this interpreter, heard, signalled, and gone with their parent."""

import asyncio
import os
import signal
import sys

import pytest

from headrace import __version__
from headrace.cluster.local import Command, LocalProcesses


def launcher() -> LocalProcesses:
    return LocalProcesses({"MARK": "seen"})


def test_a_child_is_heard_and_its_code_known() -> None:
    async def story() -> tuple[list[bytes], int]:
        process = await launcher().start(Command(("--version",), talks=True))
        return [line async for line in process.lines()], await process.wait()

    assert asyncio.run(story()) == ([f"headrace {__version__}\n".encode()], 0)


def test_a_child_has_its_own_group_its_environment_and_the_descriptors_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_LOCAL_KEY", "a-secret-of-the-parent")

    async def story() -> None:
        ours, theirs = os.pipe()
        try:
            # Reads the configuration from a pipe that nobody fills: it waits as long as we look.
            process = await launcher().start(Command(("simulate", f"/dev/fd/{ours}"), fds=(ours,)))
            try:
                assert os.getpgid(process.pid) == process.pid
                with open(f"/proc/{process.pid}/environ", "rb") as file:
                    environment = file.read()
                assert b"MARK=seen" in environment and b"a-secret-of-the-parent" not in environment
            finally:
                process.signal(signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
            assert not process.is_alive
            process.signal(signal.SIGTERM)  # nobody is there: nothing happens
        finally:
            os.close(ours)
            os.close(theirs)

    asyncio.run(story())


def test_a_line_without_end_is_dropped_and_the_next_one_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('x' * 200_000); print('next')"

    async def story() -> list[bytes]:
        real = asyncio.create_subprocess_exec

        async def start(*_: str, **options: object) -> asyncio.subprocess.Process:
            return await real(sys.executable, "-c", script, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        process = await launcher().start(Command((), talks=True))
        lines = [line async for line in process.lines()]
        await process.wait()
        return lines

    assert asyncio.run(story())[-1] == b"next\n"
