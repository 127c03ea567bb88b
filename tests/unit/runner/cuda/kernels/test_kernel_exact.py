"""The row-exact runner: its product is right, and a row's bits do not know what else was computed, or how."""

import pytest
import torch
from torch import Tensor

from headrace.runner.cuda.exact_ops import ExactOps
from headrace.runner.cuda.kernels.exact_product import ExactConfig, exact_product
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.cuda.kernels.paged import HALF, relative_error
from tests.unit.runner.torch.model_rig import TensorCheckpoint, ids, model

pytestmark = pytest.mark.unit

SMALL = ExactConfig(rows=16, lines=32, span=32, together=2)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


@pytest.mark.parametrize(
    ("count", "height", "width", "biased"), [(1, 96, 64, True), (50, 40, 72, False), (17, 33, 100, True)]
)
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
    """A step as large as the largest of the story: every token of it, padding too, is dozens of programs."""
    return CudaDesk(checkpoint, slots=3, blocks=10, context_len=64, max_step_tokens=20, ops=ExactOps)


def test_a_sequence_has_the_same_bits_alone_and_in_company() -> None:
    """Cut otherwise, beside chunks and decode rows, and recomputed from its tokens."""
    network, checkpoint = model("qwen3")
    alone = _desk(checkpoint)
    alone.begin(1, ids(17))
    tokens = alone.generate(1, 2)
    with torch.inference_mode():
        truth = network(torch.tensor([[*ids(17), *tokens[:-1]]])).logits[0, 16:]
    assert (torch.stack(alone.logits[1]) - truth).abs().max() < 2e-3

    busy = _desk(checkpoint)
    busy.begin(2, ids(5, seed=1))
    busy.begin(0, ids(17))
    busy.begin(1, [*ids(17), *tokens[:1]])
    for chunks in ({2: 5, 0: 7}, {0: 10, 2: 1}, {2: 1, 0: 1, 1: 18}):
        assert not busy.advance(chunks).statuses.any()
    assert all(torch.equal(a, b) for a, b in zip(alone.logits[1], busy.logits[0], strict=True))
    assert torch.equal(busy.logits[1][0], alone.logits[1][1])
