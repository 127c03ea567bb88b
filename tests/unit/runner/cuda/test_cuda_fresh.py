"""Prompts that begin in long steps: their attention reads the step's own rows, and nobody sees a difference."""

import math

import pytest
import torch
from torch import Tensor

from headrace.core.plan import RowStatus
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.weights.shape import ModelShape
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.torch.model_rig import TensorCheckpoint, ids, model

pytestmark = pytest.mark.unit


class Counting(ReferenceOps):
    """Knows which chunks of each step had fresh attention."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def fresh_attention(
        self, out: Tensor, queries: Tensor, qkv: Tensor, offsets: Tensor, tiles: Tensor, scale: float
    ) -> None:
        self.seen.append(tuple(sorted({chunk for chunk, *_ in tiles.tolist() if chunk >= 0})))
        super().fresh_attention(out, queries, qkv, offsets, tiles, scale)


class Paged(ReferenceOps):
    fresh_rows = 0

    def __init__(self, *_: object) -> None:
        super().__init__()


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("qwen3")[1]


def _desk(checkpoint: TensorCheckpoint, *, fp8: bool = False) -> tuple[CudaDesk, list[tuple[int, ...]]]:
    made: list[Counting] = []

    def ops(shape: ModelShape, slots: int, device: torch.device) -> Counting:
        made.append(Counting())
        return made[-1]

    return CudaDesk(checkpoint, ops=ops, fp8=fp8), made[0].seen


def test_it_is_for_chunks_of_long_steps_that_begin(checkpoint: TensorCheckpoint) -> None:
    desk, seen = _desk(checkpoint)
    for slot, count in ((0, 60), (1, 90), (2, 150), (3, 120), (4, 250)):
        desk.begin(slot, ids(count, seed=slot))
    desk.advance({0: 60})
    assert not seen
    desk.advance({1: 90, 2: 100})
    assert set(seen) == {(0, 1)}
    seen.clear()
    # One goes on; so does one beside a decode row; all do; alone again.
    desk.advance({2: 50, 3: 100})
    assert set(seen) == {(1,)}
    seen.clear()
    desk.advance({3: 20, 0: 1, 4: 120})
    assert set(seen) == {(1,)}
    seen.clear()
    desk.advance({4: 130})
    assert set(seen) == {()}
    seen.clear()
    desk.begin(5, ids(140, seed=5))
    desk.advance({5: 140})
    assert set(seen) == {(0,)}


@pytest.mark.parametrize("fp8", [False, True])
def test_whatever_follows_is_as_if_pages_had_been_read(fp8: bool) -> None:
    _, checkpoint = model("llama3")
    desks = (_desk(checkpoint, fp8=fp8)[0], CudaDesk(checkpoint, ops=Paged, fp8=fp8))
    for desk in desks:
        for slot, count in ((0, 70), (1, 110), (2, 1), (3, 90)):
            desk.begin(slot, ids(count, seed=slot))
        # The last one is not at its end.
        desk.advance({0: 70, 1: 110, 2: 1, 3: 40})
        # Beside it and decode rows another begins.
        desk.begin(4, ids(90, seed=4))
        desk.advance({0: 1, 1: 1, 2: 1, 3: 50, 4: 90})
        desk.advance(dict.fromkeys(range(5), 1))
    fresh, paged = (desk.logits for desk in desks)
    assert fresh.keys() == paged.keys()
    for slot, found in paged.items():
        assert (torch.stack(fresh[slot]) - torch.stack(found)).abs().max() < 1e-4


def test_a_prompt_that_is_not_finite_fails_alone() -> None:
    _, untied = model("llama2")
    untied.state["model.embed_tokens.weight"][157] = math.inf
    desk, seen = _desk(untied)
    desk.begin(0, ids(60))
    desk.begin(1, (5, 157, *ids(70)))
    desk.begin(2, ids(50, seed=2))
    statuses = desk.advance({0: 60, 1: 72, 2: 50}).statuses.tolist()
    assert seen and statuses == [RowStatus.OK, RowStatus.NOT_FINITE, RowStatus.OK]
