"""Weights poured onto a device: as if they had been decoded on the host, whatever they are stored in."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from headrace.core.errors import InvalidModel
from headrace.runner.cuda.tap import DeviceTap
from headrace.runner.cuda.weights import LayerWeights, Weights, from_checkpoint
from headrace.weights.checkpoint import open_checkpoint
from headrace.weights.encodings import BF16
from headrace.weights.weight_file import StoredTensor
from tests.unit.runner.cuda.late import LateLane
from tests.unit.runner.torch.model_rig import TensorCheckpoint
from tests.unit.weights.files import random_tensors, tiny_shape, write_folder, write_gguf

CPU = torch.device("cpu")


def parts(weights: Weights) -> list[Tensor]:
    layers = [getattr(layer, name) for layer in weights.layers for name in LayerWeights.__slots__]
    return [weights.embeddings, weights.norm, weights.head, *(part for part in layers if part is not None)]


def load(path: Path, dtype: torch.dtype) -> Weights:
    checkpoint = open_checkpoint(path)
    try:
        return from_checkpoint(checkpoint)(checkpoint.shape, CPU, dtype)
    finally:
        checkpoint.close()


def load_decoded(path: Path, dtype: torch.dtype) -> Weights:
    """The other way: everything as float32 on the host first."""
    checkpoint = open_checkpoint(path)
    try:
        decoded = {name: torch.from_numpy(array) for name, array in checkpoint.tensors()}
    finally:
        checkpoint.close()
    return from_checkpoint(TensorCheckpoint(checkpoint.shape, decoded))(checkpoint.shape, CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", ["BF16", "F16", "F32"])
def test_what_is_stored_is_what_arrives(tmp_path: Path, stored: str, dtype: torch.dtype) -> None:
    path = write_folder(tmp_path, tiny_shape(), dtype=stored, shards=2)
    for found, expected in zip(parts(load(path, dtype)), parts(load_decoded(path, dtype)), strict=True):
        assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F32])
def test_gguf_is_decoded_and_its_heads_put_in_order(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_shape(), kind=kind)
    for found, expected in zip(
        parts(load(path, torch.bfloat16)), parts(load_decoded(path, torch.bfloat16)), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_a_number_that_is_not_finite_is_found_on_the_device(tmp_path: Path, number: float) -> None:
    tensors = random_tensors(tiny_shape())
    tensors["model.layers.1.mlp.up_proj.weight"][95, 63] = number
    with pytest.raises(InvalidModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds a number") as refused:
        load(write_folder(tmp_path, tiny_shape(), tensors, dtype="BF16"), torch.bfloat16)
    assert refused.value.param == "model.layers.1.mlp.up_proj.weight"


def test_a_place_that_nothing_was_poured_into_is_missed() -> None:
    tensors = {name: torch.from_numpy(values) for name, values in random_tensors(tiny_shape()).items()}
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(InvalidModel, match=r"layers\.0\.self_attn\.k_proj\.weight is missing"):
        from_checkpoint(TensorCheckpoint(tiny_shape(), tensors))(tiny_shape(), CPU, torch.float32)


class LateTap(DeviceTap):
    """Its copies are made when the device comes to them, from memory as it is then."""

    def __init__(self, lane: LateLane, places: dict[str, Tensor]) -> None:
        super().__init__(lane, places, set(), slice_bytes=64)
        self._late = lane

    def _put(self, tensor: StoredTensor, start: int, letter: Tensor, raw: memoryview, flat: Tensor) -> None:
        self._late.put(lambda: DeviceTap._put(self, tensor, start, letter, raw, flat))


def test_memory_is_not_read_into_again_before_it_was_sent() -> None:
    lane, place = LateLane(), torch.zeros(50, 10, dtype=torch.bfloat16)
    tap, stored = LateTap(lane, {"w": place}), bf16("w", 50, 10)
    values = torch.arange(500, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    for start in range(0, len(values), 64):
        room = tap.lend()[: len(values[start : start + 64])]
        room[:] = values[start : start + 64]
        tap.take(stored, start, room)
    assert lane.latest > 2
    lane.settle()
    assert torch.equal(place.view(-1), torch.arange(500, dtype=torch.bfloat16))


def bf16(name: str, *dims: int) -> StoredTensor:
    return StoredTensor(name, dims, BF16, 0, 2 * int(np.prod(dims)))
