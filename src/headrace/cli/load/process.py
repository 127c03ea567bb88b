"""What processes of this machine used, read from /proc. Owns the finding of a server's processes by its port."""

import os
import re
from pathlib import Path

from msgspec import Struct

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LISTENING = "0A"
GATEWAY = "headrace: gateway"


class Usage(Struct, frozen=True):
    """One process at one moment. CPU time is of all its threads, those that ended as well."""

    pid: int
    title: str
    cpu_s: float
    rss_bytes: int
    descriptors: int
    threads: int


def usage_of(pid: int) -> Usage | None:
    """None for a process that is gone, or not ours to look at."""
    folder = Path("/proc") / str(pid)
    try:
        # The name in parentheses may hold anything; the fields are what follows the last one.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        resident = int((folder / "statm").read_text().split()[1])
        descriptors = len(list((folder / "fd").iterdir()))
        title = _title(folder)
    except (OSError, IndexError, ValueError):
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) * _TICK_S
    return Usage(pid, title, cpu_s, resident * _PAGE, descriptors, int(fields[17]))


def server_pids(port: int) -> list[int]:
    """Who listens on a port here, and their descendants. Empty where that is not this machine, or not our user."""
    sockets = _listening(port)
    parents = _parents()
    owners = {pid for pid in parents if sockets and _holds(pid, sockets)}
    found = set(owners)
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return sorted(found)


def _listening(port: int) -> set[str]:
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes


def _holds(pid: int, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{name}") in sockets for name in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _parents() -> dict[int, int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(name)] = int(fields[1])
    return parents


def _title(folder: Path) -> str:
    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "backslashreplace").strip()
    shown = re.sub(r"\s+", " ", "".join(letter if letter.isprintable() else "?" for letter in words))
    return shown[:80]


def is_gateway(title: str) -> bool:
    return title.startswith(GATEWAY)
