"""The profile measured before any request: right, and without a trace in slots or blocks."""

import pytest

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.plan import Plan, Work
from headrace.engine.cost import CostModel
from headrace.runner.fake import FakeRunner
from headrace.worker.warmup import CARD_SCENES, SCENES, Scenes, measure_profile
from tests.builders import Rig, request

SLOW = CostProfile(c0_s=0.01, c_in_s=1.5e-3, c_out_s=2e-3, c_kv_s=3e-6, c_att_s=4e-7)
CONFIG = EngineConfig(slots=32, blocks=600, block_size=16, context_len=2048, vocab_size=1000, max_step_tokens=512)


BOTH = pytest.mark.parametrize("scenes", [SCENES, CARD_SCENES], ids=["processor", "card"])


@BOTH
def test_a_device_unlike_the_assumed_one_is_measured_within_a_hundredth(scenes: Scenes) -> None:
    measured = measure_profile(FakeRunner(CONFIG, profile=SLOW), CONFIG, scenes)
    assert measured.coefficients() == pytest.approx(SLOW.coefficients(), rel=0.01)


@BOTH
@pytest.mark.parametrize(("slots", "blocks", "context"), [(1, 1, 16), (2, 3, 40), (40, 40, 16), (3, 500, 700)])
def test_an_engine_too_small_for_most_steps_is_still_measured(
    slots: int, blocks: int, context: int, scenes: Scenes
) -> None:
    config = EngineConfig(
        slots=slots, blocks=blocks, block_size=16, context_len=context, vocab_size=100, max_step_tokens=40
    )
    measured = measure_profile(FakeRunner(config, profile=SLOW), config, scenes)
    assert min(measured.coefficients()) >= 0.0
    assert measured.c0_s + measured.c_out_s > 0.0


@BOTH
def test_an_engine_after_the_warm_up_says_what_it_must(scenes: Scenes) -> None:
    rig = Rig(CONFIG)
    measure_profile(rig.runner, CONFIG, scenes)
    for name in "xyz":
        rig.submit(request(name, 40, 20))
    rig.run()
    rig.assert_true()


@BOTH
def test_contexts_are_computed_in_steps_the_runner_can_take(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(slots=8, blocks=200, block_size=16, context_len=512, vocab_size=100, max_step_tokens=64)
    runner = FakeRunner(config, profile=SLOW)
    launch, sizes = runner.launch, []

    def launch_and_note(plan: Plan) -> None:
        sizes.append(int(plan.counts.sum()))
        launch(plan)

    monkeypatch.setattr(runner, "launch", launch_and_note)
    measure_profile(runner, config, scenes)
    assert 0 < max(sizes) <= 64


ALONE = [Work(16, 0, 16, 256), *(Work(0, 1, 17 + step, 0) for step in range(7))]


def test_one_row_that_was_seen_to_decode_does_not_do_so_beside_more(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner(CONFIG, profile=SLOW)
    launch, decodes = runner.launch, []

    def launch_and_note(plan: Plan) -> None:
        if plan.work.decode_rows:
            decodes.append(plan.work.decode_rows)
        launch(plan)

    monkeypatch.setattr(runner, "launch", launch_and_note)
    measured = measure_profile(runner, CONFIG, SCENES, [(work, CostModel(SLOW).predict(work)) for work in ALONE])
    assert decodes == [1, 1, 8, 8, 32, 32, 32]
    assert measured.coefficients() == pytest.approx(SLOW.coefficients(), rel=0.01)
    decodes.clear()
    measure_profile(runner, CONFIG, SCENES, [(ALONE[0], 1.0)])
    assert decodes == [1, 1, 8, 8, 1, 1, 32, 32, 32, 1, 1]


def test_of_steps_seen_that_did_the_same_the_quickest_counts() -> None:
    cost = CostModel(SLOW)
    seen = [(work, factor * cost.predict(work)) for factor in (3.0, 1.0, 2.0) for work in ALONE]
    measured = measure_profile(FakeRunner(CONFIG, profile=SLOW), CONFIG, SCENES, seen)
    assert measured.coefficients() == pytest.approx(SLOW.coefficients(), rel=0.01)
    slow = [(work, 2.0 * cost.predict(work)) for work in ALONE]
    measured = measure_profile(FakeRunner(CONFIG, profile=SLOW), CONFIG, SCENES, slow)
    assert CostModel(measured).predict(ALONE[1]) > 1.2 * cost.predict(ALONE[1])
