"""Experts on the CUDA runner, over the plain reference of its kernels: transformers' logits, and the CPU runner's layer."""

import math

import pytest
import torch
from msgspec.structs import replace

from headrace.core.plan import RowStatus
from headrace.runner.cuda.decoder import Workspace
from headrace.runner.cuda.expert_space import HIGH_TILE, LOW_TILE, ExpertSpace, most_tiles
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.weights import from_checkpoint, weights_bytes
from headrace.runner.torch.experts import Experts
from headrace.runner.torch.feed_forward import PlainFeedForward
from headrace.runner.torch.linear import Fp32Linear, Norm, normalise
from headrace.weights.shape import ExpertShape
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.torch.model_rig import ids, model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["mixtral", "qwen3moe", "qwen3moe, normed"])
def test_logits_are_those_of_transformers(family: str) -> None:
    """Alone, then beside another sequence."""
    network, checkpoint = model(family)
    desk = CudaDesk(checkpoint)
    desk.begin(2, ids(21))
    tokens = desk.generate(2, 2, chunk=16)
    desk.begin(5, ids(30, seed=1))
    tokens.append(int(desk.advance({2: 1, 5: 17}).tokens[0]))
    with torch.inference_mode():
        truth = network(torch.tensor([[*ids(21), *tokens[:-1]]])).logits[0, 20:]
    assert (torch.stack(desk.logits[2]) - truth).abs().max() < 2e-3
    assert truth.argmax(-1).tolist() == tokens


def test_a_row_that_is_not_finite_fails_alone() -> None:
    _, checkpoint = model("mixtral")
    checkpoint.state["model.embed_tokens.weight"][157] = math.nan
    desk, calm = CudaDesk(checkpoint), CudaDesk(checkpoint)
    for each in (desk, calm):
        each.begin(0, ids(9))
    desk.begin(1, (5, 157, 9))
    assert desk.advance({0: 9, 1: 3}).statuses.tolist() == [RowStatus.OK, RowStatus.NOT_FINITE]
    calm.advance({0: 9})
    assert torch.allclose(desk.logits[0][0], calm.logits[0][0])


@pytest.mark.parametrize("normed", [True, False])
def test_the_layer_is_that_of_the_cpu_runner(normed: bool) -> None:
    torch.manual_seed(1)
    router, gate_up, down = torch.randn(6, 48), torch.randn(6, 64, 48), torch.randn(6, 48, 32)
    norm = Norm(torch.rand(48) + 0.5, 1e-5)
    each = [
        PlainFeedForward(Fp32Linear(-both, norm=norm, min_rows=2), Fp32Linear(back, min_rows=2))
        for both, back in zip(gate_up, down, strict=True)
    ]
    layer = Experts(Fp32Linear(router, norm=norm, min_rows=2), each, 3, normed=normed)
    residual, cells = torch.randn(19, 48), torch.arange(19)
    cells[7] = -1
    space = ExpertSpace.make(ExpertShape(6, 3, 32), 48, 19, CPU, torch.float32)
    out = torch.full((19, 48), math.nan)
    ReferenceOps().experts(normalise(residual, norm), cells, router, gate_up, down, 3, out, space, normed=normed)
    want = layer.run(residual)
    want[7] = 0.0
    assert (out - want).abs().max() < 1e-3 * want.abs().max()


@pytest.mark.parametrize("tile", [LOW_TILE, HIGH_TILE])
@pytest.mark.parametrize("counts", [[0, 0, 1], [1, 1, 1], [64, 0, 65], [200, 15, 16], [17, 33, 129]])
def test_tiles_suffice_however_pairs_fall(tile: int, counts: list[int]) -> None:
    assert sum(-(-count // tile) for count in counts) <= most_tiles(sum(counts), len(counts), tile)


def test_memory_counts_experts() -> None:
    _, checkpoint = model("mixtral")
    shape = checkpoint.shape
    assert shape.experts is not None
    weights = from_checkpoint(checkpoint)(shape, CPU, torch.float32)
    assert weights.size_bytes == weights_bytes(shape, torch.float32)
    space = Workspace(shape, 40, 4, CPU, torch.bfloat16)
    assert space.experts is not None and space.gate_up.numel() == 0
    more = Workspace(replace(shape, experts=replace(shape.experts, num_chosen=4)), 40, 4, CPU, torch.bfloat16)
    # Two more pairs for each of 40 tokens: what they have in the middle and at their end, names, weights, order.
    extra = 2 * 40 * (2 * (shape.experts.inner_size + shape.hidden_size) + 4 + 4)
    assert extra < more.size_bytes - space.size_bytes < extra + 4096


def test_what_is_rehearsed_has_a_layer_of_each_kind_and_the_last() -> None:
    _, checkpoint = model("qwen3moe")
    shape = checkpoint.shape
    weights = from_checkpoint(checkpoint)(shape, CPU, torch.float32)
    found = [id(layer) for layer in weights.kinds().layers]
    dense = [index for index in range(shape.num_layers) if shape.experts_of(index) is None]
    assert 0 < len(dense) < shape.num_layers and len(found) == 3
    assert {id(weights.layers[index]) for index in dense} & set(found)
    assert {id(layer) for index, layer in enumerate(weights.layers) if index not in dense} & set(found)
    assert found[-1] == id(weights.layers[-1])
