"""A row's logits are the same bits whatever runs beside it, however it was cut, wherever its memory came from.

Free memory is NaN throughout: `Desk` runs under poison. Attention and padding are those that the probe chooses for
this processor. fp32, the reference, may differ in last bits where no padding helps; then by how much is bounded.
"""

from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from headrace.runner.torch.attention import NARROW
from headrace.runner.torch.int4 import has_native_kernel
from headrace.runner.torch.packing import Recipe
from headrace.runner.torch.probe import Choice, choose
from tests.unit.runner.torch.model_rig import QUICK, Desk, TensorCheckpoint, ids, model, same_bits

RECIPES = {
    "int8": Recipe("int8", QUICK[0]),
    "int8 wide": Recipe("int8", "wide"),
    "int4": Recipe("int4", QUICK[0]),
    "fp32": Recipe("fp32"),
}
PROMPT = ids(530)
MOST_FP32_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint() -> TensorCheckpoint:
    """Id 151 is a thousand times larger than any other."""
    _, made = model("llama3")
    made.state["model.embed_tokens.weight"][151] *= 1000.0
    return made


@pytest.fixture(scope="module")
def reference(checkpoint: TensorCheckpoint) -> Choice:
    return choose(checkpoint.shape, "fp32")


@pytest.fixture(scope="module", params=list(RECIPES.values()), ids=list(RECIPES))
def desk(request: pytest.FixtureRequest, checkpoint: TensorCheckpoint, reference: Choice) -> Desk:
    recipe = replace(request.param, min_rows=reference.recipe.min_rows)
    return Desk(checkpoint, recipe, cuts=reference.cuts)


@pytest.fixture
def same(desk: Desk, reference: Choice, request: pytest.FixtureRequest) -> "Same":
    return Same(exact=request.node.callspec.params["desk"].dtype != "fp32" or reference.row_exact)


class Same:
    def __init__(self, *, exact: bool) -> None:
        self.exact = exact

    def __call__(self, some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
        if self.exact:
            return same_bits(some, others)
        difference = max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))
        return difference < MOST_FP32_DIFFERENCE


@pytest.fixture(scope="module")
def alone(desk: Desk) -> tuple[list[int], list[torch.Tensor]]:
    """The truth: the sequence by itself, its prompt in one chunk."""
    return _alone(desk)


def _alone(desk: Desk) -> tuple[list[int], list[torch.Tensor]]:
    desk.begin(0, PROMPT)
    tokens = desk.generate(0, 5)
    desk.end(0)
    return tokens, desk.logits[0]


@pytest.mark.parametrize("chunk", [16, 17, 33, 64, 100, 256, 511, 512])
def test_chunks(desk: Desk, same: "Same", alone: tuple[list[int], list[torch.Tensor]], chunk: int) -> None:
    desk.begin(0, PROMPT)
    assert desk.generate(0, 5, chunk) == alone[0]
    desk.end(0)
    assert same(desk.logits[0], alone[1])


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_small_chunks(desk: Desk, same: "Same", alone: tuple[list[int], list[torch.Tensor]], chunk: int) -> None:
    """The first 496 ids at once, the rest in crumbs."""
    desk.begin(0, PROMPT)
    desk.advance({0: 496})
    assert desk.generate(0, 5, chunk) == alone[0]
    desk.end(0)
    assert same(desk.logits[0], alone[1])


def test_every_chunk_size(desk: Desk, same: "Same", request: pytest.FixtureRequest) -> None:
    """Kernels treat the ends of short products in their own ways: every size has to be tried, at some place behind a
    cached prefix. Without a 4-bit kernel a plain loop takes its place, hundreds of times slower and never chosen: the
    sizes at its borders do."""
    is_loop = request.node.callspec.params["desk"].dtype == "int4" and not has_native_kernel()
    desk.begin(0, PROMPT)
    desk.prefill(0)
    for size in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 512) if is_loop else range(1, 513):
        cached = (len(PROMPT) - 1 - size) // 16
        desk.begin(1, PROMPT, shared=desk.blocks[0][:cached])
        desk.advance({1: size})
        if not desk.logits[1]:
            desk.prefill(1)
        desk.end(1, keep=cached)
        assert same(desk.logits[1], desk.logits[0]), size
    desk.end(0)


@pytest.mark.parametrize("neighbours", [1, 2, 3, 7, 8, 15, 16, 31])
def test_neighbours(desk: Desk, same: "Same", alone: tuple[list[int], list[torch.Tensor]], neighbours: int) -> None:
    desk.begin(0, PROMPT)
    for slot in range(1, neighbours + 1):
        desk.begin(slot, (151, *ids(5 + 23 * slot % 60, seed=slot)))
    everyone = dict.fromkeys(range(neighbours + 1), 1000)
    for _ in range(5):
        desk.advance(everyone)
    for slot in everyone:
        desk.end(slot)
    assert same(desk.logits[0], alone[1])


def test_neighbours_in_prefill(desk: Desk, same: "Same", alone: tuple[list[int], list[torch.Tensor]]) -> None:
    desk.begin(0, PROMPT)
    desk.begin(1, (151, *ids(700, seed=1)))
    desk.prefill(0)
    for _ in range(4):
        desk.advance({1: 97, 0: 1})
    desk.end(0)
    desk.end(1)
    assert same(desk.logits[0], alone[1])


def test_cached_prefix(desk: Desk, same: "Same", alone: tuple[list[int], list[torch.Tensor]]) -> None:
    desk.begin(1, PROMPT[:330])
    desk.prefill(1, 77)
    shared = desk.blocks[1][:20]
    desk.begin(0, PROMPT, shared=shared)
    assert desk.generate(0, 5, 100) == alone[0]
    desk.end(1, keep=20)
    desk.end(0)
    assert same(desk.logits[0], alone[1])


def test_preempted_and_replayed(desk: Desk, same: "Same", alone: tuple[list[int], list[torch.Tensor]]) -> None:
    desk.begin(0, PROMPT)
    tokens = desk.generate(0, 2)
    desk.end(0)
    desk.begin(2, (*PROMPT, *tokens), num_prompt=len(PROMPT))
    assert desk.generate(2, 3, 50) == alone[0][2:]
    desk.end(2)
    assert same(desk.logits[2], alone[1][2:])


def test_narrow_attention(checkpoint: TensorCheckpoint) -> None:
    desk = Desk(checkpoint, Recipe("int8", "wide"), cuts=NARROW)
    _, logits = _alone(desk)
    desk.begin(1, (151, *ids(40)))
    desk.begin(0, PROMPT)
    desk.advance({0: 333, 1: 100})
    desk.advance({0: 333, 1: 1})
    for _ in range(4):
        desk.advance({0: 1, 1: 1})
    assert same_bits(desk.logits[0], logits)


def test_integer_kernels_agree(checkpoint: TensorCheckpoint) -> None:
    """The clock may choose among them because that moves no bit."""
    wide, *quick = (_alone(Desk(checkpoint, Recipe("int8", name)))[1] for name in ("wide", *QUICK))
    assert all(same_bits(logits, wide) for logits in quick)
