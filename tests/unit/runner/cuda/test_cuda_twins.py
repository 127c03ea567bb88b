"""The same requests on the CUDA runner, two steps in flight and late, and on the CPU's: the same streams and ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.config import EngineConfig
from headrace.core.plan import Masks
from headrace.core.ports import Runner
from headrace.core.request import Request, SamplingParams
from headrace.engine.loop import Engine
from headrace.runner.cuda.runner import CudaRunner
from headrace.runner.torch.packing import Recipe
from headrace.runner.torch.runner import TorchRunner
from tests.unit.runner.cuda.cuda_rig import cuda_runner
from tests.unit.runner.cuda.late import LateLane, delay
from tests.unit.runner.cuda.scarce import Chance, make_scarce
from tests.unit.runner.torch.model_rig import GREEDY, TensorCheckpoint, ids, model

VOCAB = 160
HOT = SamplingParams(temperature=1.0, seed=5)
# Kinds of requests that leave something behind in their slot, and one after each that must not find it.
KINDS: tuple[SamplingParams, ...] = (
    replace(GREEDY, repetition_penalty=1.8, presence_penalty=1.0),
    GREEDY,
    replace(GREEDY, logit_bias=((17, 30.0),), min_tokens=3),
    replace(HOT, frequency_penalty=2.0, top_p=0.9),
    replace(GREEDY, allowed_ids=(3, 9, 27, 81)),
    HOT,
    replace(GREEDY, min_tokens=4, logit_bias=((0, 50.0),)),
    replace(GREEDY, logprobs=3),
    replace(GREEDY, masked=True),
    replace(HOT, top_k=12, min_p=0.02),
    replace(HOT, masked=True, logprobs=1, repetition_penalty=1.3),
    replace(GREEDY, prompt_logprobs=1),
    replace(GREEDY, stop_ids=tuple(range(0, VOCAB, 5))),
    replace(HOT, logit_bias=((0, 50.0),), min_tokens=2),
)
CONFIG = EngineConfig(
    slots=4, blocks=9, block_size=16, context_len=256, vocab_size=VOCAB, eos_ids=(0,), max_step_tokens=32
)


class Parity:
    """Masks that follow what was said: after k tokens only ids that are k modulo 3 may come."""

    def __init__(self) -> None:
        self._said: dict[int, int] = {}

    def masks(self, rows: Sequence[int], numbers: Sequence[int]) -> Masks:
        bits = np.zeros((len(rows), VOCAB), np.uint8)
        for line, number in enumerate(numbers):
            bits[line, self._said.get(number, 0) % 3 :: 3] = 1
        packed = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        return Masks(np.array(rows, np.int32), packed)

    def advance(self, number: int, token: int) -> None:
        self._said[number] = self._said.get(number, 0) + 1


@dataclass
class Told:
    """What became of a request."""

    tokens: list[int] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    outcome: str = ""


def _run(runner: Runner, requests: list[Request]) -> tuple[dict[str, Told], int]:
    """Every fifth one is aborted after its third token."""
    engine = Engine(CONFIG, runner, Parity())
    names, told, now_s = {}, {}, 0.0
    for request in requests:
        names[engine.submit(request, now_s)] = request.request_id
        told[request.request_id] = Told()
    while not engine.idle:
        frame = engine.turn(now_s)
        now_s += 0.01
        for number, token in zip(frame.numbers.tolist(), frame.tokens.tolist(), strict=True):
            of = told[names[number]]
            of.tokens.append(token)
            if len(of.tokens) == 3 and int(names[number][1:]) % 5 == 4:
                engine.abort(number, now_s)
        if frame.scores is not None:
            entries = (frame.scores.owners, frame.scores.positions, frame.scores.logprobs)
            for number, place, value in zip(*(entry.tolist() for entry in entries), strict=True):
                told[names[number]].scores.append((place, value))
        for ended in frame.ended:
            told[names[ended.number]].outcome = f"{ended.outcome.name} {ended.reason}"
    engine.check()
    return told, engine.num_preemptions


def _requests() -> list[Request]:
    return [
        Request(
            f"r{index}",
            "t",
            ids(5 + 13 * index % 50, seed=index),
            max_tokens=16 + index % 9,
            sampling=replace(KINDS[index % len(KINDS)], seed=index),
            ttft_target_s=1e6,
            queue_timeout_s=1e6,
        )
        for index in range(20)
    ]


@pytest.fixture(scope="module")
def checkpoint() -> TensorCheckpoint:
    return model("llama3")[1]


def _late_runner(checkpoint: TensorCheckpoint, lane: LateLane) -> CudaRunner:
    runner = cuda_runner(CONFIG, checkpoint, lane=lane, keep_logits=False)
    runner.load()
    delay(runner, lane)
    return runner


def test_a_crowd_of_all_kinds_is_told_the_same_by_both_runners(checkpoint: TensorCheckpoint) -> None:
    lane = LateLane()
    late, preempted = _run(_late_runner(checkpoint, lane), _requests())
    calm = TorchRunner(CONFIG, checkpoint, Recipe("fp32"), poison=True)
    calm.load()
    known, _ = _run(calm, _requests())
    # Two steps were put off at once, and somebody had to begin again.
    assert lane.latest >= 8 and preempted
    assert {"FINISHED stop", "FINISHED length", "ABORTED aborted"} <= {of.outcome for of in late.values()}
    for name, of in known.items():
        assert (late[name].outcome, late[name].tokens) == (of.outcome, of.tokens), name
        assert [place for place, _ in late[name].scores] == [place for place, _ in of.scores]
        found, truth = ([value for _, value in scores] for scores in (late[name].scores, of.scores))
        assert np.allclose(found, truth, atol=1e-3)


def test_on_a_card_that_runs_out_of_memory_now_and_then_the_same_is_told(
    checkpoint: TensorCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a step that was: whoever did not fail for it alone has the same tokens, scores and end."""
    some = [replace(request, max_tokens=8) for request in _requests()[: len(KINDS)]]
    chance = Chance(0.0008, seed=0)
    known, _ = _run(_loaded(checkpoint), some)
    with monkeypatch.context() as patch:
        make_scarce(patch, chance)
        scarce, _ = _run(_loaded(checkpoint), some)
    failed = [name for name, of in scarce.items() if "FAILED" in of.outcome]
    assert chance.hits > 5 and len(failed) < 5
    assert {scarce[name].outcome for name in failed} <= {"FAILED out_of_room"}
    for name in known.keys() - failed:
        assert (scarce[name].outcome, scarce[name].tokens) == (known[name].outcome, known[name].tokens), name
        assert [place for place, _ in scarce[name].scores] == [place for place, _ in known[name].scores]
        found, truth = ([value for _, value in of.scores] for of in (scarce[name], known[name]))
        assert np.allclose(found, truth, atol=1e-3)


def _loaded(checkpoint: TensorCheckpoint) -> CudaRunner:
    runner = cuda_runner(CONFIG, checkpoint, keep_logits=False)
    runner.load()
    return runner
