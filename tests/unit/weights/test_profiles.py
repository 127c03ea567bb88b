"""Profiles on disk: by name, whole or not at all, and a clear word for what cannot be read."""

from pathlib import Path

import pytest

from headrace.core.errors import HeadraceError, InvalidInput, NotFound
from headrace.weights.profiles import ProfileStore
from tests.unit.cli.profile.profile_rig import a_profile

pytestmark = pytest.mark.unit


def test_what_was_saved_is_loaded_and_replaced_by_the_next(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "home" / "profiles")
    assert not store.has("tiny")
    path = store.save(a_profile())
    assert store.has("tiny") and store.load("tiny") == a_profile()
    store.save(a_profile(dtype="fp32"))
    assert store.load("tiny").dtype == "fp32"
    assert list(path.parent.iterdir()) == [path]


def test_a_name_of_nobody_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="headrace models profile other"):
        ProfileStore(tmp_path).load("other")


@pytest.mark.parametrize("name", ["", ".", "..", "../tiny", "a/b", "/etc/passwd", "a\0b", "x" * 101, "-a", "a b"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    store = ProfileStore(tmp_path / "profiles")
    assert not store.has(name)
    with pytest.raises(InvalidInput, match="cannot name a profile"):
        store.load(name)
    with pytest.raises(InvalidInput, match="cannot name a profile"):
        store.save(a_profile(name=name))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[1" + b"0" * 5000 + b"]", b" " * (2**22 + 1)]
)
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "tiny.json").write_bytes(body)
    with pytest.raises(InvalidInput, match="the profile stored as tiny") as caught:
        ProfileStore(tmp_path).load("tiny", "--profile")
    assert caught.value.param == "--profile"


def test_a_foreign_file_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text('{"name": "tiny", "version": 1}')
    with pytest.raises(InvalidInput, match="is not a Headrace profile"):
        ProfileStore(tmp_path).load("tiny")


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadraceError):
        ProfileStore(tmp_path / "file" / "profiles").save(a_profile())
