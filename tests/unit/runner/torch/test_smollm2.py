"""The default model: the same logits as transformers on the same weights, and the same bits however it runs."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.runner.torch.int4 import has_native_kernel
from headrace.runner.torch.packing import Recipe
from headrace.weights.checkpoint import open_checkpoint
from tests.unit.runner.torch.model_rig import QUICK, Desk, TensorCheckpoint, same_bits

PROMPT = tuple(range(900, 980))
INT4 = pytest.param(
    "int4",
    marks=pytest.mark.skipif(not has_native_kernel(), reason="this processor has no 4-bit kernel: int8 is served"),
)


@pytest.fixture(scope="module")
def checkpoint(smollm2_path: Path) -> TensorCheckpoint:
    opened = open_checkpoint(smollm2_path)
    tensors = {name: torch.from_numpy(array) for name, array in opened.tensors()}
    return TensorCheckpoint(opened.shape, tensors)


@pytest.fixture(scope="module")
def desks(checkpoint: TensorCheckpoint) -> Callable[[str], Desk]:
    """A desk per dtype, packed when it is first wanted: who is done leaves it empty."""
    return functools.cache(lambda dtype: Desk(checkpoint, Recipe(dtype, QUICK[0]), slots=8, blocks=64))


def test_fp32_logits_are_those_of_transformers(checkpoint: TensorCheckpoint) -> None:
    import transformers  # here: it takes as long to import as everything else together

    shape = checkpoint.shape
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.context_len,
        rms_norm_eps=shape.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
    )
    network = transformers.LlamaForCausalLM(config).eval()
    state = {**checkpoint.state, "lm_head.weight": checkpoint.state["model.embed_tokens.weight"]}
    network.load_state_dict(state)
    desk = Desk(checkpoint, Recipe("fp32"), slots=2, blocks=32)
    desk.begin(0, PROMPT)
    tokens = desk.generate(0, 2, chunk=50)
    with torch.inference_mode():
        truth = network(torch.tensor([[*PROMPT, tokens[0]]])).logits[0, len(PROMPT) - 1 :]
    assert (torch.stack(desk.logits[0]) - truth).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", ["fp32", "int8", INT4])
def test_a_short_prompt_gives_the_bits_it_gives_inside_a_longer_chunk(desks: Callable[[str], Desk], dtype: str) -> None:
    """Three queries share a key head here: eleven tokens are one query more than a kernel's block of 32."""
    desk = desks(dtype)
    for length in (10, 11, 21, 43):
        desk.begin(0, PROMPT[:length])
        desk.generate(0, 1)
        desk.begin(1, PROMPT[:length])
        for position in range(length):
            desk.advance({1: 1})
            assert position + 1 == length or not desk.logits[1]
        assert same_bits(desk.logits[1], desk.logits[0]), length
        desk.end(0)
        desk.end(1)


@pytest.mark.parametrize("dtype", ["int8", INT4])
def test_quantised_rows_are_exact(desks: Callable[[str], Desk], dtype: str) -> None:
    desk = desks(dtype)
    desk.begin(0, PROMPT)
    desk.generate(0, 3)
    for slot in range(1, 8):
        desk.begin(slot, PROMPT[-3 * slot :])
    desk.begin(1, PROMPT)
    desk.advance({1: 33, 2: 100, 3: 100})
    desk.advance({1: 100, 2: 1, 4: 5, 5: 5})
    desk.advance({1: 1, 2: 1, 3: 1, 6: 9})
    desk.advance({1: 1, 7: 5})
    assert same_bits(desk.logits[1], desk.logits[0])
    for slot in range(8):
        desk.end(slot)
