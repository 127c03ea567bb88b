"""The profile measured before any request: right, and without a trace in slots or blocks."""

import pytest

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.plan import Plan
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
