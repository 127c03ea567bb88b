"""Truncated and flipped files: only InvalidModel ever comes out, quickly, and in little memory."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.core.errors import InvalidModel
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.gguf_header import read_gguf_header
from headrace.weights.weight_file import WeightFile
from tests.unit.weights.files import tiny_shape, write_folder, write_gguf

pytestmark = pytest.mark.unit

SPARE_BYTES = 2**28


@contextmanager
def little_memory() -> Iterator[None]:
    """What is allocated beyond a quarter of a gigabyte fails."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(path: Path) -> str:
    """ "read" or the message of the refusal; anything else is a failure of the test."""
    with little_memory():
        try:
            checkpoint = open_checkpoint(path)
            try:
                for _ in checkpoint.tensors():
                    pass
            finally:
                checkpoint.close()
        except InvalidModel as error:
            return error.message
    return "read"


class Victim:
    """A sound file that is damaged in ever new ways."""

    def __init__(self, path: Path, opened: Path, header_bytes: int) -> None:
        self.path = path
        self.opened = opened
        self.header_bytes = header_bytes
        self.sound = path.read_bytes()

    def damaged(self, data: bytes) -> str:
        self.path.write_bytes(data)
        return outcome(self.opened)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, tiny_shape(num_layers=1), kind=GGMLQuantizationType.Q8_0)
    file = WeightFile(path)
    start = min(tensor.offset for tensor in read_gguf_header(file).tensors)
    file.close()
    return Victim(path, path, start)


@pytest.fixture(scope="module")
def safetensors_file(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    folder = write_folder(tmp_path_factory.mktemp("folder"), tiny_shape(num_layers=1))
    path = folder / "model.safetensors"
    return Victim(path, folder, 8 + int.from_bytes(path.read_bytes()[:8], "little"))


@pytest.fixture(params=["gguf", "safetensors"])
def victim(request: pytest.FixtureRequest) -> Victim:
    found: Victim = request.getfixturevalue(f"{request.param}_file")
    return found


def test_the_sound_files_are_read(victim: Victim) -> None:
    assert victim.damaged(victim.sound) == "read"


def test_truncated_anywhere(victim: Victim) -> None:
    size = len(victim.sound)
    places = {*range(64), *range(64, victim.header_bytes, 13), *range(victim.header_bytes, size, 5003), size - 1}
    for place in sorted(places):
        assert victim.damaged(victim.sound[:place]) != "read", place


def test_absurd_counts_are_refused_at_once(gguf_file: Victim) -> None:
    """Each eight bytes of the header in turn become the largest number there is, and one that looks likely."""
    for number in (2**64 - 1, 2**31):
        for place in range(8, min(1000, gguf_file.header_bytes), 4):
            data = bytearray(gguf_file.sound)
            data[place : place + 8] = number.to_bytes(8, "little")
            gguf_file.damaged(bytes(data))


def test_a_list_that_never_ends(tmp_path: Path) -> None:
    """A count of items with nothing behind it, of a kind without bytes to run out of in the library's reader."""
    for kind in (0, 7, 8, 9, 12, 99):
        key = (1).to_bytes(8, "little") + b"k"
        body = (9).to_bytes(4, "little") + kind.to_bytes(4, "little") + (2**62).to_bytes(8, "little")
        head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
        (tmp_path / "m.gguf").write_bytes(head + key + body)
        assert "m.gguf: " in outcome(tmp_path / "m.gguf")


def flip(data: bytes, flips: list[tuple[int, int]], limit: int) -> bytes:
    changed = bytearray(data)
    for place, byte in flips:
        changed[place % limit] = byte
    return bytes(changed)


FLIPS = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=6)


@given(flips=FLIPS)
@settings(max_examples=100)
@example(flips=[(8, 255)])
def test_flipped_bytes_in_a_gguf_header(gguf_file: Victim, flips: list[tuple[int, int]]) -> None:
    assert gguf_file.damaged(flip(gguf_file.sound, flips, gguf_file.header_bytes))


@given(flips=FLIPS)
@settings(max_examples=100)
@example(flips=[(0, 255)])
def test_flipped_bytes_in_a_safetensors_header(safetensors_file: Victim, flips: list[tuple[int, int]]) -> None:
    assert safetensors_file.damaged(flip(safetensors_file.sound, flips, safetensors_file.header_bytes))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@given(flips=FLIPS)
@settings(max_examples=40)
def test_flipped_bytes_in_the_documents(safetensors_file: Victim, name: str, flips: list[tuple[int, int]]) -> None:
    safetensors_file.path.write_bytes(safetensors_file.sound)
    path = safetensors_file.opened / name
    sound = path.read_bytes()
    try:
        path.write_bytes(flip(sound, flips, len(sound)))
        assert outcome(safetensors_file.opened)
    finally:
        path.write_bytes(sound)


@given(data=st.binary(max_size=400))
@settings(max_examples=100)
def test_noise_is_no_model(gguf_file: Victim, data: bytes) -> None:
    assert gguf_file.damaged(data) != "read"
    assert gguf_file.damaged(gguf_file.sound[:24] + data) != "read"
