"""What the cgroups of this process leave it of its machine. Reads /proc and /sys; changes nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60


def usable_cores(root: Path = Path("/")) -> int:
    """The cores it may run on, or as many whole ones as it may keep busy if that is less: one more thread and all of them
    would stand still for a part of every tenth of a second."""
    return max(1, min(len(os.sched_getaffinity(0)), *(int(share) for share in _core_shares(root))))


def free_shares(root: Path = Path("/")) -> list[int]:
    """Bytes of memory: limit less use of every cgroup that has a limit."""
    shares = []
    for place, is_first in _places("memory", root):
        limit, used = (_number(place / name) for name in (_FIRST_MEMORY if is_first else _MEMORY))
        if limit is not None and used is not None and limit < _UNLIMITED:
            shares.append(max(0, limit - used))
    return shares


_MEMORY = ("memory.max", "memory.current")
_FIRST_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _core_shares(root: Path) -> Iterator[float]:
    """How many cores it may keep busy, by every cgroup that limits them."""
    yield _UNLIMITED
    for place, is_first in _places("cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first else ("cpu.max",)
        words = [word for name in names for word in text(place / name).split()]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            yield int(words[0]) / int(words[1])


def _places(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Every cgroup of this process that may say something of it, and their parents; whether cgroups are of the first
    version."""
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        is_first = controllers != ""
        if is_first and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if is_first else "")
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            yield place, is_first
            if place == base:
                break


def _number(path: Path) -> int | None:
    found = text(path).strip()
    return int(found) if found.isdigit() else None


def text(path: Path) -> str:
    """Nothing where there is no such file, or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
