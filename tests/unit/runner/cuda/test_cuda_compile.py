"""Kernels compiled by other processes while weights are read. What they are compiled for needs not be here."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace

from headrace.core.config import EngineConfig
from headrace.core.errors import RunnerFailed
from headrace.runner.cuda import compilers as compilers_module
from headrace.runner.cuda import products
from headrace.runner.cuda.compilers import Compilers, Order
from headrace.runner.cuda.kernels import ahead
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.products import Noted, fastest_product, products_noted
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.weights import Weights, blank_weights, from_checkpoint, weights_bytes
from tests.unit.runner.torch.model_rig import TensorCheckpoint, model

ROOT = Path(__file__).resolve().parents[4]
OURS = ["_silu_mul", "_first", "_second"]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The program, with an empty cache of Triton's before its first run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    # Children do not import from where they are.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))

    def run(*words: str) -> dict[str, Any]:
        argv = [sys.executable, "-m", "tests.unit.runner.cuda.compile_alone", *words]
        done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=120, check=True)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    return run


def test_kernels_are_compiled_elsewhere_and_then_only_launched(alone: Callable[..., dict[str, Any]]) -> None:
    for _ in range(2):
        found = alone()
        # The product was not made while `work` was only listened to, and is what it should be afterwards.
        assert found["began"] == [0.0, 256.0]
        assert found["inside"] == [[], []]
        assert found["compiled"] == found["later"] == []
        assert found["launched"] == OURS
        assert found["gone"]


def test_what_nobody_compiled_is_compiled_here(alone: Callable[..., dict[str, Any]]) -> None:
    found = alone("killed")
    assert (found["compiled"], found["later"], found["launched"]) == (sorted(OURS), [], OURS)


def test_a_process_that_dies_while_it_compiles_is_not_waited_for(alone: Callable[..., dict[str, Any]]) -> None:
    found = alone("loses one")
    assert found["quick"] and found["gone"]
    assert (found["later"], found["launched"]) == ([], OURS)


def test_what_compilers_say_is_no_answer(alone: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    assert alone()["launched"] == OURS


def test_a_failure_meanwhile_ends_it(alone: Callable[..., dict[str, Any]]) -> None:
    found = alone("fails")
    assert found["caught"] == "weights that are none"
    assert found["gone"] and found["quick"]
    # They are compiled when they are needed, if they were not yet.
    assert found["launched"] == OURS


ORDER = Order(("cuda", 90, 32), [("no.module", "_kernel", "{}")])


def test_a_process_that_died_has_compiled_nothing() -> None:
    compilers = Compilers()
    assert compilers._process is not None
    compilers._process.kill()
    compilers.ask(ORDER)
    assert list(compilers.compiled()) == []
    compilers.close()
    compilers.close()


@pytest.mark.parametrize("lack", ["triton", "process"])
def test_where_nothing_can_be_started_nothing_is_compiled(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lack == "triton":
        monkeypatch.setattr(compilers_module, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(sys, "executable", "/no/such/python")
    compilers = Compilers()
    compilers.ask(ORDER)
    assert list(compilers.compiled()) == []
    compilers.close()


def test_what_launches_a_kernel_is_built_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.runner.cuda.compile_child import build_plainly

    build: Any = import_module("triton.runtime.build")
    told: list[Any] = []
    monkeypatch.setattr(build, "_build", lambda *given, **named: told.append((given, named)))
    build_plainly()
    first: tuple[Any, ...] = ("name", "source", "folder", [], ["headers"], ["cuda"])
    # As 3.6 calls it, as 3.8 does, and as nobody does yet.
    build._build(*first, ["-g"])
    build._build(*first, [], language="c")
    build._build(*first)
    assert told == [((*first, ["-g", "-O0"]), {}), ((*first, ["-O0"]), {"language": "c"}), (first, {})]


def test_products_are_noted_once_of_each_kind() -> None:
    rows, weight = torch.randn(3, 8), torch.randn(5, 8)
    out = torch.zeros(3, 5)
    with products_noted() as noted:
        for _ in range(2):
            fastest_product(rows, weight, None, out)
        fastest_product(rows[:2], weight, None, out[:2])
        assert not out.any()
    assert products._noted is None
    assert len(noted) == 2
    assert not any(product.source for product in noted)
    noted[0].make()
    torch.testing.assert_close(out, rows @ weight.t())


def test_products_of_our_own_are_made_when_their_source_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    made, nowhere = threading.Event(), cast(Any, None)

    def compile_slowly(source: str) -> None:
        assert made.wait(10.0)
        events.append(source)

    def make_library() -> None:
        events.append("library")
        made.set()

    monkeypatch.setattr(ahead, "compile_clusters", compile_slowly)
    ours = Noted(lambda: events.append("ours"), "source")
    ahead._make((ours, ours, Noted(make_library, "")), nowhere)
    assert events == ["library", "source", "ours", "ours"]


def test_what_cannot_be_compiled_ends_the_making(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str) -> None:
        raise RunnerFailed(source)

    monkeypatch.setattr(ahead, "compile_clusters", refuse)
    made: list[str] = []
    with pytest.raises(RunnerFailed, match="source"):
        ahead._make((Noted(lambda: made.append("ours"), "source"),), cast(Any, None))
    assert not made


class _ListeningOps(ReferenceOps):
    """Calls `work` as a card's operations do."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def compiling(self, work: Any) -> AbstractContextManager[None]:
        @contextmanager
        def listening() -> Iterator[None]:
            self.events.append("work")
            work()
            self.events.append("inside")
            yield
            self.events.append("over")

        return listening()


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("llama3")[1]


def runner(checkpoint: TensorCheckpoint, ops: _ListeningOps, lane: HostLane) -> CudaRunner:
    def source(*where: Any) -> Weights:
        ops.events.append("weights")
        return from_checkpoint(checkpoint)(*where)

    shape = checkpoint.shape
    config = EngineConfig(
        slots=4,
        blocks=100,
        block_size=16,
        context_len=256,
        vocab_size=shape.vocab_size,
        eos_ids=(0,),
        max_step_tokens=64,
    )
    return CudaRunner(config, shape, source, ops, lane, dtype=torch.float32)


def test_weights_are_read_while_what_they_run_is_compiled(checkpoint: TensorCheckpoint) -> None:
    ops = _ListeningOps()
    found = runner(checkpoint, ops, HostLane())
    found.fit(share=0.5)
    found.warm_up()
    assert ops.events == ["work", "inside", "weights", "over"]
    # Listening took few blocks, and left nothing changed.
    assert found.config.blocks == 100


def test_a_card_without_room_beside_the_weights_compiles_afterwards(checkpoint: TensorCheckpoint) -> None:
    shape = checkpoint.shape
    ops, lane = _ListeningOps(), HostLane()
    blank = blank_weights(shape, torch.device("meta"), torch.float32).size_bytes
    lane._free_bytes = weights_bytes(shape, torch.float32) + 2 * blank
    found = runner(checkpoint, ops, lane)
    found.load()
    assert ops.events == ["weights"]


def test_blank_weights_are_one_layer_of_each_kind(checkpoint: TensorCheckpoint) -> None:
    shape = replace(checkpoint.shape, num_layers=6)
    host = torch.device("cpu")
    blank = blank_weights(shape, host, torch.bfloat16)
    whole = from_checkpoint(checkpoint)(checkpoint.shape, host, torch.bfloat16)
    assert len(blank.layers) == 2
    assert {layer.kind for layer in blank.layers} == {layer.kind for layer in whole.layers}
    assert blank.embeddings.shape == whole.embeddings.shape
    assert (blank.head is blank.embeddings) == shape.tied_embeddings
