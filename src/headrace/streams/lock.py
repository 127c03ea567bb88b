"""A folder that one process writes. Owns the lock that keeps others away, which goes with the process, however it goes."""

import fcntl
import os
from pathlib import Path

from headrace.core.errors import HeadraceError

_LOCK = "lock"


def lock_folder(folder: Path) -> int:
    """Make the folder and hold it, until the descriptor is closed. Raises HeadraceError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HeadraceError(f"the journal's folder {folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise HeadraceError(f"the journal in {folder} is already written by another gateway") from error
    except OSError as error:
        os.close(lock)
        raise HeadraceError(f"the journal's folder {folder} cannot be locked: {error.strerror}") from error
    return lock
