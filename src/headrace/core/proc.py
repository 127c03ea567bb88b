"""What the system says of this process: the memory and the cores that it may have, its cgroups' limits included.

Reads /proc and /sys; and takes memory from it, and gives it back.
"""

import ctypes
import mmap
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

_UNLIMITED = 1 << 60
_MEMORY = ("memory.max", "memory.current")
_CORES = ("cpu.max",)
# In the first version of cgroups.
_FIRST_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_FIRST_CORES = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that it may run on, or as many whole ones as it may keep busy if these are fewer: with one thread more all
    of them would stand still for a part of each period."""
    return max(1, min(len(os.sched_getaffinity(0)), *_shares_of_cores(root), _UNLIMITED))


def free_memory_bytes(root: Path = Path("/")) -> int:
    """What it may still take: the system's, or its cgroup's if that is less."""
    system = _field(root / "proc/meminfo", r"MemAvailable:\s+(\d+) kB") * 1024
    return min([system, *_shares_of_memory(root)])


def resident_bytes(root: Path = Path("/")) -> int:
    return _field(root / "proc/self/status", r"VmRSS:\s+(\d+) kB") * 1024


def peak_resident_bytes(root: Path = Path("/")) -> int:
    return _field(root / "proc/self/status", r"VmHWM:\s+(\d+) kB") * 1024


def new_pages(size_bytes: int) -> mmap.mmap:
    """Zeros, in pages that the system gives when they are first touched; MemoryError where there is no room. numpy would ask for
    large ones, which take less time where memory is at hand; where the host of a virtual machine took back what was
    free, they take several times as long as the same memory in small ones."""
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {size_bytes:,} bytes: {error.strerror}") from error


def trim_memory() -> None:
    """Give the system what was freed and is kept for later, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak(root: Path = Path("/")) -> bool:
    """Let the peak start at what is resident now; False where the system does not allow it."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def waited_s(without: Collection[int] = (), root: Path = Path("/")) -> float:
    """How long its threads have waited for a core while they had something to do, all taken together but for those `without`
    whom (their ids); those that are gone no longer count. 0 where the system does not tell."""
    others = set(map(str, without))
    tasks = (path for path in (root / "proc/self/task").glob("*") if path.name not in others)
    told = (_text(path / "schedstat").split() for path in tasks)
    return sum(int(words[1]) for words in told if len(words) > 1 and words[1].isdecimal()) / 1e9


def _shares_of_memory(root: Path) -> Iterator[int]:
    """Limit less use of every cgroup that has a limit."""
    for place, is_first in _places("memory", root):
        match _numbers(place, _FIRST_MEMORY if is_first else _MEMORY):
            case limit, used if limit < _UNLIMITED:
                yield max(0, limit - used)


def _shares_of_cores(root: Path) -> Iterator[int]:
    """Whole cores that every cgroup with a quota lets it keep busy."""
    for place, is_first in _places("cpu", root):
        match _numbers(place, _FIRST_CORES if is_first else _CORES):
            case quota, period if period:
                yield quota // period


def _places(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of every cgroup of this process that may say something of it, and of their parents; whether they are of the
    first version of cgroups."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        match line.split(":", 2):
            case _, "", path:
                is_first, mounts = False, ["", "unified"]
            case _, controllers, path if controller in controllers.split(","):
                is_first, mounts = True, sorted({controller, controllers})
            case _:
                continue
        for mount in mounts:
            base = root / "sys/fs/cgroup" / mount
            folder = base / path.lstrip("/")
            for place in (folder, *folder.parents):
                yield place, is_first
                if place == base:
                    break


def _numbers(place: Path, names: tuple[str, ...]) -> list[int]:
    """All that the files say, or none where one of them says anything else."""
    words = [word for name in names for word in _text(place / name).split()]
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else []


def _field(path: Path, pattern: str) -> int:
    found = re.search(pattern, _text(path))
    return int(found[1]) if found else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
