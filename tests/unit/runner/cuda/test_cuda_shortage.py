"""A card without memory left: steps are launched smaller, prompts scored in pieces, and a row fails alone at worst."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.core.errors import OutOfRoom, RunnerFailed
from headrace.core.plan import RowStatus, SlotStart
from headrace.core.request import SamplingParams
from headrace.runner.cuda import prompt_scores
from headrace.runner.cuda.odd_space import OddSpace
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.shortage import fits_at_last, in_pieces, is_shortage
from headrace.runner.torch import sampler_scores
from headrace.runner.torch.penalties import PenaltyPool
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.cuda.scarce import ERROR, make_scarce
from tests.unit.runner.torch.model_rig import GREEDY, TensorCheckpoint, ids, model


@pytest.fixture(scope="module")
def checkpoint() -> TensorCheckpoint:
    return model("llama3")[1]


class Poor(ReferenceOps):
    """Runs out `times` times, after everything of a step is done but its end."""

    def __init__(self) -> None:
        self.times = 0

    def sample(self, *given: Any) -> None:
        super().sample(*given)
        if self.times:
            self.times -= 1
            raise torch.OutOfMemoryError(ERROR)


def poor_desk(checkpoint: TensorCheckpoint) -> tuple[CudaDesk, Poor]:
    ops = Poor()
    return CudaDesk(checkpoint, ops=lambda *_: ops), ops


def begin_two(desk: CudaDesk) -> list[int]:
    """Drawn: a token that is always the same would hide that it is another's."""
    for slot in (0, 1):
        desk.begin(slot, ids(5 + 4 * slot, seed=slot), sampling=SamplingParams(temperature=1.5, seed=slot))
    found: list[int] = desk.advance({0: 5, 1: 9}).tokens.tolist()
    return found


def test_a_step_that_finds_memory_the_second_time_is_the_same_step(checkpoint: TensorCheckpoint) -> None:
    calm, (poor, ops) = CudaDesk(checkpoint), poor_desk(checkpoint)
    assert begin_two(calm) == begin_two(poor)
    for _ in range(4):
        ops.times = 1
        assert poor.advance({0: 1, 1: 1}).tokens.tolist() == calm.advance({0: 1, 1: 1}).tokens.tolist()
        assert not ops.times


def test_a_step_without_room_leaves_its_rows_to_the_next(checkpoint: TensorCheckpoint) -> None:
    calm, (poor, ops) = CudaDesk(checkpoint), poor_desk(checkpoint)
    assert begin_two(calm) == begin_two(poor)
    ops.times = 2
    with pytest.raises(OutOfRoom, match="MiB of the card are free"):
        poor.advance({0: 1, 1: 1})
    # What was launched again, in two steps, is what would have been.
    found = [int(poor.advance({slot: 1}).tokens[0]) for slot in (0, 1)]
    assert found == calm.advance({0: 1, 1: 1}).tokens.tolist()
    assert poor.advance({0: 1, 1: 1}).tokens.tolist() == calm.advance({0: 1, 1: 1}).tokens.tolist()


def test_who_was_started_by_a_step_without_room_is_there(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the step did not get as far as its first kernel."""
    calm, poor = CudaDesk(checkpoint), CudaDesk(checkpoint)
    for desk in (calm, poor):
        desk.begin(0, ids(40), sampling=SamplingParams(temperature=1.0, seed=3))
    with monkeypatch.context() as patch:
        patch.setattr(poor.runner._machine, "run", _no_memory)  # type: ignore[attr-defined]
        with pytest.raises(OutOfRoom):
            poor.advance({0: 40})
    assert [poor.advance({0: 20}).tokens.tolist(), poor.advance({0: 20}).tokens.tolist()] == [
        [-1],
        calm.advance({0: 40}).tokens.tolist(),
    ]


def test_other_errors_still_end_the_runner(checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = CudaDesk(checkpoint)
    begin_two(desk)
    monkeypatch.setattr(desk.runner._machine, "run", _broken)  # type: ignore[attr-defined]
    with pytest.raises(RunnerFailed, match="illegal memory access"):
        desk.advance({0: 1})
    with pytest.raises(RunnerFailed, match="unusable"):
        desk.advance({0: 1})


def _broken(*_: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


SPECIAL = SamplingParams(
    temperature=0.7,
    seed=1,
    logprobs=2,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((3, 2.0),),
    min_tokens=2,
)


def looks(desk: CudaDesk, count: int = 5, steps: int = 6) -> list[tuple[list[int], list[float]]]:
    found = []
    for slot in range(count):
        desk.begin(slot, ids(9, seed=slot), sampling=replace(SPECIAL, seed=slot))
    for step in range(steps):
        result = desk.advance(dict.fromkeys(range(count), 9 if step == 0 else 1))
        assert result.scores is not None and not result.statuses.any()
        found.append((result.tokens.tolist(), result.scores.logprobs.tolist()))
    return found


def test_memory_that_runs_out_while_lines_are_entered_changes_nothing(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each place in turn: what was half done is done again."""
    asked = place = 0

    def once(_: str) -> bool:
        nonlocal asked
        asked += 1
        return asked == place

    make_scarce(monkeypatch, once, in_steps=False)
    whole = looks(CudaDesk(checkpoint), 2, 3)
    total = asked
    assert total > 8
    for place in range(1, total + 1):
        asked = 0
        assert looks(CudaDesk(checkpoint), 2, 3) == whole, place
        assert asked > total


@pytest.mark.parametrize("most", [1, 0])
def test_prompts_are_scored_in_smaller_pieces_or_fail_alone(
    checkpoint: TensorCheckpoint, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, desk, score = CudaDesk(checkpoint), CudaDesk(checkpoint), sampler_scores.score
    for each in (calm, desk):
        each.begin(0, ids(21), sampling=replace(GREEDY, prompt_logprobs=1))
        each.begin(1, ids(7, seed=1))
    whole = calm.advance({0: 21, 1: 7})

    def choosy(logits: torch.Tensor, *more: Any) -> Any:
        if len(logits) > most:
            raise torch.OutOfMemoryError(ERROR)
        return score(logits, *more)

    monkeypatch.setattr(prompt_scores, "score", choosy)
    result = desk.advance({0: 21, 1: 7})
    assert result.tokens[1] == whole.tokens[1] and result.statuses[1] == 0
    if most:
        assert result.scores is not None and whole.scores is not None
        assert result.scores.positions.tolist() == whole.scores.positions.tolist()
        assert np.allclose(result.scores.logprobs, whole.scores.logprobs, atol=1e-4)
    else:
        assert result.statuses[0] == RowStatus.OUT_OF_ROOM


@pytest.mark.parametrize("asked", [{"presence_penalty": 1.0}, {"logit_bias": ((3, 1.0),)}, {"allowed_ids": (3,)}])
def test_a_newcomer_whose_lines_find_no_room_fails_alone(
    checkpoint: TensorCheckpoint, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, calm = CudaDesk(checkpoint), CudaDesk(checkpoint)
    for each in (desk, calm):
        each.begin(0, ids(5), sampling=replace(GREEDY, logprobs=1))
        assert each.prefill(0) >= 0
    with monkeypatch.context() as patch:
        patch.setattr(OddSpace, "_pool", _no_memory)
        desk.begin(1, ids(6), sampling=replace(GREEDY, prompt_logprobs=1, **asked))
        result = desk.advance({0: 1, 1: 6})
    assert result.statuses.tolist() == [0, RowStatus.OUT_OF_ROOM]
    assert result.scores is not None and result.scores.owners.tolist() == [0]
    for each in (desk, calm):
        each.begin(1, ids(6), sampling=replace(GREEDY, **asked))
    assert int(desk.advance({1: 6, 0: 1}).tokens[0]) == calm.prefill(1)


def _no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError(ERROR)


def test_penalties_that_could_not_grow_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PenaltyPool(4, 50, torch.device("cpu"))
    start = SlotStart(1, 1, "r", (3, 4, 5), 2, 0, (0,), replace(GREEDY, presence_penalty=1.0), 0)
    joined, cat = list[int](), torch.cat

    def second_fails(tensors: Any, dim: int = 0) -> torch.Tensor:
        joined.append(1)
        if len(joined) == 2:
            _no_memory()
        return cat(tensors, dim)

    monkeypatch.setattr(torch, "cat", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        pool.begin(start)
    pool.begin(start)
    logits = torch.zeros(1, 50)
    pool.apply(logits, torch.tensor([0]), np.array([1], np.int32))
    assert logits[0].nonzero().flatten().tolist() == [5]


def test_pieces_halve_and_what_fails_alone_is_named() -> None:
    tried: list[tuple[int, int]] = []

    def work(piece: slice) -> None:
        tried.append((piece.start, piece.stop))
        if piece.stop - piece.start > 2 or piece.start <= 4 < piece.stop:
            raise torch.OutOfMemoryError(ERROR)

    reclaimed: list[int] = []
    assert in_pieces(7, 8, work, lambda: reclaimed.append(1)) == [4]
    assert tried == [(0, 7), (0, 3), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (4, 5), (5, 6), (6, 7)]
    assert len(reclaimed) == 3 and in_pieces(0, 8, work, list) == []


def test_what_the_failed_work_held_is_free_before_more_is_asked_for() -> None:
    class Held:
        pass

    alive: list[Any] = []

    def work() -> None:
        import weakref

        held = Held()
        alive.append(weakref.ref(held))
        if len(alive) == 1:
            raise torch.OutOfMemoryError(ERROR)

    assert fits_at_last(work, lambda: alive.append(alive[0]())) and alive[1] is None


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError(ERROR), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
    ],
)
def test_which_errors_say_that_memory_is_short(error: RuntimeError, short: bool) -> None:
    assert is_shortage(error) is short
