"""Long steps: only tokens that sample go through the last layer to its end, and nobody sees a difference."""

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from headrace.core.plan import RowStatus
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.weights.shape import ModelShape
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.torch.model_rig import GREEDY, TensorCheckpoint, ids, model

pytestmark = pytest.mark.unit


class Apart(ReferenceOps):
    """Norms and gates are operations of their own, as they are in long steps on a card. Knows how many rows had gates, and
    which scratch attention over single tokens had: how many rows it is for, and whether for the last of chunks."""

    gated: list[int]

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.gated = []
        self.looked: list[tuple[int, bool]] = []

    def scratch(self, rows: int, context: int, *, last: bool = False) -> Any:
        return rows, last

    def decode_attention(self, *given: Any) -> None:
        self.looked.append(given[-1])
        super().decode_attention(*given)

    def fuses(self, rows: int) -> bool:
        return False

    def silu_mul(self, gate_up: Tensor, out: Tensor, **more: Tensor | None) -> None:
        self.gated.append(len(gate_up))
        super().silu_mul(gate_up, out, **more)


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("qwen3")[1]


def _desk(checkpoint: TensorCheckpoint) -> tuple[CudaDesk, Apart]:
    made: list[Apart] = []

    def ops(shape: ModelShape, slots: int, device: torch.device) -> Apart:
        made.append(Apart())
        return made[-1]

    return CudaDesk(checkpoint, ops=ops), made[0]


def test_tokens_that_do_not_sample_leave_before_the_end(checkpoint: TensorCheckpoint) -> None:
    desk, ops = _desk(checkpoint)
    desk.begin(0, ids(200))
    desk.advance({0: 200})
    # As many as the layout has room for.
    assert ops.gated == [256] * (checkpoint.shape.num_layers - 1) + [9]


def test_of_those_that_sample_most_may_be_padding(checkpoint: TensorCheckpoint) -> None:
    """Of chunks alone: one scratch serves them, whatever their number. Beside decode rows they are as these."""
    desk, ops = _desk(checkpoint)
    desk.begin(0, ids(150))
    desk.advance({0: 150})
    slots, layers = desk.runner.config.slots, checkpoint.shape.num_layers
    assert ops.looked == [(slots, True)]
    desk.begin(1, ids(200, seed=1))
    ops.looked.clear()
    desk.advance({0: 1, 1: 200})
    assert ops.looked == [(slots, False)] * layers


def test_what_is_sampled_is_what_all_of_them_would_have_given(checkpoint: TensorCheckpoint) -> None:
    """Chunks that end their prompt and one that does not, beside decode rows."""
    (apart, _), plain = _desk(checkpoint), CudaDesk(checkpoint)
    for desk in (apart, plain):
        desk.begin(4, ids(30, seed=4))
        desk.begin(0, ids(150))
        desk.advance({4: 30})
        for slot, count in ((1, 7), (2, 90), (8, 1)):
            desk.begin(slot, ids(count, seed=slot))
        desk.advance({1: 7, 0: 120, 4: 1, 8: 1})
        desk.advance({2: 90, 0: 30, 4: 1, 1: 1})
        desk.advance(dict.fromkeys((0, 1, 2, 4, 8), 1))
    assert apart.logits.keys() == plain.logits.keys()
    for slot, found in plain.logits.items():
        assert (torch.stack(apart.logits[slot]) - torch.stack(found)).abs().max() < 1e-4


def test_a_prompt_whose_scores_are_asked_for_goes_all_the_way(checkpoint: TensorCheckpoint) -> None:
    (apart, ops), plain = _desk(checkpoint), CudaDesk(checkpoint)
    scores = []
    for desk in (apart, plain):
        desk.begin(0, ids(200), sampling=replace(GREEDY, prompt_logprobs=1))
        scores.append(desk.advance({0: 200}).scores)
    assert ops.gated == [256] * checkpoint.shape.num_layers
    assert scores[0] is not None and scores[1] is not None
    assert abs(scores[0].logprobs - scores[1].logprobs).max() < 1e-4


def test_a_chunk_that_is_not_finite_is_seen_without_its_last_states() -> None:
    _, untied = model("llama2")
    untied.state["model.embed_tokens.weight"][157] = math.inf
    desk, _ = _desk(untied)
    desk.begin(0, (5, 157, *ids(150)))
    desk.begin(3, ids(100))
    assert desk.advance({3: 90, 0: 120}).statuses.tolist() == [RowStatus.OK, RowStatus.NOT_FINITE]
    assert desk.advance({0: 30, 3: 10}).statuses.tolist() == [RowStatus.NOT_FINITE, RowStatus.OK]


def test_a_prompt_with_a_score_that_is_no_number_fails(checkpoint: TensorCheckpoint) -> None:
    """What breaks only behind the last layer's keys and values is in no cache; its score must not be told."""

    class Breaking(Apart):
        def silu_mul(self, gate_up: Tensor, out: Tensor, **more: Tensor | None) -> None:
            super().silu_mul(gate_up, out, **more)
            if len(self.gated) % checkpoint.shape.num_layers == 0:
                out[3] = math.nan

    desk = CudaDesk(checkpoint, ops=Breaking)
    desk.begin(0, ids(200), sampling=replace(GREEDY, prompt_logprobs=1))
    desk.begin(3, ids(150, seed=3))
    assert desk.advance({0: 120, 3: 100}).statuses.tolist() == [RowStatus.NOT_FINITE, RowStatus.OK]
