"""Checkpoints poured as they are stored: every byte once and in its place, hashed as it was read, or a clear refusal."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from headrace.core.errors import InvalidModel
from headrace.weights.checkpoint import Checkpoint, open_checkpoint
from headrace.weights.weight_file import StoredTensor, WeightFile
from tests.unit.weights.files import as_bytes, random_tensors, tiny_shape, write_folder, write_gguf

pytestmark = pytest.mark.unit


class Basin:
    """Where several taps pour together: the bytes of each tensor as they came."""

    def __init__(self, room_bytes: int = 1000) -> None:
        self.room_bytes = room_bytes
        self.poured: dict[str, bytes] = {}
        self.threads: dict[str, int] = {}
        self.not_finite = ""
        self.num_open = 0

    @contextmanager
    def open_tap(self) -> Iterator["BasinTap"]:
        self.num_open += 1
        try:
            yield BasinTap(self)
        finally:
            self.num_open -= 1


class BasinTap:
    def __init__(self, basin: Basin) -> None:
        self._basin = basin
        self._room = memoryview(bytearray(basin.room_bytes))

    def lend(self) -> memoryview:
        return self._room

    def take(self, tensor: StoredTensor, start: int, raw: memoryview) -> None:
        before = self._basin.poured.get(tensor.name, b"")
        assert start == len(before) and len(raw) % tensor.encoding.block_bytes == 0
        self._basin.poured[tensor.name] = before + bytes(raw)
        self._basin.threads[tensor.name] = get_ident()
        self._room[:] = b"\xff" * len(self._room)

    def is_finite(self, tensor: StoredTensor) -> bool:
        assert len(self._basin.poured[tensor.name]) == tensor.size_bytes
        return tensor.name != self._basin.not_finite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path, tiny_shape(), dtype="BF16", shards=3)


@pytest.fixture
def checkpoint(folder: Path) -> Iterator[Checkpoint]:
    opened = open_checkpoint(folder)
    yield opened
    opened.close()


@pytest.mark.parametrize("room_bytes", [2, 1000, 1 << 20])
def test_bytes_come_as_they_are_stored(checkpoint: Checkpoint, room_bytes: int) -> None:
    basin = Basin(room_bytes)
    checkpoint.pour(basin.open_tap)
    assert basin.poured == {name: as_bytes(values, "BF16") for name, values in random_tensors(tiny_shape()).items()}


def test_every_file_is_hashed_while_it_is_poured(checkpoint: Checkpoint, folder: Path) -> None:
    checkpoint.pour(Basin().open_tap)
    expected = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    checkpoint.close()
    # Nothing is left to read: the hashes are of what was poured.
    assert checkpoint.digest() == expected


def test_each_file_is_poured_by_a_thread_that_is_not_the_callers(checkpoint: Checkpoint) -> None:
    basin = Basin()
    checkpoint.pour(basin.open_tap)
    assert get_ident() not in basin.threads.values() and basin.num_open == 0


def test_progress_is_the_callers_and_ends_at_the_size_of_all_files(checkpoint: Checkpoint) -> None:
    heard: list[tuple[int, int, int]] = []
    checkpoint.pour(Basin().open_tap, lambda done, total: heard.append((done, total, get_ident())))
    assert heard[-1] == (checkpoint.size_bytes, checkpoint.size_bytes, get_ident())
    assert heard == sorted(heard)


def test_who_has_had_enough_is_left_alone(checkpoint: Checkpoint) -> None:
    class Enough(Exception): ...

    def progress(done: int, total: int) -> None:
        raise Enough

    basin = Basin()
    with pytest.raises(Enough):
        checkpoint.pour(basin.open_tap, progress)
    assert basin.num_open == 0


def test_a_number_that_is_not_finite_is_told_with_its_file(checkpoint: Checkpoint) -> None:
    basin = Basin()
    basin.not_finite = "model.norm.weight"
    with pytest.raises(InvalidModel, match=r"^model-0000\d-of-00003\.safetensors: tensor model\.norm\.weight holds"):
        checkpoint.pour(basin.open_tap)
    assert basin.num_open == 0


def test_a_file_that_shrinks_meanwhile_is_refused(checkpoint: Checkpoint, folder: Path) -> None:
    with (folder / "model-00002-of-00003.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(InvalidModel, match="too early"):
        checkpoint.pour(Basin().open_tap)


def test_a_file_that_changed_is_refused(checkpoint: Checkpoint, folder: Path) -> None:
    with (folder / "model-00002-of-00003.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InvalidModel, match="changed"):
        checkpoint.pour(Basin().open_tap)


def test_what_the_model_does_not_use_is_hashed_and_not_poured(tmp_path: Path) -> None:
    tied = tiny_shape(tied_embeddings=True)
    opened = open_checkpoint(write_folder(tmp_path, tied, random_tensors(tiny_shape())))
    basin = Basin()
    opened.pour(basin.open_tap)
    assert basin.poured.keys() == random_tensors(tied).keys()
    whole = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert opened.digest()["model.safetensors"] == whole
    opened.close()


def test_quantised_blocks_are_not_cut(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_shape(), kind=GGMLQuantizationType.Q8_0)
    opened = open_checkpoint(path)
    basin = Basin(room_bytes=34 * 7 + 5)
    opened.pour(basin.open_tap)
    assert len(basin.poured["model.layers.0.mlp.down_proj.weight"]) == 64 * 96 // 32 * 34
    assert np.frombuffer(basin.poured["model.norm.weight"], "<f4").shape == (64,)
    assert opened.digest() == {"m.gguf": hashlib.sha256(path.read_bytes()).hexdigest()}
    opened.close()


def test_what_is_hashed_ahead_is_poured_all_the_same(checkpoint: Checkpoint, folder: Path) -> None:
    expected = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    basin, heard = Basin(), list[int]()
    checkpoint.hash_ahead()
    checkpoint.pour(basin.open_tap, lambda done, total: heard.append(done))
    assert basin.poured == {name: as_bytes(values, "BF16") for name, values in random_tensors(tiny_shape()).items()}
    assert checkpoint.digest() == expected
    assert heard[-1] == checkpoint.size_bytes


def test_a_file_that_changed_between_its_hash_and_its_pouring_is_refused(checkpoint: Checkpoint, folder: Path) -> None:
    checkpoint.hash_ahead()
    checkpoint.digest()
    with (folder / "model-00002-of-00003.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(InvalidModel, match="changed"):
        checkpoint.pour(Basin().open_tap)


def test_a_file_that_changed_before_it_was_hashed_has_no_digest(checkpoint: Checkpoint, folder: Path) -> None:
    with (folder / "model-00002-of-00003.safetensors").open("ab") as file:
        file.write(b"x")
    checkpoint.hash_ahead()
    with pytest.raises(InvalidModel, match="changed"):
        checkpoint.digest()


def test_closing_breaks_off_what_is_hashed_ahead(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as sparse:
        sparse.truncate(1 << 36)
    file = WeightFile(path)
    with ThreadPoolExecutor(1) as threads:
        file.hash_ahead(threads)
        file.close()
    with pytest.raises(InvalidModel, match="closed before it was read"):
        file.hash()


def test_what_is_hashed_ahead_is_not_hashed_again_where_it_is_decoded(
    checkpoint: Checkpoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    checkpoint.hash_ahead()
    assert checkpoint.digest() == expected
    monkeypatch.setattr("headrace.weights.weight_file.hashlib.sha256", None)
    assert {name for name, _ in checkpoint.tensors()} == set(random_tensors(tiny_shape()))
    assert checkpoint.digest() == expected
