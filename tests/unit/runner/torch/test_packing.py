"""Threads that pack: how much waits for them, and what becomes of an error in one."""

import gc
import math
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.runner.torch import kernels, packing
from headrace.runner.torch.decoder import DecoderWeights
from headrace.runner.torch.kernels import KERNELS
from headrace.runner.torch.linear import JoinedLinear
from headrace.runner.torch.packing import Packer, Recipe, num_threads
from headrace.weights.layout import tensor_dims
from tests.unit.runner.torch.model_rig import TensorCheckpoint, model

pytestmark = pytest.mark.unit


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("mistral")[1]


def of_layers(checkpoint: TensorCheckpoint, count: int) -> TensorCheckpoint:
    """The same with so many layers, each like the first."""
    again = {
        name.replace(".0.", f".{index}."): torch.from_numpy(values)
        for name, values in checkpoint.tensors()
        for index in range(count)
    }
    return TensorCheckpoint(replace(checkpoint.shape, num_layers=count), again)


def pack(checkpoint: TensorCheckpoint, recipe: Recipe) -> DecoderWeights:
    with closing(Packer(checkpoint.shape, recipe, 8)) as packer:
        packer.take(checkpoint.tensors())
        return packer.finish()


def test_reading_waits_while_as_many_layers_wait_to_be_packed(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is being packed, and the next cannot be handed over."""
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
    checkpoint = of_layers(checkpoint, 4)
    with closing(Packer(checkpoint.shape, Recipe("fp32"), 8, threads=1)) as packer:
        reader = threading.Thread(target=packer.take, args=(layers(),))
        reader.start()
        reader.join(0.5)
        assert reader.is_alive() and max(handed) == 1
        gate.set()
        reader.join(30)
        assert len(packer.finish().layers) == 4


def fail(self: Packer, *_: object) -> None:
    raise RuntimeError("no such kernel")


def test_what_fails_in_a_thread_fails_the_load_and_leaves_no_thread(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Packer, "_pack_layer", fail)
    with pytest.raises(RuntimeError, match="no such kernel"):
        pack(checkpoint, Recipe("fp32"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pack")]


def test_nothing_more_is_read_once_a_layer_has_failed(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all of a large model would be in memory before anybody heard of it."""
    monkeypatch.setattr(Packer, "_pack_layer", fail)
    many, seen = of_layers(checkpoint, 9), set()

    def layers() -> Iterator[tuple[str, NDArray[np.float32]]]:
        for name, values in sorted(many.tensors()):
            if name.startswith("model.layers."):
                seen.add(packing._layer_of(name))
            yield name, values

    with closing(Packer(many.shape, Recipe("fp32"), 8)) as packer, pytest.raises(RuntimeError, match="no such kernel"):
        packer.take(layers())
    assert max(seen) <= 2


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "wide"])
def test_threads_leave_engine_and_warnings_as_they_were(checkpoint: TensorCheckpoint, kernel: str) -> None:
    many = of_layers(checkpoint, 12)
    for _ in range(5):
        before = (torch.backends.quantized.engine, list(warnings.filters))
        pack(many, Recipe("int8", kernel))
        assert (torch.backends.quantized.engine, list(warnings.filters)) == before


def test_an_engine_is_shared_by_those_that_pack_for_it_and_others_wait() -> None:
    engine, inside, order = kernels._Engine(), threading.Barrier(2), list[str]()
    first, second = list(torch.backends.quantized.supported_engines)[-2:]
    gate, before = threading.Event(), torch.backends.quantized.engine

    def use(name: str) -> None:
        with engine.use(name):
            if name == first:
                inside.wait(30)
                gate.wait(30)
            order.append(torch.backends.quantized.engine)

    users = [threading.Thread(target=use, args=(name,)) for name in (first, first, second)]
    for user in users[:2]:
        user.start()
    while inside.n_waiting or engine._num_users < 2:
        time.sleep(0.001)
    users[2].start()
    users[2].join(0.2)
    assert users[2].is_alive() and order == []
    gate.set()
    for user in users:
        user.join(30)
    assert order == [first, first, second] and torch.backends.quantized.engine == before


def test_an_engine_that_is_not_there_changes_nothing() -> None:
    engine, before = kernels._Engine(), (torch.backends.quantized.engine, list(warnings.filters))
    for _ in range(2):
        with pytest.raises(RuntimeError), engine.use("steam"):
            raise AssertionError("there is none")
    assert (torch.backends.quantized.engine, list(warnings.filters)) == before


def test_where_memory_is_short_each_layer_is_packed_before_more_is_read(checkpoint: TensorCheckpoint) -> None:
    shape = replace(checkpoint.shape, num_layers=2)
    layer = sum(4 * math.prod(dims) for name, dims in tensor_dims(shape).items() if ".0." in name and len(dims) > 1)
    assert num_threads(shape, 6 * layer) == 2
    assert num_threads(shape, 6 * layer - 1) == num_threads(shape, -1) == 0
    found = []
    for threads in (0, 2):
        with closing(Packer(checkpoint.shape, Recipe("int8"), 8, threads)) as packer:
            packer.take(checkpoint.tensors())
            assert threads or all(layer.done() for layer in packer._layers.values())
            found.append(packer.finish())
    rows = torch.randn(3, checkpoint.shape.hidden_size)
    inline, threaded = ([weights.layers[0].qkv, weights.head] for weights in found)
    for one, other in zip(inline, threaded, strict=True):
        assert torch.equal(one.project_normed(rows), other.project_normed(rows))
    # The head is packed in a part for each thread.
    assert [isinstance(weights.head, JoinedLinear) for weights in found] == [False, True]
    assert found[0].size_bytes == found[1].size_bytes


def test_threads_that_pack_share_the_cores_and_give_them_back(checkpoint: TensorCheckpoint) -> None:
    before, seen = torch.get_num_threads(), set[int]()
    torch.set_num_threads(5)
    try:
        with closing(Packer(checkpoint.shape, Recipe("fp32"), 8)) as packer:
            packer.take(checkpoint.tensors())
            seen.add(packer._begin(torch.get_num_threads).result())
            packer.finish()
        with ThreadPoolExecutor(1) as later:
            after = later.submit(torch.get_num_threads).result()
        assert (seen, after, torch.get_num_threads()) == ({2}, 5, 5)
    finally:
        torch.set_num_threads(before)


def test_weights_hold_no_packer(checkpoint: TensorCheckpoint) -> None:
    """It has all layers as well: they would stay until a collection when the weights are dropped."""
    gc.collect()
    gc.disable()
    try:
        packer = Packer(checkpoint.shape, Recipe("fp32"), 8)
        packer.take(checkpoint.tensors())
        weights, gone = packer.finish(), weakref.ref(packer)
        packer.close()
        del packer
        assert weights.layers and gone() is None
    finally:
        gc.enable()
