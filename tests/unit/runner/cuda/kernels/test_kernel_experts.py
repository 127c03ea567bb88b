"""Kernels of experts, in the interpreter: what the plain functions say, for any number of rows and however they choose."""

import pytest
import torch
from torch import Tensor

from headrace.runner.cuda.expert_space import LOW_TILE, ExpertSpace, most_tiles
from headrace.runner.cuda.kernels import plain_experts
from headrace.runner.cuda.kernels.experts import ExpertConfig, exact_experts, expert_config, experts
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.triton_ops import TritonOps
from headrace.runner.cuda.weights import from_checkpoint
from headrace.weights.shape import ExpertShape
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.cuda.kernels.paged import HALF, relative_error
from tests.unit.runner.torch.model_rig import ids, model

pytestmark = pytest.mark.unit

TOLERANCE = 3e-3
CPU = torch.device("cpu")
SMALL = ExpertConfig(lines=32, span=32)
HIGH = ExpertConfig(rows=64, lines=32, span=32)


class Layer:
    """Random experts; every word of their memory is wrong before a step."""

    def __init__(self, num_experts: int, num_chosen: int, width: int, inner: int, max_tokens: int = 80) -> None:
        self.generator = torch.Generator().manual_seed(num_experts)
        self.router = self.random(num_experts, width)
        self.gate_up = self.random(num_experts, 2 * inner, width) / width**0.5
        self.down = self.random(num_experts, width, inner) / inner**0.5
        self.num_chosen = num_chosen
        shape = ExpertShape(num_experts, num_chosen, inner)
        self.space = ExpertSpace.make(shape, width, max_tokens, CPU, HALF)

    def random(self, *dims: int) -> Tensor:
        return torch.randn(dims, generator=self.generator).to(HALF)

    def run(self, rows: Tensor, cells: Tensor, config: ExpertConfig, *, normed: bool = True) -> Tensor:
        space = self.space
        for words in (space.chosen, space.counts, space.owners, space.order):
            words.fill_(1 << 30)
        for numbers in (space.weights, space.inner, space.given):
            numbers.fill_(torch.nan)
        out = torch.full_like(rows, torch.nan)
        experts(
            rows,
            cells,
            self.router,
            self.gate_up,
            self.down,
            self.num_chosen,
            out,
            space,
            normed=normed,
            config=config,
        )
        return out

    def truth(self, rows: Tensor, cells: Tensor, *, normed: bool = True) -> Tensor:
        return plain_experts.experts(rows, cells, self.router, self.gate_up, self.down, self.num_chosen, normed=normed)


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "width", "inner", "count", "config"),
    [
        (4, 2, 64, 32, 1, SMALL),
        (4, 2, 64, 32, 37, SMALL),
        (7, 3, 72, 40, 19, SMALL),
        (33, 5, 40, 33, 6, SMALL),
        (2, 1, 48, 96, 80, HIGH),
        (5, 5, 32, 16, 21, HIGH),
    ],
)
@pytest.mark.parametrize("normed", [True, False])
def test_rows_find_their_experts(
    num_experts: int, num_chosen: int, width: int, inner: int, count: int, config: ExpertConfig, normed: bool
) -> None:
    layer = Layer(num_experts, num_chosen, width, inner)
    rows, cells = layer.random(count, width), torch.arange(count)
    got = layer.run(rows, cells, config, normed=normed)
    assert relative_error(got, layer.truth(rows, cells, normed=normed)) < TOLERANCE
    chosen, weights = plain_experts.route(rows, layer.router, num_chosen, normed=normed)
    assert torch.equal(layer.space.chosen[:count].long(), chosen)
    assert (layer.space.weights[:count] - weights).abs().max() < 1e-4


def test_all_rows_choose_one_expert_and_nobody_some_other() -> None:
    layer = Layer(6, 2, 48, 32)
    layer.router[:] = 0.0
    rows, cells = layer.random(40, 48).abs(), torch.arange(40)
    layer.router[4], layer.router[1] = 0.5, 0.25
    got = layer.run(rows, cells, SMALL)
    assert layer.space.counts.tolist() == [0, 40, 0, 0, 40, 0]
    assert relative_error(got, layer.truth(rows, cells)) < TOLERANCE
    # Of equals, the lower is chosen.
    layer.router[:] = 0.25
    layer.run(rows, cells, SMALL)
    assert layer.space.counts.tolist() == [40, 40, 0, 0, 0, 0]


def test_pairs_are_sorted_by_expert_and_tiles_say_whose_they_are() -> None:
    layer = Layer(5, 2, 32, 16)
    layer.run(layer.random(43, 32), torch.arange(43), SMALL)
    chosen = layer.space.chosen[:43].reshape(-1)
    tiles = most_tiles(86, 5, LOW_TILE)
    owners, order = layer.space.owners[:tiles].tolist(), layer.space.order[: tiles * LOW_TILE].view(-1, LOW_TILE)
    used = sum(owner >= 0 for owner in owners)
    assert owners[:used] == sorted(owners[:used]) and set(owners[used:]) <= {-1}
    found = []
    for owner, pairs in zip(owners[:used], order[:used].tolist(), strict=True):
        live = [pair for pair in pairs if pair >= 0]
        assert live == pairs[: len(live)] and all(int(chosen[pair]) == owner for pair in live)
        found += live
    assert sorted(found) == list(range(86))


def test_padding_asks_nobody_and_becomes_zeros() -> None:
    layer = Layer(4, 2, 32, 16)
    rows, cells = layer.random(20, 32), torch.arange(20)
    cells[[0, 7, 19]] = -1
    rows[7] = torch.nan
    got = layer.run(rows, cells, SMALL)
    assert got[[0, 7, 19]].eq(0).all() and int(layer.space.counts.sum()) == 2 * 17
    assert relative_error(got, layer.truth(rows, cells)) < TOLERANCE
    assert layer.run(rows, torch.full((20,), -1), SMALL).eq(0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(value: float) -> None:
    layer = Layer(4, 2, 32, 16)
    rows, cells = layer.random(20, 32), torch.arange(20)
    calm = layer.run(rows, cells, SMALL)
    rows[3, 5] = value
    got = layer.run(rows, cells, SMALL)
    assert got[3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(got[others], calm[others])


def test_a_row_is_what_it_is_among_any_number() -> None:
    layer = Layer(5, 2, 32, 16)
    rows, cells = layer.random(24, 32), torch.arange(24)

    def run(some: Tensor) -> Tensor:
        out = torch.full((len(some), 32), torch.nan, dtype=HALF)
        exact_experts(
            some,
            cells[: len(some)],
            layer.router,
            layer.gate_up,
            layer.down,
            2,
            out,
            layer.space,
            normed=True,
            config=SMALL,
        )
        return out

    whole = run(rows)
    for first, last in ((23, 24), (3, 20)):
        assert torch.equal(run(rows[first:last]), whole[first:last])


def test_a_sequence_runs_through_the_kernels() -> None:
    """A chunk and a token, beside padding, as transformers has them."""
    network, checkpoint = model("mixtral")
    desk, lane = CudaDesk(checkpoint, slots=2, blocks=8, context_len=32, max_step_tokens=8), HostLane()
    ops = TritonOps(checkpoint.shape, desk.config.slots, lane.device)
    source = from_checkpoint(checkpoint)
    runner = CudaRunner(
        desk.config, checkpoint.shape, source, ops, lane, dtype=torch.float32, poison=True, keep_logits=True
    )
    runner.load()
    desk.runner = runner  # type: ignore[assignment]
    desk.begin(1, ids(5))
    tokens = desk.generate(1, 2)
    with torch.inference_mode():
        truth = network(torch.tensor([[*ids(5), tokens[0]]])).logits[0, 4:]
    assert (torch.stack(desk.logits[1]) - truth).abs().max() < 2e-3


def test_tiles_are_low_while_experts_have_few_rows() -> None:
    assert expert_config(8, 128).rows == 16
    assert expert_config(8 * 256, 128).rows == 16
    assert expert_config(8 * 2048, 128).rows == 64
