"""A model put together for the device that was asked for, or that there is."""

from collections.abc import Iterator
from itertools import repeat
from threading import Event, Thread, current_thread
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.config import ModelConfig
from headrace.core.errors import InvalidInput, InvalidModel
from headrace.runner.cuda import compilers, presence
from headrace.runner.cuda.presence import CardLook
from headrace.runner.torch import probe, threads
from headrace.weights.checkpoint import Progress
from headrace.worker import mounting
from headrace.worker.assembly import LoadSettings, engine_config, load_weights
from headrace.worker.warmup import SCENES
from tests.unit.runner.torch.model_rig import TensorCheckpoint, model


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("llama2")[1]


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "look_for_card", lambda: CardLook(False, "torch sees no CUDA card"))


@pytest.mark.usefixtures("no_card")
def test_without_a_card_auto_is_the_cpu(checkpoint: TensorCheckpoint) -> None:
    loaded = load_weights(checkpoint, LoadSettings(slots=2, dtype="fp32", kv_tokens=256))
    assert (loaded.device, loaded.dtype, loaded.scenes) == ("cpu", "fp32", SCENES)
    assert loaded.runner.depth == 1
    assert loaded.config.blocks == 32
    assert "in 32 blocks of 8" in loaded.notes[-1]
    assert loaded.runner.fingerprint.startswith("fp32-")
    loaded.runner.close()


@pytest.mark.usefixtures("no_card")
def test_weights_are_read_in_a_thread_after_kernels_were_briefly_tried(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while they are: they are timed."""
    has_begun, tensors, choose = Event(), checkpoint.tensors, probe.choose
    read, progress = [], [(0, 1)]
    readers = set()

    def read_tensors(tell: Progress) -> Iterator[Any]:
        has_begun.set()
        for name, values in tensors():
            readers.add(current_thread().name)
            read.append(name)
            yield name, values
        tell(1, 1)

    def try_kernels(*words: Any, brief: bool, **more: Any) -> probe.Choice:
        made = choose(*words, brief=brief, **more)
        assert brief and not has_begun.is_set()
        return made

    monkeypatch.setattr(checkpoint, "tensors", read_tensors)
    monkeypatch.setattr(probe, "choose", try_kernels)
    settings = LoadSettings(slots=2, kv_tokens=256)
    load_weights(checkpoint, settings, lambda done, total: progress.append((done, total))).runner.close()
    assert read == list(checkpoint.state) and readers == {"read ahead"}
    assert progress == [(0, 1), (1, 1)]


@pytest.mark.usefixtures("no_card")
def test_weights_are_not_read_on_where_they_cannot_be_packed(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[Thread] = []

    def tensors(progress: Progress) -> Iterator[Any]:
        readers.append(current_thread())
        yield from repeat(("model.norm.weight", np.zeros(2**20, np.float32)))

    monkeypatch.setattr(checkpoint, "tensors", tensors)
    with pytest.raises(InvalidModel):
        load_weights(checkpoint, LoadSettings(slots=2, kv_tokens=256))
    assert len(readers) == 1 and not readers[0].is_alive()


@pytest.mark.usefixtures("no_card")
def test_it_computes_with_no_more_threads_than_may_be_busy(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr(threads, "usable_cores", lambda: 1)
        load_weights(checkpoint, LoadSettings(slots=2, dtype="fp32", kv_tokens=256)).runner.close()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("no_card")
def test_without_a_card_cuda_is_refused_before_anything_is_read(checkpoint: TensorCheckpoint) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_weights(checkpoint, LoadSettings(device="cuda"))
    assert caught.value.message == 'device is "cuda": torch sees no CUDA card'
    assert caught.value.param == "device"


def test_a_step_is_as_large_as_its_device_bears(checkpoint: TensorCheckpoint) -> None:
    assert engine_config(checkpoint, LoadSettings(), "cpu").max_step_tokens == 256
    assert engine_config(checkpoint, LoadSettings(), "cuda").max_step_tokens == 8192
    assert engine_config(checkpoint, LoadSettings(max_step_tokens=100), "cuda").max_step_tokens == 100
    assert engine_config(checkpoint, LoadSettings(slots=300), "cpu").max_step_tokens == 300


def test_prompts_share_shorter_blocks_where_tokens_are_dear(checkpoint: TensorCheckpoint) -> None:
    kv_tokens = 100
    on_cpu, on_card = (
        engine_config(checkpoint, LoadSettings(kv_tokens=kv_tokens), device) for device in ("cpu", "cuda")
    )
    assert (on_cpu.block_size, on_cpu.blocks) == (8, 13)
    assert (on_card.block_size, on_card.blocks) == (16, 7)
    assert engine_config(checkpoint, LoadSettings(block_size=32), "cpu").block_size == 32


def test_a_worker_loads_for_its_models_device_and_the_card_of_its_number(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[LoadSettings] = []

    def load(given: object, settings: LoadSettings, progress: object) -> None:
        asked.append(settings)
        raise InvalidInput("enough")

    monkeypatch.setattr(mounting, "open_checkpoint", lambda path: checkpoint)
    monkeypatch.setattr(mounting, "load_weights", load)
    with pytest.raises(InvalidInput, match="enough"):
        mounting.mount_torch(checkpoint.path, ModelConfig("m", device="cuda"), (), lambda part, words: None, 3)
    assert [(settings.device, settings.card) for settings in asked] == [("cuda", 3)]


@pytest.mark.parametrize("read", [1, 2])
def test_the_lexicon_is_made_beside_the_load_and_after_the_weights_are_read(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    made = Event()

    def load(given: object, settings: LoadSettings, progress: Progress) -> None:
        for done in range(read + 1):
            assert not made.is_set()
            progress(done, 2)
        # Nobody makes it for a model that is refused while it is read.
        assert made.wait(10.0 if read == 2 else 0.2) == (read == 2)
        raise InvalidInput("enough")

    monkeypatch.setattr(mounting, "open_checkpoint", lambda path: checkpoint)
    monkeypatch.setattr(mounting, "Tokenizer", lambda vocabulary: None)
    monkeypatch.setattr(mounting, "_lexicon", lambda *_: made.set())
    monkeypatch.setattr(mounting, "load_weights", load)
    with pytest.raises(InvalidInput, match="enough"):
        mounting.mount_torch(checkpoint.path, ModelConfig("m"), (), lambda part, words: None)


@pytest.mark.parametrize("begun", [0, 1])
def test_files_are_hashed_and_compilers_begin_only_where_there_may_be_a_card(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch, begun: int
) -> None:
    asked: list[int] = []
    noted: list[Any] = []

    class Noted:
        def __init__(self, *given: int) -> None:
            self.given = given
            noted.append(("begun", *given))

        def close(self) -> None:
            noted.append(("closed", *self.given))

    def may_take(*given: object) -> bool:
        noted.append(given)
        return bool(begun)

    def look() -> CardLook:
        raise InvalidInput(f"torch is imported after {len(asked)}")

    monkeypatch.setattr(checkpoint, "hash_ahead", lambda: asked.append(1))
    monkeypatch.setattr(compilers, "Compilers", Noted)
    monkeypatch.setattr(presence, "may_take_card", may_take)
    monkeypatch.setattr(presence, "WokenCard", Noted)
    monkeypatch.setattr(presence, "look_for_card", look)
    with pytest.raises(InvalidInput, match=f"after {begun}"):
        load_weights(checkpoint, LoadSettings(device="cuda", dtype="bf16", card=3))
    assert noted.pop(0) == ("cuda", "bf16", checkpoint.shape)
    assert noted == begun * [("begun",), ("begun", 3), ("closed", 3), ("closed",)]
