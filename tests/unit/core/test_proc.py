"""Cores and memory that a machine and its containers leave to a process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.core.proc import free_memory_bytes, new_pages, resident_bytes, usable_cores, waited_s
from tests.pages import mapping_flags

pytestmark = pytest.mark.unit


MIB = 1 << 20


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A system with 1,000 MiB available; `files` are those of its cgroups."""
    for name, words in {
        "proc/self/cgroup": cgroup,
        "proc/meminfo": f"MemAvailable: {1000 * 1024} kB\n",
        **{f"sys/fs/cgroup/{key}": each for key, each in files.items()},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words)
    return root


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def test_without_limits_it_is_what_one_may_run_on(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
    assert usable_cores(machine(tmp_path, "0::/\n", {"cpu.max": "max 100000\n"})) == 8


@pytest.mark.parametrize(
    ("quota", "cores"), [("350000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8), ("400000 200000", 2)]
)
def test_a_quota_is_whole_cores_and_one_at_least(tmp_path: Path, quota: str, cores: int) -> None:
    assert usable_cores(machine(tmp_path, "0::/\n", {"cpu.max": f"{quota}\n"})) == cores


def test_the_least_of_a_cgroup_and_its_parents_holds(tmp_path: Path) -> None:
    files = {"pod/box/cpu.max": "600000 100000\n", "pod/cpu.max": "200000 100000\n"}
    assert usable_cores(machine(tmp_path, "0::/pod/box\n", files)) == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 2)])
def test_the_first_version_of_cgroups(tmp_path: Path, quota: str, cores: int) -> None:
    files = {"cpu/box/cpu.cfs_quota_us": f"{quota}\n", "cpu/box/cpu.cfs_period_us": "100000\n"}
    assert usable_cores(machine(tmp_path, "5:cpu,cpuacct:/box\n", files)) == cores


def test_a_path_that_is_not_seen_from_inside_leaves_its_parents(tmp_path: Path) -> None:
    assert usable_cores(machine(tmp_path, "0::/docker/abc\n", {"cpu.max": "200000 100000\n"})) == 2


@pytest.mark.parametrize("words", ["", "max", "nonsense 3", "100000", "100000 0"])
def test_what_says_nothing_limits_nothing(tmp_path: Path, words: str) -> None:
    root = machine(tmp_path, "0::/\n", {"cpu.max": words, "memory.max": words, "memory.current": "5"})
    assert usable_cores(root) == 8
    assert free_memory_bytes(root) == (100000 - 5 if words == "100000" else 1000 * MIB)


@pytest.mark.parametrize("cgroup", ["", "\n", "nonsense\n", "0:/\n", "0::/caf\udce9\n", ":::\n"])
def test_lines_that_name_no_cgroup_are_passed_over(tmp_path: Path, cgroup: str) -> None:
    root = machine(tmp_path, "", {})
    (root / "proc/self/cgroup").write_bytes(cgroup.encode(errors="surrogateescape") + b"0::/box\n")
    (root / "sys/fs/cgroup/box").mkdir(parents=True)
    (root / "sys/fs/cgroup/box/cpu.max").write_text("300000 100000\n")
    assert usable_cores(root) == 3


@pytest.mark.parametrize(
    ("cgroup", "folder"), [("5:cpu,cpuacct:/box\n", "cpu,cpuacct/box"), ("0::/box\n", "unified/box")]
)
def test_controllers_may_be_mounted_together_or_aside(tmp_path: Path, cgroup: str, folder: str) -> None:
    files = {"cpu.max": "200000 100000\n", "cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"}
    root = machine(tmp_path, cgroup, {f"{folder}/{name}": words for name, words in files.items()})
    assert usable_cores(root) == 2


def test_without_limits_the_systems_memory_counts(tmp_path: Path) -> None:
    assert free_memory_bytes(machine(tmp_path, "", {})) == 1000 * MIB


def test_a_parent_cgroup_limits_memory_too(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": f"{300 * MIB}\n",
        "pod/memory.current": f"{100 * MIB}\n",
        "pod/box/memory.max": "max\n",
        "pod/box/memory.current": "5\n",
    }
    assert free_memory_bytes(machine(tmp_path, "0::/pod/box\n", files)) == 200 * MIB


def test_memory_in_the_first_version_of_cgroups(tmp_path: Path) -> None:
    files = {
        "memory/box/memory.limit_in_bytes": f"{400 * MIB}\n",
        "memory/box/memory.usage_in_bytes": f"{100 * MIB}\n",
    }
    assert free_memory_bytes(machine(tmp_path, "4:cpu:/box\n7:memory:/box\n", files)) == 300 * MIB


def test_what_threads_waited_for_cores_is_taken_together(tmp_path: Path) -> None:
    assert waited_s(root=tmp_path) == 0.0
    for thread, words in (("11", "5 2000000000 3\n"), ("12", "7 500000000 9\n"), ("13", ""), ("14", "0 what 3\n")):
        folder = tmp_path / "proc/self/task" / thread
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(words)
    (tmp_path / "proc/self/task/15").mkdir()
    assert waited_s(root=tmp_path) == 2.5
    assert waited_s({11, 99}, tmp_path) == 0.5


def _schedstat() -> bool:
    path = Path("/proc/self/schedstat")
    return path.exists() and path.read_text().split() != ["0", "0", "0"]


_SHARED_CORE = """
import os, subprocess, sys, time
from headrace.core.proc import waited_s

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    before_s, until_s = waited_s(), time.perf_counter() + 0.5
    while time.perf_counter() < until_s:
        pass
    print(waited_s() - before_s)
finally:
    other.kill()
    other.wait()
"""


@pytest.mark.skipif(not _schedstat(), reason="this system does not tell what threads wait for")
def test_who_shares_a_core_waits_for_it() -> None:
    told = subprocess.run([sys.executable, "-c", _SHARED_CORE], capture_output=True, text=True, check=True, timeout=60)
    assert float(told.stdout) > 0.02


def test_new_pages_are_zeros_that_take_memory_when_they_are_touched() -> None:
    before = resident_bytes()
    pages = new_pages(256 * MIB)
    assert resident_bytes() - before < 16 * MIB
    pages[: 64 * MIB : 4096] = b"x" * (64 * MIB // 4096)
    assert 48 * MIB < resident_bytes() - before < 96 * MIB
    assert (pages[4095], pages[4096], pages[-1]) == (0, ord("x"), 0)


def test_new_pages_ask_for_no_large_ones() -> None:
    pages, others = new_pages(8 * MIB), np.zeros(8 * MIB, np.uint8)
    assert "hg" not in mapping_flags(np.frombuffer(pages, np.uint8).ctypes.data)
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in mapping_flags(others.ctypes.data + 4 * MIB), (
            "numpy asks for none any more: new_pages is needed no longer"
        )


def test_more_than_can_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="no room for 1,152,921,504,606,846,976 bytes"):
        new_pages(1 << 60)
