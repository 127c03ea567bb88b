"""The CUDA runner's contract, over the reference of its kernels: what it computes, order of calls, failing rows."""

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.core.config import EngineConfig, check_engine
from headrace.core.errors import InvalidInput, InvalidModel, RunnerFailed
from headrace.core.plan import RowStatus
from headrace.core.request import Request, SamplingParams
from headrace.engine.loop import Engine
from headrace.runner.cuda.flight import Envelope, Flight
from headrace.runner.cuda.lane import HostLane
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.packet import Laid
from headrace.runner.cuda.reference_ops import ReferenceOps
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.cuda.weights import random_weights
from headrace.runner.torch.score_pile import ScorePile
from tests.unit.runner.cuda.cuda_rig import CudaDesk, cuda_runner
from tests.unit.runner.plans import begin, plan
from tests.unit.runner.torch.model_rig import GREEDY, TensorCheckpoint, ids, model


@pytest.fixture
def checkpoint() -> TensorCheckpoint:
    return model("llama3")[1]


@pytest.fixture
def untied() -> TensorCheckpoint:
    """Here a bad embedding is nobody's bad logit."""
    return model("mistral")[1]


@pytest.fixture
def desk(checkpoint: TensorCheckpoint) -> CudaDesk:
    return CudaDesk(checkpoint)


def _truth(network: torch.nn.Module, prompt: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = network(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :]


@pytest.mark.parametrize("family", ["llama2", "llama3", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(family: str) -> None:
    network, checkpoint = model(family)
    desk = CudaDesk(checkpoint)
    desk.begin(2, ids(37))
    desk.begin(5, ids(70, seed=1))
    first = desk.generate(2, 4, chunk=16)
    second = [desk.prefill(5)]
    while len(second) < 4:
        result = desk.advance({2: 1, 5: 1})
        first.append(int(result.tokens[0]))
        second.append(int(result.tokens[1]))
    for slot, prompt, tokens in ((2, ids(37), first), (5, ids(70, seed=1), second)):
        truth = _truth(network, prompt, tokens)
        assert (torch.stack(desk.logits[slot]) - truth).abs().max() < 2e-3
        assert truth.argmax(-1).tolist() == tokens


def test_chunks_beside_decode_rows_compute_what_they_would_alone(checkpoint: TensorCheckpoint) -> None:
    alone = {}
    for slot in (0, 1, 2):
        calm = CudaDesk(checkpoint)
        calm.begin(slot, ids(40 + slot, seed=slot))
        alone[slot] = calm.generate(slot, 5)
    desk = CudaDesk(checkpoint)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    desk.begin(0, ids(40))
    desk.begin(1, ids(41, seed=1))
    for chunks in ({0: 40, 1: 7}, {1: 20, 0: 1}, {0: 1, 1: 14}, {1: 1, 0: 1}):
        _note(tokens, chunks, desk)
    desk.begin(2, ids(42, seed=2))
    for chunks in ({2: 41, 1: 1}, {1: 1, 2: 1, 0: 1}, {2: 1, 1: 1}, {2: 1}, {2: 1}, {2: 1}):
        _note(tokens, chunks, desk)
    assert tokens == alone


def _note(tokens: dict[int, list[int]], chunks: dict[int, int], desk: CudaDesk) -> None:
    result = desk.advance(chunks)
    assert not result.statuses.any()
    for slot, token in zip(chunks, result.tokens.tolist(), strict=True):
        if token >= 0:
            tokens[slot].append(token)


def test_a_step_is_launched_before_the_last_one_is_read(checkpoint: TensorCheckpoint) -> None:
    """The engine plans the next row of a token that nobody has seen."""
    calm, runner = CudaDesk(checkpoint), cuda_runner(CudaDesk(checkpoint).config, checkpoint)
    calm.begin(0, ids(20))
    runner.load()
    start = replace(begin(0, ids(20), (4, 9)), sampling=GREEDY)
    steps = [plan(0, [(0, 0, 20, True)], begun=[start]), *(plan(n, [(0, 19 + n, 1, True)]) for n in range(1, 5))]
    tokens = []
    for made in steps:
        runner.launch(made)
        runner.sample(made.step, None)
        if made.step:
            tokens.append(int(runner.collect().tokens[0]))
    tokens.append(int(runner.collect().tokens[0]))
    assert tokens == calm.generate(0, 5)


def test_calls_out_of_order(desk: CudaDesk) -> None:
    runner = desk.runner
    desk.begin(0, ids(5))
    made = plan(0, [(0, 0, 5, True)], begun=desk.begun)
    with pytest.raises(RunnerFailed, match="in flight to collect"):
        runner.collect()
    runner.launch(made)
    with pytest.raises(RunnerFailed, match="before step 0 is sampled"):
        runner.launch(plan(1, [(0, 5, 1, True)]))
    with pytest.raises(RunnerFailed, match="not the last launched"):
        runner.sample(7, None)
    runner.sample(0, None)
    runner.launch(plan(1, [(0, 5, 1, True)]))
    runner.sample(1, None)
    with pytest.raises(RunnerFailed, match="2 in flight already"):
        runner.launch(plan(2, [(0, 6, 1, True)]))
    assert runner.collect().elapsed_s > 0.0
    assert runner.collect().step == 1


def test_a_row_that_is_not_finite_fails_alone(untied: TensorCheckpoint) -> None:
    untied.state["model.embed_tokens.weight"][157] = math.nan
    desk, calm = CudaDesk(untied), CudaDesk(untied)
    calm.begin(0, ids(20))
    calm.prefill(0)
    desk.begin(0, ids(20))
    desk.begin(1, (5, 157, *ids(40)))
    result = desk.advance({0: 100, 1: 100})
    assert result.statuses.tolist() == [RowStatus.OK, RowStatus.NOT_FINITE]
    assert result.tokens[1] == -1
    assert (desk.logits[0][0] - calm.logits[0][0]).abs().max() < 1e-5


def test_a_chunk_that_is_not_finite_is_reported_before_it_samples(untied: TensorCheckpoint) -> None:
    untied.state["model.embed_tokens.weight"][157] = math.inf
    desk = CudaDesk(untied)
    desk.begin(0, (5, 157, *ids(40)))
    desk.begin(3, ids(30))
    assert desk.advance({3: 16, 0: 16}).statuses.tolist() == [RowStatus.OK, RowStatus.NOT_FINITE]
    assert desk.advance({0: 16, 3: 14}).statuses.tolist() == [RowStatus.NOT_FINITE, RowStatus.OK]


def test_a_chunk_that_is_not_finite_fails_whatever_token_was_chosen_after_it() -> None:
    envelope = Envelope.make(HostLane(), 8, 8)
    # A token, its status, and one place of the chunk that is not finite.
    envelope.found[:3] = (7, RowStatus.OK, 1)
    row = np.zeros(1, np.intp)
    laid = Laid(Layout(1, 0, 4, 1, 1), row, row, row)
    made = plan(0, [(0, 0, 4, True)])
    tokens, statuses = Flight(made, laid, envelope, np.zeros(1, np.uint8), ScorePile()).read()
    assert (tokens.tolist(), statuses.tolist()) == ([-1], [RowStatus.NOT_FINITE])


def test_the_next_occupant_of_a_failed_slot_is_not_blamed(untied: TensorCheckpoint) -> None:
    """The failure is read after the slot was given away."""
    untied.state["model.embed_tokens.weight"][157] = math.nan
    runner = cuda_runner(CudaDesk(untied).config, untied)
    runner.load()
    runner.launch(plan(0, [(0, 0, 2, True)], begun=[begin(0, (5, 157), (1,), number=1)]))
    runner.sample(0, None)
    runner.launch(plan(1, [(0, 0, 3, True)], begun=[begin(0, (5, 6, 7), (2,), number=2)], freed=[1]))
    runner.sample(1, None)
    assert runner.collect().statuses.tolist() == [RowStatus.NOT_FINITE]
    assert runner.collect().statuses.tolist() == [RowStatus.OK]
    runner.launch(plan(2, [(0, 3, 1, True)]))
    runner.sample(2, None)
    assert runner.collect().statuses.tolist() == [RowStatus.OK]


def test_an_id_outside_the_vocabulary_fails_alone(desk: CudaDesk) -> None:
    desk.begin(0, (3, 160))
    desk.begin(1, ids(5))
    assert desk.advance({0: 10, 1: 10}).statuses.tolist() == [RowStatus.OUT_OF_RANGE, RowStatus.OK]
    for negative in (-1, -(2**63)):
        desk.begin(0, (3, negative, 5))
        assert desk.advance({0: 10}).statuses.tolist() == [RowStatus.OUT_OF_RANGE]
    desk.begin(0, (3, 159))
    assert desk.advance({0: 10}).statuses.tolist() == [RowStatus.OK]


def test_a_step_may_have_fewer_tokens_than_there_are_slots(checkpoint: TensorCheckpoint) -> None:
    desk = CudaDesk(checkpoint, slots=70)
    for slot in (0, 69):
        desk.begin(slot, ids(5, seed=slot))
    tokens = [desk.prefill(0)]
    tokens.append(int(desk.advance({69: 5, 0: 1}).tokens[1]))
    calm = CudaDesk(checkpoint)
    calm.begin(0, ids(5))
    assert tokens == calm.generate(0, 2)


def test_parts_are_a_tile_or_what_a_step_holds(checkpoint: TensorCheckpoint) -> None:
    """Its configuration is one that an engine takes."""
    for most, part_tokens in ((512, ReferenceOps.tile_rows), (8, 8)):
        config = EngineConfig(
            slots=4,
            blocks=32,
            block_size=4,
            context_len=64,
            vocab_size=checkpoint.shape.vocab_size,
            max_step_tokens=most,
        )
        runner = cuda_runner(config, checkpoint)
        assert runner.config.part_tokens == part_tokens
        check_engine(runner.config)


def test_chance_depends_on_seed_and_place_alone(desk: CudaDesk) -> None:
    hot = SamplingParams(temperature=1.5, seed=11, top_k=40, top_p=0.95)
    desk.begin(0, ids(20), sampling=hot)
    alone = desk.generate(0, 6)
    desk.begin(4, ids(20), sampling=hot)
    desk.begin(2, ids(50, seed=3), sampling=replace(hot, seed=5))
    desk.prefill(2)
    tokens = [desk.prefill(4, chunk=7)]
    while len(tokens) < 6:
        tokens.append(int(desk.advance({2: 1, 4: 1}).tokens[1]))
    assert tokens == alone
    desk.begin(0, ids(20), sampling=replace(hot, seed=12))
    assert desk.generate(0, 6) != alone


def test_blocks_travel(checkpoint: TensorCheckpoint) -> None:
    source, target = CudaDesk(checkpoint), CudaDesk(checkpoint)
    source.begin(0, ids(64))
    tokens = source.generate(0, 3)
    shipped = source.runner.export_blocks(source.blocks[0][:3])
    places = [target.free.pop() for _ in range(3)]
    target.runner.import_blocks(places, shipped)
    target.begin(1, ids(64), shared=places)
    assert target.generate(1, 3) == tokens
    with pytest.raises(InvalidInput, match="another model"):
        target.runner.import_blocks(places, shipped[:-1])
    with pytest.raises(InvalidInput, match="from 0 to 199"):
        target.runner.export_blocks([200])


def test_warm_up_changes_no_slot(checkpoint: TensorCheckpoint, desk: CudaDesk) -> None:
    calm = CudaDesk(checkpoint)
    for each in (desk, calm):
        each.begin(0, ids(30))
        each.prefill(0)
    desk.runner.warm_up()
    assert [int(desk.advance({0: 1}).tokens[0]) for _ in range(3)] == [
        int(calm.advance({0: 1}).tokens[0]) for _ in range(3)
    ]


def test_a_plan_without_blocks_for_its_rows_ends_the_runner(desk: CudaDesk) -> None:
    desk.begin(0, ids(40))
    start = replace(desk.begun[0], blocks=(1,))
    with pytest.raises(RunnerFailed, match="no block or no id"):
        desk.runner.launch(plan(0, [(0, 0, 40, True)], begun=[start]))
    with pytest.raises(RunnerFailed, match="unusable"):
        desk.runner.collect()


def test_unloaded_closed_and_misfitting_runners_say_so(checkpoint: TensorCheckpoint, desk: CudaDesk) -> None:
    with pytest.raises(RunnerFailed, match="not loaded"):
        cuda_runner(desk.config, checkpoint).warm_up()
    desk.runner.close()
    with pytest.raises(RunnerFailed, match="closed"):
        desk.runner.collect()
    with pytest.raises(InvalidModel, match="vocabulary"):
        cuda_runner(replace(desk.config, vocab_size=7), checkpoint)
    checkpoint.state.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(InvalidModel, match=r"model.layers.1.mlp.up_proj.weight is missing"):
        cuda_runner(desk.config, checkpoint).load()


def test_random_weights_need_no_file(checkpoint: TensorCheckpoint, desk: CudaDesk) -> None:
    runner = CudaRunner(
        desk.config, checkpoint.shape, random_weights(1), ReferenceOps(), HostLane(), dtype=torch.float32
    )
    runner.load()
    made = plan(0, [(0, 0, 5, True)], begun=[begin(0, ids(5), (3,))])
    runner.launch(made)
    runner.sample(0, None)
    assert runner.collect().statuses.tolist() == [RowStatus.OK]


def test_a_flood_of_starts_is_sent_in_parts(checkpoint: TensorCheckpoint, desk: CudaDesk) -> None:
    """More changed words than a packet has room for."""
    desk.begin(3, ids(20, seed=3))
    runner = cuda_runner(desk.config, checkpoint)
    runner.load()
    room = runner._machine.choice.mixed(0, 1, 20).changes_at + 20
    runner._envelopes[0].words = runner._envelopes[0].words[:room]
    begun = [replace(begin(slot, ids(20, seed=slot), (2 * slot, 2 * slot + 1)), sampling=GREEDY) for slot in range(8)]
    runner.launch(plan(0, [(3, 0, 20, True)], begun=begun))
    runner.sample(0, None)
    assert runner.collect().tokens[0] == desk.prefill(3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_behind_the_engine_streams_are_what_they_are_alone(
    checkpoint: TensorCheckpoint, desk: CudaDesk, temperature: float
) -> None:
    config = replace(desk.config, slots=5, blocks=30, eos_ids=())
    sampling = SamplingParams(temperature=temperature, seed=4)
    requests = [
        Request(f"r{i}", "t", ids(10 + 9 * i, seed=i), max_tokens=12, sampling=replace(sampling, seed=i))
        for i in range(8)
    ]
    together = _streams(config, checkpoint, requests)
    for request in requests:
        assert _streams(config, checkpoint, [request])[request.request_id] == together[request.request_id]


def _streams(config: EngineConfig, checkpoint: TensorCheckpoint, requests: list[Request]) -> dict[str, list[int]]:
    runner = cuda_runner(config, checkpoint)
    runner.load()
    engine = Engine(config, runner)
    names = {engine.submit(request, 0.0): request.request_id for request in requests}
    streams: dict[str, list[int]] = {name: [] for name in names.values()}
    now_s = 0.0
    while not engine.idle:
        frame = engine.turn(now_s)
        now_s += 0.01
        for number, token in zip(frame.numbers.tolist(), frame.tokens.tolist(), strict=True):
            streams[names[number]].append(token)
        assert all(ended.outcome.name == "FINISHED" for ended in frame.ended), frame.ended
    engine.check()
    return streams
