"""Links between processes of one host: unix sockets in a folder that only its owner can enter.

Owns the socket file and who may be there. What is said over it is in `wire`.
"""

import asyncio
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidInput, Unreachable
from headrace.core.ports import Link, Listener
from headrace.transport.connection import SocketListener, dial
from headrace.transport.reception import ReceiverFactory, Reception
from headrace.transport.wire import Limits

# What `sun_path` holds, less the zero at its end.
MAX_PATH_BYTES = 107
_CREDENTIALS = struct.Struct("3i")


class UnixNetwork:
    """An address is the path of a socket. Its folder must be 0700 and belong to whoever runs this."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()

    async def dial(self, address: str, receiver: ReceiverFactory, incoming: Any) -> Link:
        _check_length(address)
        if not Path(address).parent.exists():
            raise Unreachable(f"nobody answers at {address}: there is no such folder")
        _check_folder(Path(address).parent)
        loop = asyncio.get_running_loop()
        return await dial(
            address,
            lambda make: loop.create_unix_connection(make, address),
            Reception(receiver, incoming),
            self._limits,
            lambda transport: _name_peer(address, transport),
        )

    async def listen(self, address: str, receiver: ReceiverFactory, incoming: Any) -> Listener:
        """A stale socket file is replaced; InvalidInput where somebody listens, or the path cannot be one of ours."""
        _check_length(address)
        path = Path(address)
        listener = _UnixListener(
            Reception(receiver, incoming), self._limits, lambda transport: _name_peer(address, transport), address
        )
        bound = _bind(path)
        try:
            server = await asyncio.get_running_loop().create_unix_server(listener.accept, sock=bound)
        except BaseException:
            bound.close()
            path.unlink(missing_ok=True)
            raise
        listener.serve(server, address)
        return listener


class _UnixListener(SocketListener):
    def serve(self, server: asyncio.AbstractServer, address: str) -> None:
        super().serve(server, address)
        self._identity = _identity(Path(address))

    async def close(self) -> None:
        """Removes the socket file, unless somebody else's is in its place by now."""
        path = Path(self.address)
        if self._identity is not None and _identity(path) == self._identity:
            path.unlink(missing_ok=True)
        self._identity = None
        await super().close()


def _check_length(address: str) -> None:
    size = len(os.fsencode(address))
    if not 0 < size <= MAX_PATH_BYTES:
        raise InvalidInput(
            f"a unix socket's path has 1 to {MAX_PATH_BYTES} bytes, this one has {size}: {address}", param="address"
        )


def _check_folder(folder: Path) -> None:
    try:
        status = folder.lstat()
    except OSError as error:
        raise InvalidInput(f"the folder {folder} cannot hold sockets: {error.strerror}", param="address") from error
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidInput(f"{folder} is not a folder", param="address")
    if status.st_uid != os.geteuid():
        raise InvalidInput(
            f"the folder {folder} belongs to user {status.st_uid}, not to user {os.geteuid()}", param="address"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode != 0o700:
        raise InvalidInput(f"the folder {folder} has mode {mode:04o}; sockets need 0700", param="address")


def _bind(path: Path) -> socket.socket:
    _check_folder(path.parent)
    with _locked(path.parent):
        _clear(path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            bound.bind(str(path))
            path.chmod(0o600)
            # Inside the lock: a socket that does not listen yet would pass for a stale one.
            bound.listen(128)
        except BaseException:
            bound.close()
            raise
    return bound


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two that start at once do not each take the other's socket for a stale one."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens at."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidInput(f"{path} exists and is no socket", param="address")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        problem = probe.connect_ex(str(path))
    if problem == errno.ECONNREFUSED:
        path.unlink()
    elif problem != errno.ENOENT:
        raise InvalidInput(f"somebody listens at {path}", param="address")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _name_peer(address: str, transport: asyncio.Transport) -> str:
    connection = transport.get_extra_info("socket")
    try:
        pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    except OSError:
        return address
    return f"{address} (pid {pid})"
