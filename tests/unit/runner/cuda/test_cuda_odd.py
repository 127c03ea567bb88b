"""Rows that the graph cannot sample alone, on the CUDA runner: what is chosen for them, and that nobody waits for it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.core.errors import RunnerFailed
from headrace.core.plan import Masks, RowStatus, StepResult
from headrace.core.request import SamplingParams
from headrace.runner.cuda import odd_space
from headrace.runner.cuda.odd_space import OddSpace
from tests.unit.runner.cuda.cuda_rig import CudaDesk, cuda_runner
from tests.unit.runner.cuda.late import LateLane, delay
from tests.unit.runner.cuda.odd_rig import HOT, ODD, TwinDesk
from tests.unit.runner.plans import begin, ints, plan
from tests.unit.runner.torch.model_rig import GREEDY, TensorCheckpoint, ids, model

PENALISED = replace(HOT, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.4, logprobs=2)


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("llama3")[1]


@pytest.fixture
def desk(checkpoint: TensorCheckpoint) -> CudaDesk:
    return CudaDesk(checkpoint)


def _crowd(desk: CudaDesk, *, step: int = 10**6) -> list[int]:
    """All kinds, that come two at a time while the others go on, in chunks of `step` tokens; returns those that failed."""
    kinds = list(ODD.values())
    running, failed = list[int](), list[int]()
    for first in range(0, len(kinds) + 8, 2):
        for slot in range(first, min(first + 2, len(kinds))):
            desk.begin(slot, ids(9 + 7 * slot % 40, seed=slot), sampling=replace(kinds[slot], seed=slot))
            running.append(slot)
        order = running[::-1]
        statuses = desk.advance(dict.fromkeys(order, step)).statuses.tolist()
        failed += [slot for slot, status in zip(order, statuses, strict=True) if status]
        running = [slot for slot in running if slot not in failed]
    return failed


@pytest.mark.parametrize("step", [10**6, 16])
def test_rows_of_every_kind_are_told_what_the_sampler_of_processors_says(
    checkpoint: TensorCheckpoint, step: int
) -> None:
    """Beside each other, beside plain rows and beside chunks of prompts: tokens, statuses and scores."""
    desk = TwinDesk(checkpoint, slots=len(ODD), max_step_tokens=512)
    desk.unmasked = {list(ODD).index("a mask that never comes")}
    failed = {list(ODD)[slot] for slot in _crowd(desk, step=step)}
    assert failed == {"nothing is left", "a mask that never comes"}


def test_rows_are_changed_a_few_at_a_time(checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room for it is taken once, and must not depend on who asks."""
    monkeypatch.setattr(odd_space, "_PIECE", 4)
    _crowd(TwinDesk(checkpoint, slots=len(ODD), max_step_tokens=512))


def test_rules_are_heeded_and_the_next_step_reads_what_they_chose(desk: CudaDesk) -> None:
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


@pytest.mark.parametrize("kind", ["frequency", "bias, drawn", "allowed", "scores", "no end yet"])
def test_an_odd_row_that_is_not_finite_fails_alone_and_scores_nothing(kind: str) -> None:
    _, untied = model("mistral")
    untied.state["model.embed_tokens.weight"][157] = math.nan
    desk, calm = TwinDesk(untied), CudaDesk(untied)
    for each in (desk, calm):
        each.begin(0, ids(20), sampling=PENALISED)
    desk.begin(1, (5, 157, *ids(40)), sampling=ODD[kind])
    result = desk.advance({0: 100, 1: 100})
    assert result.statuses.tolist() == [RowStatus.OK, RowStatus.NOT_FINITE]
    assert result.scores is not None and result.scores.owners.tolist() == [0]
    assert result.tokens.tolist() == [calm.prefill(0), -1]


def _in_flight(checkpoint: TensorCheckpoint, lane: LateLane) -> list[StepResult]:
    """Two slots, one of them odd, of which each step is launched before the last one is read; nothing is done before."""
    runner = cuda_runner(CudaDesk(checkpoint).config, checkpoint, lane=lane, keep_logits=False)
    runner.load()
    delay(runner, lane)
    starts = [
        replace(begin(0, ids(20), (4, 9)), sampling=PENALISED),
        replace(begin(1, ids(18, seed=1), (5, 7)), sampling=GREEDY),
    ]
    steps = [
        plan(0, [(0, 0, 20, True), (1, 0, 18, True)], begun=starts),
        *(plan(n, [(0, 19 + n, 1, True), (1, 17 + n, 1, True)]) for n in range(1, 9)),
    ]
    results = []
    for made in steps:
        waiting = lane.waiting
        runner.launch(made)
        runner.sample(made.step, None)
        assert lane.waiting > waiting
        if made.step:
            results.append(runner.collect())
    return [*results, runner.collect()]


def test_nobody_waits_for_odd_rows_and_the_next_step_counts_their_tokens(checkpoint: TensorCheckpoint) -> None:
    results = _in_flight(checkpoint, LateLane())
    calm = TwinDesk(checkpoint)
    calm.begin(0, ids(20), sampling=PENALISED)
    calm.begin(1, ids(18, seed=1))
    truth = [calm.advance({0: 100, 1: 100}) for _ in results]
    assert [result.tokens.tolist() for result in results] == [result.tokens.tolist() for result in truth]
    for found, known in zip(results, truth, strict=True):
        assert found.scores is not None and known.scores is not None
        assert np.allclose(found.scores.logprobs, known.scores.logprobs, atol=1e-5)
        assert found.scores.top_ids.tolist() == known.scores.top_ids.tolist()


@pytest.mark.parametrize("said", [0, 1, 6])
def test_who_is_begun_again_goes_on_as_if_nothing_had_happened(checkpoint: TensorCheckpoint, said: int) -> None:
    """After preemption or elsewhere: what was said before counts as said, in whatever chunks it is read."""
    calm, desk = TwinDesk(checkpoint), TwinDesk(checkpoint)
    calm.begin(2, ids(40), sampling=replace(PENALISED, min_tokens=9, logit_bias=((0, 9.0),)))
    tokens = calm.generate(2, 14)
    desk.begin(5, ids(7), sampling=PENALISED)
    desk.generate(5, 3)
    desk.end(5)
    again = replace(PENALISED, min_tokens=9, logit_bias=((0, 9.0),))
    desk.begin(5, (*ids(40), *tokens[:said]), sampling=again, num_prompt=40)
    assert desk.generate(5, 14 - said, chunk=16) == tokens[said:]


def test_the_next_occupant_inherits_nothing(desk: CudaDesk, checkpoint: TensorCheckpoint) -> None:
    calm = CudaDesk(checkpoint)
    calm.begin(0, ids(12, seed=4))
    truth = calm.generate(0, 4)
    for kind in ("presence, drawn", "bias", "allowed", "no end yet", "scores"):
        desk.begin(3, ids(12), sampling=ODD[kind])
        desk.generate(3, 3)
        desk.end(3)
        desk.begin(3, ids(12, seed=4))
        result = desk.advance({3: 12})
        assert result.scores is None
        assert [int(result.tokens[0]), *(int(desk.advance({3: 1}).tokens[0]) for _ in range(3))] == truth, kind
        desk.end(3)


def test_pools_are_taken_when_somebody_asks(desk: CudaDesk) -> None:
    space: OddSpace = desk.runner._machine.odd  # type: ignore[attr-defined]
    desk.begin(0, ids(5), sampling=replace(GREEDY, logprobs=1))
    desk.prefill(0)
    assert space._counts is space._bias is space._limits is None
    for kind in ("frequency", "bias", "allowed"):
        desk.begin(1, ids(5), sampling=ODD[kind])
        desk.prefill(1)
    parts = [part for part in vars(space).values() if isinstance(part, torch.Tensor)]
    shapes = [tuple(part.shape) for part in parts]
    assert {(9, 160), (18, 5)} <= set(shapes)
    assert odd_space.odd_bytes(desk.config) >= sum(part.numel() * part.element_size() for part in parts) - 9 * 5


def test_an_id_outside_the_vocabulary_does_no_harm_to_counts(desk: CudaDesk) -> None:
    desk.begin(0, (3, 10**6, 5), sampling=PENALISED)
    desk.begin(1, ids(5), sampling=PENALISED)
    assert desk.advance({0: 10, 1: 10}).statuses.tolist() == [RowStatus.OUT_OF_RANGE, RowStatus.OK]


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


def test_rules_that_stumble_end_the_runner(desk: CudaDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a step must not be collected as a whole one."""
    desk.begin(0, ids(5), sampling=SamplingParams(logprobs=0))
    desk.runner.launch(plan(0, [(0, 0, 5, True)], begun=desk.begun))

    def stumble(*_: Any) -> None:
        raise IndexError

    monkeypatch.setattr(desk.runner._machine, "amend", stumble)  # type: ignore[attr-defined]
    with pytest.raises(RunnerFailed, match="step 0"):
        desk.runner.sample(0, None)
    with pytest.raises(RunnerFailed, match="unusable"):
        desk.runner.collect()
