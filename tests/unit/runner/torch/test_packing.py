"""Threads that pack: how much waits for them, and what becomes of an error in one."""

import gc
import math
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.runner.torch import kernels, packing, rotation
from headrace.runner.torch.decoder import DecoderWeights
from headrace.runner.torch.kernels import KERNELS
from headrace.runner.torch.linear import JoinedLinear
from headrace.runner.torch.packing import Packer, Recipe, num_threads
from headrace.runner.torch.rotation import Rotation
from headrace.weights.layout import tensor_dims
from tests.unit.runner.torch.model_rig import TensorCheckpoint, model

pytestmark = pytest.mark.unit


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    with torch_threads(2):
        assert [num_threads(shape, spare * layer) for spare in (100, 6, 5.9, 4, 3.9, -1)] == [2, 2, 1, 1, 0, 0]
    with torch_threads(64):
        assert num_threads(shape, 1000 * layer) == 8
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
    assert found[0].size_bytes == found[1].size_bytes


def test_threads_that_pack_compute_alone_and_leave_torch_as_it_was(checkpoint: TensorCheckpoint) -> None:
    with torch_threads(5):
        for threads in (0, 3):
            with closing(Packer(checkpoint.shape, Recipe("fp32"), 8, threads)) as packer:
                packer.take(checkpoint.tensors())
                assert packer._begin(torch.get_num_threads).result() == 1
                packer.finish()
            with ThreadPoolExecutor(1) as later:
                after = later.submit(torch.get_num_threads).result()
            assert (after, torch.get_num_threads()) == (5, 5)


# Of a model wide enough for libraries to share a product: everything that was made of its tensors.
_PACKED = """
import hashlib, sys
import numpy as np, torch
from contextlib import closing
from headrace.runner.torch.linear import JoinedLinear
from headrace.runner.torch.packing import Packer, Recipe
from headrace.weights.layout import tensor_dims
from headrace.weights.shape import ModelShape

shape = ModelShape("llama", 576, 1, 9, 3, 64, 768, 4001, 512, 1e-5, 1e4, tied_embeddings=True)
chance = np.random.default_rng(0)
tensors = {name: chance.standard_normal(dims, np.float32) for name, dims in tensor_dims(shape).items()}
rows = torch.from_numpy(chance.standard_normal((3, 576), np.float32))
for cores, threads in ((1, 0), (2, 0), (2, 2), (2, 3)):
    torch.set_num_threads(cores)
    with closing(Packer(shape, Recipe("int8"), 8, threads)) as packer:
        packer.take((name, values.copy()) for name, values in tensors.items())
        weights = packer.finish()
    torch.set_num_threads(1)
    layer = weights.layers[0]
    made = (weights.embeddings, layer.qkv.project_normed(rows), layer.out.project(rows), weights.head.project_normed(rows))
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in made)).hexdigest()
    print(digest, isinstance(weights.head, JoinedLinear))
"""


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512"])
def test_packed_bits_depend_neither_on_cores_nor_on_threads(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere than with Intel's library the first variable is not heard."""
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", instructions)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    done = subprocess.run([sys.executable, "-c", _PACKED], capture_output=True, text=True, check=True)
    digests, joined = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    assert len(digests) == 4 and len(set(digests)) == 1
    assert joined == ("False", "False", "True", "True")


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("family", ["mistral", "llama3"])
def test_embeddings_are_turned_where_they_lie(family: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reads them before that, where it has no lines of its own; two threads take a part each."""
    checkpoint = model(family)[1]
    monkeypatch.setattr(rotation, "_SLICE", 50 * checkpoint.shape.hidden_size)
    assert checkpoint.shape.tied_embeddings is (family == "llama3")
    tensors = dict(checkpoint.tensors())
    embeddings = tensors["model.embed_tokens.weight"]
    before = torch.from_numpy(embeddings.copy())
    with closing(Packer(checkpoint.shape, Recipe("int8"), 8, threads)) as packer:
        packer.take(tensors.items())
        weights = packer.finish()
    assert isinstance(weights.head, JoinedLinear) is bool(threads)
    assert weights.embeddings.data_ptr() == embeddings.ctypes.data
    assert torch.equal(weights.embeddings, Rotation(checkpoint.shape.hidden_size).turn_inputs(before))
    whole = pack(checkpoint, Recipe("fp32"))
    rows = torch.randn(5, checkpoint.shape.hidden_size)
    turned = Rotation(checkpoint.shape.hidden_size).turn_inputs(rows)
    with torch.inference_mode():
        logits, truth = weights.head.project_normed(turned), whole.head.project_normed(rows)
    assert (logits - truth).abs().max() < 0.02 * truth.abs().max()


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
