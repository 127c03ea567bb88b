"""Cores and memory that a container leaves to its processes."""

import os
from pathlib import Path

import pytest

from headrace.core.cgroup import free_shares, usable_cores

pytestmark = pytest.mark.unit


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, words in {
        "proc/self/cgroup": cgroup,
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
    assert free_shares(root) == ([100000 - 5] if words == "100000" else [])
