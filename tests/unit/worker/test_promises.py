"""Targets that nobody set are stretched to what a device can do; those that somebody set are kept."""

import pytest
from msgspec.structs import replace

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.request import Tier
from headrace.worker.promises import fit_targets
from tests.builders import Rig, engine_config, request

USUAL = EngineConfig().targets
SLOW = CostProfile(c0_s=0.05, c_in_s=0.005, c_out_s=0.006, c_kv_s=1e-4)


def test_a_fast_device_keeps_the_usual_targets() -> None:
    assert fit_targets(USUAL, CostProfile(), 32) == USUAL


def test_a_slow_one_may_queue_twenty_prompts_and_tiers_keep_their_ratios() -> None:
    fitted = fit_targets(USUAL, SLOW, 32)
    assert fitted["enterprise"].ttft_s == pytest.approx(20 * (0.05 + 512 * 0.005))
    assert fitted["free"].ttft_s == pytest.approx(5 * fitted["enterprise"].ttft_s)


def test_half_of_its_slots_and_a_short_prompt_may_take_a_step_together() -> None:
    fitted = fit_targets(USUAL, SLOW, 32)
    prompt_s = 64 * 0.005
    assert fitted["enterprise"].itl_s == pytest.approx(0.05 + 16 * (0.006 + 128 * 1e-4) + prompt_s)
    assert fitted["plus"].itl_s == pytest.approx(1.5 * fitted["enterprise"].itl_s)
    assert fit_targets(USUAL, SLOW, 1)["enterprise"].itl_s == pytest.approx(0.05 + 0.006 + 128 * 1e-4 + prompt_s)


def test_a_short_prompt_is_computed_in_one_step_beside_a_few_who_decode() -> None:
    config = engine_config(slots=32, blocks=256, block_size=16, profile=SLOW, targets=fit_targets(USUAL, SLOW, 32))
    rig = Rig(config)
    for name in "abcd":
        rig.submit(request(name, 60, 60, tier=Tier.ENTERPRISE))
    while any(len(tokens) < 2 for tokens in rig.tokens.values()):
        rig.step()
    rig.submit(request("newcomer", 60, 60, tier=Tier.ENTERPRISE))
    rig.step()
    assert rig.plans[-1].counts.tolist() == [1, 1, 1, 1, 60]


def test_what_an_operator_set_is_kept() -> None:
    set_by_hand = {**USUAL, "plus": replace(USUAL["plus"], ttft_s=0.3)}
    assert fit_targets(set_by_hand, SLOW, 32) == set_by_hand
