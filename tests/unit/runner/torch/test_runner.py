"""The torch runner's contract: order of calls, failing rows, prompt scores, blocks in transit."""

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.core.errors import InvalidInput, InvalidModel, RunnerFailed
from headrace.core.plan import RowStatus
from headrace.core.request import SamplingParams
from headrace.runner.torch.packing import Recipe
from headrace.runner.torch.runner import TorchRunner
from tests.unit.runner.plans import plan
from tests.unit.runner.torch.model_rig import GREEDY, QUICK, Desk, TensorCheckpoint, ids, model, same_bits

INT8 = Recipe("int8", QUICK[0])


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("llama3")[1]


@pytest.fixture
def untied() -> TensorCheckpoint:
    """Here a bad embedding is nobody's bad logit."""
    return model("mistral")[1]


@pytest.fixture
def desk(checkpoint: TensorCheckpoint) -> Desk:
    return Desk(checkpoint, INT8, slots=4, blocks=64)


def test_a_row_that_is_not_finite_fails_alone(untied: TensorCheckpoint) -> None:
    untied.state["model.embed_tokens.weight"][157] = math.nan
    for recipe in (INT8, Recipe("int4"), Recipe("fp32")):
        desk, calm = (Desk(untied, recipe, slots=4, blocks=64) for _ in range(2))
        calm.begin(0, ids(20))
        calm.prefill(0)
        desk.begin(0, ids(20))
        desk.begin(1, (5, 157, *ids(40)))
        result = desk.advance({0: 100, 1: 100})
        assert result.statuses.tolist() == [RowStatus.OK, RowStatus.NOT_FINITE]
        assert result.tokens[1] == -1
        assert same_bits(desk.logits[0], calm.logits[0])


def test_a_chunk_that_is_not_finite_is_reported_before_it_samples(checkpoint: TensorCheckpoint) -> None:
    checkpoint.state["model.embed_tokens.weight"][157] = math.inf
    desk = Desk(checkpoint, INT8, slots=4, blocks=64)
    desk.begin(0, (5, 157, *ids(40)))
    assert desk.advance({0: 16}).statuses.tolist() == [RowStatus.NOT_FINITE]
    assert desk.advance({0: 16}).statuses.tolist() == [RowStatus.NOT_FINITE]


def test_blocks_of_a_failed_row_do_no_harm_to_the_next_owner(untied: TensorCheckpoint) -> None:
    untied.state["model.embed_tokens.weight"][157] = math.nan
    desk = Desk(untied, INT8, slots=4, blocks=64)
    desk.begin(0, (157, *ids(20)))
    desk.advance({0: 100})
    shed = desk.blocks[0]
    desk.free += shed
    desk.begin(0, ids(20))
    assert set(desk.blocks[0]) == set(shed)
    assert desk.advance({0: 100}).statuses.tolist() == [RowStatus.OK]


def test_an_id_outside_the_vocabulary_fails_alone(desk: Desk) -> None:
    desk.begin(0, (3, 160))
    desk.begin(1, ids(5))
    result = desk.advance({0: 10, 1: 10})
    assert result.statuses.tolist() == [RowStatus.OUT_OF_RANGE, RowStatus.OK]
    desk.begin(0, (3, 159))
    assert desk.advance({0: 10}).statuses.tolist() == [RowStatus.OK]


def test_a_row_of_zeros_is_no_accident(checkpoint: TensorCheckpoint) -> None:
    checkpoint.state["model.embed_tokens.weight"][9] = 0.0
    desk = Desk(checkpoint, INT8, slots=4, blocks=64)
    desk.begin(0, (9, 9, 9))
    assert desk.advance({0: 10}).statuses.tolist() == [RowStatus.OK]


def test_prompt_scores_do_not_depend_on_chunks(checkpoint: TensorCheckpoint) -> None:
    network, _ = model("llama3")
    asked = replace(GREEDY, prompt_logprobs=2, logprobs=1)
    prompt = ids(90)
    desk = Desk(checkpoint, Recipe("fp32"), slots=4, blocks=64)
    desk.begin(0, prompt, sampling=asked)
    parts = [desk.advance({0: count}).scores for count in (40, 30, 20)]
    assert all(part is not None for part in parts)
    positions = np.concatenate([part.positions for part in parts if part is not None])
    found = np.concatenate([part.logprobs for part in parts if part is not None])
    with torch.inference_mode():
        logprobs = network(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert positions.tolist() == list(range(1, 91))
    truth = logprobs[torch.arange(89), torch.tensor(prompt[1:])].numpy()
    assert np.abs(found[:89] - truth).max() < 1e-3


def test_sampling_is_the_samplers_affair(desk: Desk) -> None:
    desk.begin(0, ids(5), sampling=SamplingParams(temperature=0.0, allowed_ids=(17,)))
    assert desk.prefill(0) == 17


def test_blocks_travel(checkpoint: TensorCheckpoint) -> None:
    source, target = (Desk(checkpoint, INT8, slots=2, blocks=64) for _ in range(2))
    source.begin(0, ids(64))
    tokens = source.generate(0, 3)
    shipped = source.runner.export_blocks(source.blocks[0][:4])
    places = [target.free.pop() for _ in range(3)]
    target.runner.import_blocks([places[0], 0, places[1], places[2]], shipped)
    target.begin(1, ids(64)[:48] + ids(64)[48:], shared=[places[0], 0, places[1]])
    assert target.generate(1, 3) == tokens
    assert same_bits(target.logits[1], source.logits[0])


def test_blocks_of_another_shape_are_refused(desk: Desk) -> None:
    other = Desk(model("mistral")[1], INT8, slots=2, blocks=8)
    with pytest.raises(InvalidInput, match="another model"):
        desk.runner.import_blocks([0], other.runner.export_blocks([0]))
    with pytest.raises(InvalidInput, match="another model"):
        desk.runner.import_blocks([0], desk.runner.export_blocks([0])[:-1])
    with pytest.raises(InvalidInput, match="from 0 to 63"):
        desk.runner.export_blocks([64])


def test_calls_out_of_order(desk: Desk) -> None:
    desk.begin(0, ids(5))
    made = plan(0, [(0, 0, 5, True)], begun=desk.begun)
    with pytest.raises(RunnerFailed, match="in flight to collect"):
        desk.runner.collect()
    desk.runner.launch(made)
    with pytest.raises(RunnerFailed, match="in flight already"):
        desk.runner.launch(made)
    with pytest.raises(RunnerFailed, match="not the last launched"):
        desk.runner.sample(7, None)
    desk.runner.sample(0, None)
    assert desk.runner.collect().elapsed_s > 0.0


def test_a_closed_or_unloaded_runner_says_so(checkpoint: TensorCheckpoint, desk: Desk) -> None:
    fresh = TorchRunner(desk.config, checkpoint, INT8)
    with pytest.raises(RunnerFailed, match="not loaded"):
        fresh.warm_up()
    desk.runner.close()
    with pytest.raises(RunnerFailed, match="closed"):
        desk.runner.collect()


def test_a_plan_without_blocks_for_its_rows_ends_the_runner(desk: Desk) -> None:
    desk.begin(0, ids(40))
    start = replace(desk.begun[0], blocks=(1,))
    with pytest.raises(RunnerFailed, match="no block or no id"):
        desk.runner.launch(plan(0, [(0, 0, 40, True)], begun=[start]))
    with pytest.raises(RunnerFailed, match="unusable"):
        desk.runner.collect()


def test_warm_up_leaves_nothing_behind(checkpoint: TensorCheckpoint, desk: Desk) -> None:
    calm = Desk(checkpoint, INT8, slots=4, blocks=64)
    desk.runner.warm_up()
    for each in (desk, calm):
        each.begin(0, ids(30))
        each.generate(0, 3)
    assert same_bits(desk.logits[0], calm.logits[0])


def test_missing_and_misshapen_tensors_are_named(checkpoint: TensorCheckpoint, desk: Desk) -> None:
    kept = checkpoint.state.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(InvalidModel, match="layer 1 is incomplete"):
        TorchRunner(desk.config, checkpoint, INT8).load()
    checkpoint.state["model.layers.1.mlp.up_proj.weight"] = kept[:5]
    with pytest.raises(InvalidModel, match=r"tensor model.layers.1.mlp.up_proj.weight is \(5, 96\)"):
        TorchRunner(desk.config, checkpoint, INT8).load()


def test_an_engine_of_another_vocabulary_is_refused(checkpoint: TensorCheckpoint, desk: Desk) -> None:
    with pytest.raises(InvalidModel, match="vocabulary"):
        TorchRunner(replace(desk.config, vocab_size=7), checkpoint, INT8)


def test_the_fingerprint_names_numerics_and_not_speed(checkpoint: TensorCheckpoint, desk: Desk) -> None:
    prints = [
        TorchRunner(desk.config, checkpoint, recipe).fingerprint
        for recipe in (INT8, Recipe("int8"), Recipe("int4"), Recipe("fp32"), Recipe("fp32", min_rows=16))
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4
