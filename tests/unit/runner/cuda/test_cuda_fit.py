"""Memory of a card: how many blocks the CUDA runner takes, and models that do not fit."""

import pytest
import torch
from msgspec.structs import replace

from headrace.core.config import EngineConfig
from headrace.core.errors import ModelTooLarge, RunnerFailed
from headrace.runner.cuda.decoder import Workspace
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.memory import look_bytes
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.weights import Weights, from_checkpoint, weights_bytes
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.torch.model_rig import TensorCheckpoint, model


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("llama3")[1]


@pytest.fixture
def desk(checkpoint: TensorCheckpoint) -> CudaDesk:
    return CudaDesk(checkpoint)


def _fitted(config: EngineConfig, checkpoint: TensorCheckpoint, free_bytes: int) -> CudaRunner:
    return CudaRunner(
        config,
        checkpoint.shape,
        from_checkpoint(checkpoint),
        ReferenceOps(),
        HostLane(free_bytes),
        dtype=torch.float32,
    )


def test_a_model_of_one_layer_is_rehearsed_as_any_other(checkpoint: TensorCheckpoint, desk: CudaDesk) -> None:
    shape = replace(checkpoint.shape, num_layers=1)
    config = replace(desk.config, blocks=100, max_step_tokens=64)
    source, lane = from_checkpoint(checkpoint), HostLane(1 << 30)
    runner = CudaRunner(config, shape, source, ReferenceOps(), lane, dtype=torch.float32)
    assert runner.fit(share=0.5).blocks == 100
    assert runner.notes[-1].endswith("in 100 blocks of 16, the most that the settings allow")
    runner.warm_up()


def test_blocks_are_as_many_as_memory_holds(checkpoint: TensorCheckpoint, desk: CudaDesk) -> None:
    config = replace(desk.config, blocks=10**6, max_step_tokens=64)
    runner = _fitted(config, checkpoint, 1 << 30)
    found = runner.fit(share=0.5)
    assert found.blocks == runner.config.blocks < 10**6
    assert (
        found.kv_bytes + found.workspace_bytes
        <= 1 << 29
        < found.kv_bytes + found.workspace_bytes + 10 * found.block_bytes
    )
    # Set aside beside the blocks: whoever asks for penalties or log-probabilities later must find it there.
    assert found.workspace_bytes > look_bytes(config) > 4 * 2 * config.slots * config.vocab_size
    assert runner.notes[-1].endswith(f"in {found.blocks:,} blocks of 16")
    shape = checkpoint.shape
    needed = weights_bytes(shape, torch.float32)
    needed += Workspace(shape, 64, config.slots, torch.device("cpu"), torch.float32).size_bytes
    for free_bytes, words in ((1000, "of the card are free"), (needed - 1, "largest step"), (needed, "KV memory")):
        with pytest.raises(ModelTooLarge, match=words):
            _fitted(config, checkpoint, free_bytes).fit()


def test_memory_that_runs_out_while_loading_is_a_model_too_large(checkpoint: TensorCheckpoint, desk: CudaDesk) -> None:
    def source(*_: object) -> Weights:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1")

    runner = CudaRunner(desk.config, checkpoint.shape, source, ReferenceOps(), HostLane(), dtype=torch.float32)
    with pytest.raises(ModelTooLarge, match=r"first steps: CUDA out of memory$"):
        runner.fit()
    with pytest.raises(RunnerFailed, match="unusable"):
        runner.warm_up()
