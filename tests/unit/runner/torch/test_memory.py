"""Memory: what a process may take, and how many blocks that makes."""

import pytest

from headrace.core.errors import ModelTooLarge
from headrace.runner.torch.int4 import has_native_kernel
from headrace.runner.torch.memory import MemoryPlan, check_weights_fit, plan_memory
from headrace.runner.torch.packing import Recipe, packed_bytes
from tests.unit.runner.torch.model_rig import QUICK, Desk, model

MIB = 1 << 20


def plan(free_bytes: int, max_blocks: int = 10**6) -> MemoryPlan:
    return plan_memory(
        model("llama2")[1].shape,
        block_size=16,
        context_len=2048,
        max_blocks=max_blocks,
        free_bytes=free_bytes,
        weights_bytes=7 * MIB,
        workspace_bytes=10 * MIB,
        share=0.5,
    )


def test_blocks_are_what_is_left_of_the_share() -> None:
    made = plan(100 * MIB)
    # Two layers, keys and values, 64 numbers of 4 bytes.
    assert made.block_bytes == 2 * 2 * 64 * 4 * 16
    assert made.blocks == 40 * MIB // made.block_bytes
    assert made.sentences()[-1].endswith(f"= {made.blocks * 16:,} tokens in {made.blocks:,} blocks of 16")


def test_no_more_blocks_than_asked_for_and_that_is_said() -> None:
    made = plan(100 * MIB, max_blocks=33)
    assert made.blocks == 33 and made.sentences()[-1].endswith("in 33 blocks of 16, the most that the settings allow")


def test_too_little_for_one_sequence() -> None:
    with pytest.raises(ModelTooLarge, match="one sequence of 2048 tokens needs 2 MiB of KV memory, and 0 MiB are left"):
        plan(20 * MIB)


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ModelTooLarge, match="the weights take 20 MiB and 10 MiB of memory are free"):
        check_weights_fit(20 * MIB, 10 * MIB)


@pytest.mark.parametrize("dtype", ["fp32", "int8", *(["int4"] if has_native_kernel() else [])])
def test_packed_size_is_foretold(dtype: str) -> None:
    _, checkpoint = model("mistral")
    recipe = Recipe(dtype, QUICK[0])
    runner = Desk(checkpoint, recipe, slots=2, blocks=8).runner
    assert 0.5 < packed_bytes(checkpoint.shape, recipe) / runner.weights_bytes < 1.5


def test_fitted_runner_takes_the_blocks_it_was_allowed() -> None:
    _, checkpoint = model("llama2")
    runner = Desk(checkpoint, Recipe("int8"), slots=2, blocks=300).runner
    made = runner.fit()
    assert made.blocks == runner.config.blocks == 300
