"""Threads that pack: how much waits for them, and what becomes of an error in one."""

import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.runner.torch import packing
from headrace.runner.torch.packing import Packer, Recipe
from tests.unit.runner.torch.model_rig import TensorCheckpoint, model

pytestmark = pytest.mark.unit


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("mistral")[1]


def test_reading_waits_while_as_many_layers_wait_to_be_packed(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is being packed, one waits, and a third cannot be handed over."""
    handed: list[int] = []
    gate, pack = threading.Event(), Packer._pack_layer

    def slow(self: Packer, *given: object) -> object:
        gate.wait(30)
        return pack(self, *given)  # type: ignore[arg-type]

    def layers() -> Iterator[tuple[str, NDArray[np.float32]]]:
        for name, values in sorted(checkpoint.tensors()):
            if name.startswith("model.layers."):
                handed.append(packing._layer_of(name))
            yield name, values

    monkeypatch.setattr(Packer, "_pack_layer", slow)
    monkeypatch.setattr(packing, "_THREADS", 1)
    shape = replace(checkpoint.shape, num_layers=4)
    again = {name.replace(".0.", f".{index}."): values for name, values in checkpoint.tensors() for index in range(4)}
    checkpoint = TensorCheckpoint(shape, {name: torch.from_numpy(values) for name, values in again.items()})
    with closing(Packer(shape, Recipe("fp32"), 8)) as packer:
        reader = threading.Thread(target=packer.take, args=(layers(),))
        reader.start()
        reader.join(0.5)
        assert reader.is_alive() and max(handed) == 2
        gate.set()
        reader.join(30)
        assert len(packer.finish().layers) == 4


def test_what_fails_in_a_thread_fails_the_load_and_leaves_no_thread(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Packer, *_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Packer, "_pack_layer", fail)
    with closing(Packer(checkpoint.shape, Recipe("fp32"), 8)) as packer:
        packer.take(checkpoint.tensors())
        with pytest.raises(RuntimeError, match="no such kernel"):
            packer.finish()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pack")]
