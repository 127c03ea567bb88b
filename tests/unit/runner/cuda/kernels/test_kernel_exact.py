"""The row-exact runner: its product is right, and a row's bits do not know what else was computed, or how."""

import pytest
import torch
from torch import Tensor

from headrace.runner.cuda.exact_ops import ExactOps
from headrace.runner.cuda.kernels.exact_product import ExactConfig, exact_product
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.weights import from_checkpoint
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.cuda.kernels.paged import HALF, relative_error
from tests.unit.runner.torch.model_rig import TensorCheckpoint, ids, model

pytestmark = pytest.mark.unit

SMALL = ExactConfig(rows=16, lines=32, span=32, together=2)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


@pytest.mark.parametrize(("count", "height", "width"), [(1, 96, 64), (50, 40, 72), (17, 33, 100)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_of_odd_sizes(count: int, height: int, width: int, biased: bool) -> None:
    x, weight, bias = rows(count, width), rows(height, width, seed=1), rows(height, seed=2)
    out = torch.full((count, height), torch.nan, dtype=HALF)
    exact_product(x, weight, bias if biased else None, out, SMALL)
    want = x.double() @ weight.double().t() + (bias.double() if biased else 0.0)
    assert relative_error(out, want) < 1e-2


def test_a_row_is_what_it_is_among_any_number() -> None:
    x, weight = rows(40, 72), rows(48, 72, seed=1)
    whole = torch.empty(40, 48, dtype=HALF)
    exact_product(x, weight, None, whole, SMALL)
    for count in (1, 5, 16, 33):
        part = torch.empty(count, 48, dtype=HALF)
        exact_product(x[:count], weight, None, part, SMALL)
        assert torch.equal(part, whole[:count])


def _desk(checkpoint: TensorCheckpoint) -> CudaDesk:
    desk = CudaDesk(checkpoint, slots=4, blocks=40, context_len=200, max_step_tokens=64)
    lane = HostLane()
    runner = CudaRunner(
        desk.config,
        checkpoint.shape,
        from_checkpoint(checkpoint),
        ExactOps(checkpoint.shape, desk.config.slots, lane.device),
        lane,
        dtype=torch.float32,
        poison=True,
        keep_logits=True,
    )
    runner.load()
    desk.runner = runner  # type: ignore[assignment]
    return desk


def test_a_sequence_has_the_same_bits_alone_and_in_company() -> None:
    """Cut otherwise, beside chunks and decode rows, and recomputed from its tokens."""
    network, checkpoint = model("qwen3")
    alone = _desk(checkpoint)
    alone.begin(1, ids(19))
    tokens = alone.generate(1, 2)
    with torch.inference_mode():
        truth = network(torch.tensor([[*ids(19), *tokens[:-1]]])).logits[0, 18:]
    assert (torch.stack(alone.logits[1]) - truth).abs().max() < 2e-3

    busy = _desk(checkpoint)
    busy.begin(3, ids(5, seed=1))
    busy.begin(0, ids(19))
    for chunks in ({3: 5, 0: 7}, {0: 12, 3: 1}, {3: 1, 0: 1}):
        assert not busy.advance(chunks).statuses.any()
    busy.begin(2, [*ids(19), *tokens[:1]])
    busy.advance({2: 20})
    assert all(torch.equal(a, b) for a, b in zip(alone.logits[1], busy.logits[0], strict=True))
    assert torch.equal(busy.logits[2][0], alone.logits[1][1])
