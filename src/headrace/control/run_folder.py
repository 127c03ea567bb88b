"""The folder of one running server: its workers' sockets and the gateway's orders. Owns its life and its privacy.

Only its owner can enter it. A lock tells a living server's folder from one that was left behind.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from headrace.control.orders import Orders
from headrace.core.errors import HeadraceError
from headrace.transport.unix import MAX_PATH_BYTES

_LONGEST_NAME = "worker-999-999.sock"
_ORDERS, _LOCK = "orders.json", "lock"


class RunFolder:
    """Made on entering, removed on leaving."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock: int | None = None
        self.path = Path()

    def __enter__(self) -> "RunFolder":
        shelf = self._home / "run"
        shelf.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(shelf)
        self.path = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=shelf))  # 0700
        if len(os.fsencode(self.path / _LONGEST_NAME)) > MAX_PATH_BYTES:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix="headrace-"))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def worker_address(self, model: int, index: int) -> str:
        return str(self.path / f"worker-{model}-{index}.sock")

    def write_orders(self, orders: Orders) -> None:
        """A reader sees the old ones or the new ones, whole."""
        handle, name = tempfile.mkstemp(dir=self.path)  # 0600
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(orders))
        os.replace(name, self.path / _ORDERS)


def read_orders(folder: Path) -> Orders:
    try:
        return msgspec.json.decode((folder / _ORDERS).read_bytes(), type=Orders)
    except (OSError, msgspec.MsgspecError) as error:
        raise HeadraceError(f"{folder / _ORDERS} cannot be read: {error}") from error


def _sweep(shelf: Path) -> None:
    """Remove what servers left that were killed: folders whose lock nobody holds."""
    for folder in shelf.iterdir():
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made at this moment, or none of ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
