"""Servers of others that tests need, really started: they are looked for, and never left out."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_START_S = 60.0


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Redis on a socket in the folder, which must have a short path. Keeps nothing when it stops."""
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("these tests need redis-server: install Debian's package redis-server")
    path = folder / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"]
    options += ["--save", "", "--appendonly", "no", "--dir", str(folder)]
    with (folder / "redis.log").open("ab") as log:
        server = subprocess.Popen([program, *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _await_answer(server, path)
        yield f"unix://{path}"
    finally:
        server.kill()
        server.wait()
        path.unlink(missing_ok=True)


def _await_answer(server: "subprocess.Popen[bytes]", path: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and server.poll() is None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            probe.sendall(b"PING\r\n")
            if probe.recv(16).startswith(b"+PONG"):
                return
        time.sleep(0.01)
    raise RuntimeError(f"redis-server did not start: see {path.parent / 'redis.log'}")
