"""The CUDA runner with its matrices in eight bits, over the plain reference: near to what it was, smaller, honest."""

import pytest
import torch
from msgspec.structs import replace

from headrace.core.errors import InvalidInput, InvalidModel
from headrace.runner.cuda.decoder import Workspace
from headrace.runner.cuda.fp8_space import EIGHTS
from headrace.runner.cuda.fp8_weights import in_eights, quantise_matrix
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.weights import from_checkpoint, weights_bytes
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.torch.model_rig import ids, model

CPU = torch.device("cpu")


def _logits(desk: CudaDesk, prompts: dict[int, tuple[int, ...]]) -> dict[int, torch.Tensor]:
    """Of every prompt's last token, all in one step, and of the tokens after it, in steps of so many rows."""
    for slot, prompt in prompts.items():
        desk.begin(slot, prompt)
    desk.advance({slot: len(prompt) for slot, prompt in prompts.items()})
    desk.advance(dict.fromkeys(prompts, 1))
    return {slot: torch.stack(desk.logits[slot]) for slot in prompts}


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_logits_are_near_to_those_of_whole_numbers(family: str) -> None:
    checkpoint = model(family)[1]
    prompts = {0: ids(9), 3: ids(20, seed=1)}
    whole, eights = (_logits(CudaDesk(checkpoint, fp8=fp8), prompts) for fp8 in (False, True))
    for slot in prompts:
        error = float((eights[slot][0] - whole[slot][0]).norm() / whole[slot][0].norm())
        # Three bits behind the point: some percent in every product of a small model, and not nothing.
        assert 1e-3 < error < 0.2


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    checkpoint = model("llama3")[1]
    prompt = ids(9)
    few = _logits(CudaDesk(checkpoint, fp8=True), {0: prompt, 1: ids(5, seed=7)})[0]
    checkpoint.state["model.embed_tokens.weight"][ids(1, seed=50)] *= 300.0
    loud = {0: prompt, 1: ids(1, seed=50) * 12, 2: ids(3, seed=50)}
    assert not set(loud[1]) & set(prompt)
    many = _logits(CudaDesk(checkpoint, fp8=True), loud)[0]
    # The loud id's own logit is another: the head is tied to its embedding.
    quiet = [token for token in range(checkpoint.shape.vocab_size) if token not in loud[1]]
    assert torch.allclose(few[0][quiet], many[0][quiet], rtol=1e-3, atol=1e-4)


def test_a_single_row_meets_what_is_in_company() -> None:
    """It is not quantised itself, and reads what those in company wrote."""
    checkpoint = model("llama3")[1]
    desk = CudaDesk(checkpoint, fp8=True)
    desk.begin(0, ids(9))
    desk.begin(1, ids(9))
    desk.advance({0: 9, 1: 9})
    desk.advance({0: 1})
    desk.advance({1: 1, 0: 1})
    alone, beside = desk.logits[0][1], desk.logits[1][1]
    assert 0 < float((alone - beside).norm() / beside.norm()) < 0.1


def test_matrices_take_half_the_memory_and_everything_is_counted() -> None:
    checkpoint = model("qwen2")[1]
    shape = checkpoint.shape
    weights = in_eights(from_checkpoint(checkpoint))(shape, CPU, torch.bfloat16)
    layer = weights.layers[0]
    matrices = [getattr(each, name) for each in weights.layers for name in ("qkv", "out", "gate_up", "down")]
    assert {matrix.dtype for matrix in matrices} == {EIGHTS}
    assert {layer.input_norm.dtype, weights.head.dtype, weights.embeddings.dtype} == {torch.bfloat16}
    saved = sum(matrix.numel() for matrix in matrices) - 4 * len(matrices)
    assert weights.size_bytes == weights_bytes(shape, torch.bfloat16) - saved
    small, large = (Workspace(shape, 30, 4, CPU, torch.bfloat16, fp8=fp8) for fp8 in (False, True))
    assert len(large.residual) == 30 and len(large.qkv) == len(large.update) == len(large.gate_up) == 32
    assert large.size_bytes > small.size_bytes + 32 * (shape.hidden_size + shape.intermediate_size)


def test_a_matrix_comes_back_from_eight_bits() -> None:
    matrix = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) * 0.02
    matrix[3] = 0
    eights, scale = quantise_matrix(matrix)
    back = eights.float() * scale
    assert ((back - matrix).abs() <= matrix.abs() * 2**-4 + scale * 2**-10).all()
    assert float(eights.float().abs().max()) == 448.0
    nothing, scale = quantise_matrix(torch.zeros(2, 16))
    assert not (nothing.float() * scale).any() and bool(scale.isfinite())


def test_eight_bits_are_part_of_the_fingerprint() -> None:
    checkpoint = model("llama3")[1]
    whole, eights = (CudaDesk(checkpoint, fp8=fp8).runner.fingerprint for fp8 in (False, True))
    assert eights.startswith("cpu-fp8-") and whole.startswith("cpu-fp32-")


def test_what_cannot_run_in_eight_bits_is_refused_before_anything_is_read() -> None:
    checkpoint = model("llama3")[1]
    config = CudaDesk(checkpoint).config

    class Exact(ReferenceOps):
        row_exact = True

    def run(shape: object, ops: ReferenceOps) -> None:
        CudaRunner(config, shape, from_checkpoint(checkpoint), ops, HostLane(), fp8=True)  # type: ignore[arg-type]

    with pytest.raises(InvalidInput, match="fp8 is not row-exact"):
        run(checkpoint.shape, Exact())
    with pytest.raises(InvalidModel, match="products of its experts are in bf16 alone"):
        run(model("mixtral")[1].shape, ReferenceOps())
    with pytest.raises(InvalidModel, match="multiples of 16, and one is 100"):
        run(replace(checkpoint.shape, intermediate_size=100), ReferenceOps())
