import asyncio
import fcntl
import os
import socket
import stat
from pathlib import Path

import pytest

from headrace.core.errors import InvalidInput, Unreachable
from headrace.transport import unix
from headrace.transport.unix import UnixNetwork
from headrace.transport.wire import Limits
from tests.unit.transport.rig import Ear, Known, Party, echo, is_sound, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def refused(address: Path | str, match: str) -> None:
    async def story() -> None:
        with pytest.raises(InvalidInput, match=match):
            await UnixNetwork().listen(str(address), Ear, Known)
        with pytest.raises(InvalidInput, match=match):
            await UnixNetwork().dial(str(address), Ear, Known)

    run("asyncio", story())


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777, 0o600])
def test_a_folder_that_others_can_enter_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    refused(folder / "s", f"mode {mode:04o}; sockets need 0700")
    folder.chmod(0o700)
    assert not list(folder.iterdir())


def test_a_folder_of_somebody_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    refused(folder / "s", f"belongs to user {other - 1}, not to user {other}")


def test_a_link_to_a_folder_is_no_folder(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    refused(folder / "link" / "s", "is not a folder")


def test_a_folder_that_is_not_there(folder: Path) -> None:
    async def story() -> None:
        with pytest.raises(InvalidInput, match="No such file"):
            await UnixNetwork().listen(str(folder / "no" / "s"), Ear, Known)
        with pytest.raises(Unreachable, match="no such folder"):
            await UnixNetwork().dial(str(folder / "no" / "s"), Ear, Known)

    run("asyncio", story())


def test_a_path_is_107_bytes_at_most(folder: Path) -> None:
    longest = folder / ("é" * 200)
    longest = Path(os.fsdecode(os.fsencode(longest)[: 107 - (107 - len(os.fsencode(folder)) - 1) % 2]))
    refused(str(longest) + "é", "1 to 107 bytes, this one has 10[89]")
    refused("", "this one has 0")

    async def story() -> None:
        party = Party(UnixNetwork())
        await party.open(str(longest), echo)
        assert await is_sound(await party.dial())
        await party.close()

    run("asyncio", story())


def test_the_socket_is_for_its_owner_and_goes_with_its_listener(folder: Path) -> None:
    async def story() -> None:
        party = Party(UnixNetwork())
        await party.open(str(folder / "s"))
        assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
        await party.close()
        assert not list(folder.iterdir())

    run("asyncio", story())


def test_a_stale_socket_is_replaced(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "s"))
        dead.listen()

    async def story() -> None:
        party = Party(UnixNetwork())
        await party.open(str(folder / "s"), echo)
        assert await is_sound(await party.dial())
        await party.close()

    run("asyncio", story())


def test_a_live_socket_is_left_alone(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as client:
        live.bind(str(folder / "s"))
        live.listen()

        async def story() -> None:
            with pytest.raises(InvalidInput, match="somebody listens at"):
                await UnixNetwork().listen(str(folder / "s"), Ear, Known)

        run("asyncio", story())
        client.connect(str(folder / "s"))


def test_a_file_that_is_no_socket_is_left_alone(folder: Path) -> None:
    (folder / "s").write_text("mine")

    async def story() -> None:
        with pytest.raises(InvalidInput, match="exists and is no socket"):
            await UnixNetwork().listen(str(folder / "s"), Ear, Known)

    run("asyncio", story())
    assert (folder / "s").read_text() == "mine"


def test_a_listener_leaves_a_successors_socket(folder: Path) -> None:
    async def story() -> None:
        first, second = Party(UnixNetwork()), Party(UnixNetwork())
        await first.open(str(folder / "s"))
        (folder / "s").unlink()
        await second.open(str(folder / "s"), echo)
        await first.close()
        assert await is_sound(await second.dial())
        await second.close()

    run("asyncio", story())


def test_nobody_else_looks_for_a_stale_socket_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that start at once, the later must not take the earlier's socket for a stale one."""
    clear = unix._clear

    def clear_if_locked(path: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        clear(path)

    monkeypatch.setattr(unix, "_clear", clear_if_locked)
    with unix._bind(folder / "s"), pytest.raises(InvalidInput, match="somebody listens"):
        unix._bind(folder / "s")


def test_one_that_accepts_and_says_nothing_is_unreachable(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "s"))
        silent.listen()

        async def story() -> None:
            with pytest.raises(Unreachable, match=r"does not answer within 0\.05 s"):
                await UnixNetwork(Limits(greeting_s=0.05)).dial(str(folder / "s"), Ear, Known)

        run("asyncio", story())


def test_a_dial_that_is_given_up_leaves_nothing(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "s"))
        silent.listen()

        async def story() -> None:
            dial = asyncio.create_task(UnixNetwork().dial(str(folder / "s"), Ear, Known))
            connection, _ = await asyncio.to_thread(silent.accept)
            with connection:
                dial.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await dial
                connection.settimeout(60)
                while await asyncio.to_thread(connection.recv, 100):
                    pass

        run("asyncio", story())


def test_a_peer_is_named_by_its_process(folder: Path) -> None:
    async def story() -> None:
        party = Party(UnixNetwork())
        await party.open(str(folder / "s"))
        here, there = await party.pair()
        assert here.link.peer == there.link.peer == f"{folder / 's'} (pid {os.getpid()})"
        await party.close()

    run("asyncio", story())
