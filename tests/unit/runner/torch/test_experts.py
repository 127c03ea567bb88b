"""Experts: what transformers computes on the same weights, and a row's bits, which no neighbour moves."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from headrace.core.plan import RowStatus
from headrace.runner.torch.experts import Experts
from headrace.runner.torch.feed_forward import PlainFeedForward
from headrace.runner.torch.int4 import GROUP, quantise_groups
from headrace.runner.torch.linear import Fp32Linear, Norm
from headrace.runner.torch.memory import workspace_bytes
from headrace.runner.torch.packing import Recipe, packed_bytes
from headrace.runner.torch.probe import Choice, choose
from headrace.weights.checkpoint import open_checkpoint
from tests.unit.runner.torch.model_rig import QUICK, Desk, TensorCheckpoint, ids, model, same_bits
from tests.unit.weights.files import write_tokenizer

FAMILIES = ["mixtral", "qwen3moe", "qwen3moe, normed"]
RECIPES = {
    "int8": Recipe("int8", QUICK[0]),
    "int8 wide": Recipe("int8", "wide"),
    "int4": Recipe("int4", QUICK[0]),
    "fp32": Recipe("fp32"),
}
PROMPT = ids(90)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_are_those_of_transformers(family: str) -> None:
    network, checkpoint = model(family)
    desk = Desk(checkpoint, RECIPES["fp32"])
    desk.begin(0, ids(70))
    tokens = desk.generate(0, 4, chunk=33)
    with torch.inference_mode():
        truth = network(torch.tensor([[*ids(70), *tokens[:3]]])).logits[0, 69:]
    assert (torch.stack(desk.logits[0]) - truth).abs().max() < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_as_transformers_saves_it(family: str, tmp_path: Path) -> None:
    network, checkpoint = model(family)
    network.save_pretrained(tmp_path)  # type: ignore[operator]
    write_tokenizer(tmp_path)
    opened = open_checkpoint(tmp_path)
    assert opened.shape.experts == checkpoint.shape.experts
    read = {name: torch.from_numpy(array) for name, array in opened.tensors()}
    opened.close()
    assert read.keys() == checkpoint.state.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in checkpoint.state.items())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_logits_are_near_those_of_transformers(family: str, dtype: str) -> None:
    """Of weights that are 4-bit groups already, as with one feed-forward."""
    network, checkpoint = model(family)
    with torch.no_grad():
        for name, weight in checkpoint.state.items():
            if name.endswith("_proj.weight"):
                digits, scales, offsets = quantise_groups(weight.clone())
                groups = (digits.view(*scales.shape, GROUP) - 8.0) * scales.float()[..., None] + offsets[..., None]
                weight.copy_(groups.view_as(weight))
    with torch.inference_mode():
        truth = network(torch.tensor([ids(70)])).logits[0, -1]
    desk = Desk(checkpoint, RECIPES[dtype])
    desk.begin(0, ids(70))
    desk.prefill(0)
    assert (desk.logits[0][0] - truth).norm() < 0.05 * truth.norm()


@pytest.fixture(scope="module")
def checkpoint() -> TensorCheckpoint:
    """Id 151 is a thousand times larger than any other."""
    _, made = model("qwen3moe")
    made.state["model.embed_tokens.weight"][151] *= 1000.0
    return made


@pytest.fixture(scope="module")
def reference(checkpoint: TensorCheckpoint) -> Choice:
    return choose(checkpoint.shape, "fp32")


@pytest.fixture(scope="module", params=list(RECIPES))
def desk(request: pytest.FixtureRequest, checkpoint: TensorCheckpoint, reference: Choice) -> Desk:
    if request.param == "fp32" and not reference.row_exact:
        pytest.skip("no padding makes fp32 row-exact on this processor")
    recipe = replace(RECIPES[request.param], min_rows=reference.recipe.min_rows)
    return Desk(checkpoint, recipe, cuts=reference.cuts)


Truth = tuple[list[int], list[Tensor]]


@pytest.fixture(scope="module")
def alone(desk: Desk) -> Truth:
    desk.begin(0, PROMPT)
    tokens = desk.generate(0, 5)
    desk.end(0)
    return tokens, desk.logits[0]


@pytest.mark.parametrize("chunk", [16, 17, 33])
def test_chunks(desk: Desk, alone: Truth, chunk: int) -> None:
    desk.begin(0, PROMPT)
    assert desk.generate(0, 5, chunk) == alone[0]
    desk.end(0)
    assert same_bits(desk.logits[0], alone[1])


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7])
def test_small_chunks(desk: Desk, alone: Truth, chunk: int) -> None:
    """The first 80 ids at once, the rest in crumbs."""
    desk.begin(0, PROMPT)
    desk.advance({0: 80})
    assert desk.generate(0, 5, chunk) == alone[0]
    desk.end(0)
    assert same_bits(desk.logits[0], alone[1])


@pytest.mark.parametrize("neighbours", [1, 2, 8, 31])
def test_neighbours(desk: Desk, alone: Truth, neighbours: int) -> None:
    desk.begin(0, PROMPT)
    for slot in range(1, neighbours + 1):
        desk.begin(slot, (151, *ids(5 + 23 * slot % 60, seed=slot)))
    everyone = dict.fromkeys(range(neighbours + 1), 1000)
    for _ in range(5):
        desk.advance(everyone)
    for slot in everyone:
        desk.end(slot)
    assert same_bits(desk.logits[0], alone[1])


def test_cached_prefix(desk: Desk, alone: Truth) -> None:
    desk.begin(1, PROMPT[:70])
    desk.prefill(1, 37)
    desk.begin(0, PROMPT, shared=desk.blocks[1][:4])
    assert desk.generate(0, 5, 20) == alone[0]
    desk.end(1, keep=4)
    desk.end(0)
    assert same_bits(desk.logits[0], alone[1])


def test_preempted_and_replayed(desk: Desk, alone: Truth) -> None:
    desk.begin(0, PROMPT)
    tokens = desk.generate(0, 2)
    desk.end(0)
    desk.begin(2, (*PROMPT, *tokens), num_prompt=len(PROMPT))
    assert desk.generate(2, 3, 50) == alone[0][2:]
    desk.end(2)
    assert same_bits(desk.logits[2], alone[1][2:])


@pytest.mark.parametrize("recipe", list(RECIPES.values()), ids=list(RECIPES))
def test_a_row_that_is_not_finite_fails_alone(recipe: Recipe, reference: Choice) -> None:
    """In prefill and among decode rows, whose experts it shares."""
    _, untied = model("mixtral")
    untied.state["model.embed_tokens.weight"][157] = math.nan
    recipe = replace(recipe, min_rows=reference.recipe.min_rows)
    desk, calm = (Desk(untied, recipe, slots=4, blocks=64, cuts=reference.cuts) for _ in range(2))
    for each in (desk, calm):
        each.begin(0, ids(20))
        each.prefill(0)
    desk.begin(1, (5, 157, *ids(40)))
    assert desk.advance({0: 1, 1: 100}).statuses.tolist() == [RowStatus.OK, RowStatus.NOT_FINITE]
    calm.advance({0: 1})
    desk.begin(2, (157,))
    assert desk.advance({2: 1, 0: 1}).statuses.tolist() == [RowStatus.NOT_FINITE, RowStatus.OK]
    calm.advance({0: 1})
    assert same_bits(desk.logits[0], calm.logits[0])


def layer(scores: Sequence[float], num_chosen: int, *, normed: bool) -> Experts:
    """A width of 2. The router scores a row (1, 1) as given; expert e multiplies by e + 1 after silu(1) = 0.731."""
    norm = Norm(torch.ones(2), 0.0)

    def expert(factor: float) -> PlainFeedForward:
        gate_up = Fp32Linear(-torch.eye(2).repeat(2, 1), norm=norm, min_rows=2)
        return PlainFeedForward(gate_up, Fp32Linear(torch.eye(2) * factor, min_rows=2))

    router = torch.tensor([[score, 0.0] for score in scores])
    each = [expert(float(index + 1)) for index in range(len(scores))]
    return Experts(Fp32Linear(router, norm=norm, min_rows=2), each, num_chosen, normed=normed)


SILU_OF_1 = 1 / (1 + math.exp(-1))


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    chosen, weights = layer([0.0, 3.0, 1.0, 3.0, 3.0, 1.0], 4, normed=True).route(torch.ones(3, 2))
    assert chosen.tolist() == [[1, 3, 4, 2]] * 3
    assert weights.sum(1).tolist() == pytest.approx([1.0] * 3)


def test_weights_are_shares_among_all_or_among_the_chosen() -> None:
    scores = [math.log(weight) for weight in (1.0, 5.0, 2.0, 2.0)]
    for normed, total in ((False, 10.0), (True, 7.0)):
        given = layer(scores, 2, normed=normed).run(torch.ones(2, 2))
        # Expert 1 gives twice what goes in, expert 2 three times.
        want = (5.0 * 2 + 2.0 * 3) / total * SILU_OF_1
        assert given.flatten().tolist() == pytest.approx([want] * 4)


def test_rows_find_their_own_experts() -> None:
    """A row of (1, 1) and its opposite prefer opposite experts; one expert is asked by nobody."""
    given = layer([2.0, 0.0, -2.0], 1, normed=True).run(torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]]))
    other = 3 / (1 + math.exp(1))
    assert given[:, 0].tolist() == pytest.approx([SILU_OF_1, other, SILU_OF_1])


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_packed_size_is_foretold(dtype: str) -> None:
    for family in ("mixtral", "qwen3moe"):
        _, made = model(family)
        recipe = RECIPES[dtype]
        runner = Desk(made, recipe, slots=2, blocks=8).runner
        assert 0.5 < packed_bytes(made.shape, recipe) / runner.weights_bytes < 1.5


def test_experts_count_in_memory() -> None:
    """Weights by their number; a step's memory by the widest of them, since they compute one after another."""
    shape = model("mixtral")[1].shape
    assert shape.experts is not None
    more = replace(shape, experts=replace(shape.experts, num_experts=40))
    each = 3 * shape.hidden_size * shape.experts.inner_size + shape.hidden_size
    grown = packed_bytes(more, RECIPES["fp32"]) - packed_bytes(shape, RECIPES["fp32"])
    assert grown == 4 * each * 36 * shape.num_layers
    wide = replace(shape, experts=replace(shape.experts, inner_size=960))
    extra = workspace_bytes(wide, 512, 8) - workspace_bytes(shape, 512, 8)
    assert extra == 512 * 40 * (960 - shape.experts.inner_size)


def test_every_expert_is_asked_when_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries take memory for a matrix with its first product: blocks are counted after that."""
    asked: dict[int, list[int]] = {}
    run = PlainFeedForward.run

    def watch(self: PlainFeedForward, residual: Tensor) -> Tensor:
        asked.setdefault(id(self), []).append(len(residual))
        return run(self, residual)

    monkeypatch.setattr(PlainFeedForward, "run", watch)
    _, made = model("mixtral")
    desk = Desk(made, RECIPES["int8"], slots=2, blocks=8)
    assert len(asked) == 2 * 4 and all(counts == [1, 8] for counts in asked.values())
    desk.runner.close()
