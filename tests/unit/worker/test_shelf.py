"""Finds are believed while all that they depend on is as it was, and never stand in the way."""

from pathlib import Path

import pytest

from headrace.core.config import CostProfile
from headrace.worker.shelf import Shelf

PROFILE = CostProfile(c0_s=0.5)


def test_what_was_kept_is_found_at_the_next_start(tmp_path: Path) -> None:
    Shelf(tmp_path / "new").keep("a", ("model", 1), PROFILE)
    assert Shelf(tmp_path / "new").find("a", ("model", 1), CostProfile) == PROFILE
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_find_that_depends_on_something_else_is_none(tmp_path: Path) -> None:
    Shelf(tmp_path, {"OMP": "1"}).keep("a", ("model", 1), PROFILE)
    assert Shelf(tmp_path, {"OMP": "1"}).find("a", ("model", 2), CostProfile) is None
    assert Shelf(tmp_path, {"OMP": "2"}).find("a", ("model", 1), CostProfile) is None
    assert Shelf(tmp_path, {"OMP": "1"}).find("b", ("model", 1), CostProfile) is None


def test_a_newer_find_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.keep("a", 1, PROFILE)
    shelf.keep("a", 2, CostProfile())
    assert shelf.find("a", 1, CostProfile) is None
    assert shelf.find("a", 2, CostProfile) == CostProfile()


@pytest.mark.parametrize("cut", [0, 1, 40, -2])
def test_a_broken_file_is_no_find(tmp_path: Path, cut: int) -> None:
    shelf = Shelf(tmp_path)
    shelf.keep("a", 1, PROFILE)
    path = tmp_path / "a.json"
    path.write_bytes(path.read_bytes()[:cut])
    assert shelf.find("a", 1, CostProfile) is None


@pytest.mark.parametrize("body", [b"\xff\xfe", b"[]", b'{"depends_on": 1}', b"0" * 100_000])
def test_a_file_of_something_else_is_no_find(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "a.json").write_bytes(body)
    assert Shelf(tmp_path).find("a", 1, CostProfile) is None


def test_a_value_of_another_kind_is_no_find(tmp_path: Path) -> None:
    Shelf(tmp_path).keep("a", 1, "words")
    assert Shelf(tmp_path).find("a", 1, CostProfile) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shelf = Shelf(tmp_path / "file")
    shelf.keep("a", 1, PROFILE)
    assert shelf.find("a", 1, CostProfile) is None


def test_names_stay_in_the_folder(tmp_path: Path) -> None:
    Shelf(tmp_path / "shelf").keep("../a/b", 1, PROFILE)
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["shelf"]
