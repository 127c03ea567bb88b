"""Rows that the graph cannot sample, on the CUDA runner: looked at again, a few at a time, and the device told of it."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.core.errors import RunnerFailed
from headrace.core.plan import Masks, RowStatus, StepResult
from headrace.core.request import SamplingParams
from headrace.runner.cuda import second_look
from headrace.runner.torch.sampler import Sampled, Sampler
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.plans import ints, plan
from tests.unit.runner.torch.model_rig import GREEDY, TensorCheckpoint, ids, model


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("llama3")[1]


@pytest.fixture
def desk(checkpoint: TensorCheckpoint) -> CudaDesk:
    return CudaDesk(checkpoint)


def test_rules_are_heeded_by_a_second_look_and_the_device_learns_of_it(desk: CudaDesk) -> None:
    desk.begin(0, ids(5), sampling=replace(GREEDY, allowed_ids=(17,)))
    desk.begin(1, ids(9, seed=1))
    free = CudaDesk(model("llama3")[1])
    free.begin(1, ids(9, seed=1))
    assert desk.prefill(0) == 17
    tokens = [desk.prefill(1)]
    for _ in range(3):
        both = desk.advance({0: 1, 1: 1}).tokens.tolist()
        assert both[0] == 17
        tokens.append(both[1])
    assert tokens == free.generate(1, 4)
    truth = CudaDesk(model("llama3")[1])
    truth.begin(0, (*ids(5), 17, 17, 17))
    truth.prefill(0)
    assert (desk.logits[0][3] - truth.logits[0][0]).abs().max() < 1e-3


def test_a_masked_row_takes_what_its_mask_allows(desk: CudaDesk) -> None:
    desk.begin(0, ids(5), sampling=replace(GREEDY, masked=True))
    desk.begin(1, ids(6), sampling=replace(GREEDY, masked=True))
    made = plan(0, [(0, 0, 5, True), (1, 0, 6, True)], begun=desk.begun, masked=[0, 1])
    desk.runner.launch(made)
    words = np.zeros((1, 5), np.uint32)
    words[0, 1] = 1 << 3
    desk.runner.sample(0, Masks(ints([0]), words))
    result = desk.runner.collect()
    assert result.tokens.tolist() == [35, -1]
    assert result.statuses.tolist() == [RowStatus.OK, RowStatus.MASK]


def _look_at_five(checkpoint: TensorCheckpoint) -> StepResult:
    desk = CudaDesk(checkpoint)
    for slot in range(5):
        desk.begin(slot, ids(9, seed=slot), sampling=SamplingParams(seed=slot, logprobs=slot, presence_penalty=0.5))
    return desk.advance(dict.fromkeys(range(5), 9))


def test_special_rows_are_looked_at_a_few_at_a_time(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that takes of the card is set aside when blocks are counted, and must not depend on who asks."""
    whole, seen, sample = _look_at_five(checkpoint), list[int](), Sampler.sample

    def noted(sampler: Sampler, logits: torch.Tensor, *more: Any) -> Sampled:
        seen.append(len(logits))
        return sample(sampler, logits, *more)

    monkeypatch.setattr(second_look, "_LOOKED_ROWS", 2)
    monkeypatch.setattr(Sampler, "sample", noted)
    parts = _look_at_five(checkpoint)
    assert seen == [2, 2, 1]
    assert parts.tokens.tolist() == whole.tokens.tolist() and not parts.statuses.any()
    assert parts.scores is not None and whole.scores is not None
    for name in ("owners", "positions", "logprobs", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(parts.scores, name), getattr(whole.scores, name))


def test_who_has_no_penalties_gives_back_what_counted_them(desk: CudaDesk) -> None:
    for slot in range(9):
        desk.begin(slot, ids(5), sampling=replace(GREEDY, presence_penalty=1.0))
        desk.prefill(slot)
        desk.begin(slot, ids(5))
        desk.prefill(slot)
    sampler = desk.runner._look._sampler  # type: ignore[attr-defined]
    assert len(sampler._penalties._free) == sampler._penalties._size == 4


def test_scores_of_prompts_and_tokens(checkpoint: TensorCheckpoint, desk: CudaDesk) -> None:
    network, _ = model("llama3")
    prompt = ids(90)
    desk.begin(0, prompt, sampling=replace(GREEDY, prompt_logprobs=2, logprobs=1))
    parts = [desk.advance({0: count}).scores for count in (40, 30, 20)]
    positions = np.concatenate([part.positions for part in parts if part is not None])
    found = np.concatenate([part.logprobs for part in parts if part is not None])
    with torch.inference_mode():
        logprobs = network(torch.tensor([prompt])).logits[0].log_softmax(-1)
    truth = logprobs[torch.arange(89), torch.tensor(prompt[1:])].numpy()
    assert positions.tolist() == list(range(1, 91))
    assert np.abs(found[:89] - truth).max() < 1e-3
    assert abs(float(found[89]) - float(logprobs[89].max())) < 1e-3


def test_a_sampler_that_stumbles_ends_the_runner(desk: CudaDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a step must not be collected as a whole one."""
    desk.begin(0, ids(5), sampling=replace(GREEDY, logprobs=0))
    desk.runner.launch(plan(0, [(0, 0, 5, True)], begun=desk.begun))
    monkeypatch.setattr(Sampler, "sample", lambda *_: [][0])
    with pytest.raises(RunnerFailed, match="step 0"):
        desk.runner.sample(0, None)
    with pytest.raises(RunnerFailed, match="unusable"):
        desk.runner.collect()
