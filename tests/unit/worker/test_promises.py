"""Targets that nobody set are stretched to what a device can do; those that somebody set are kept."""

import pytest
from msgspec.structs import replace

from headrace.core.config import CostProfile, EngineConfig
from headrace.worker.promises import fit_targets

USUAL = EngineConfig().targets
SLOW = CostProfile(c0_s=0.05, c_in_s=0.005)


def test_a_fast_device_keeps_the_usual_targets() -> None:
    assert fit_targets(USUAL, CostProfile()) == USUAL


def test_a_slow_one_may_queue_twenty_prompts_and_tiers_keep_their_ratios() -> None:
    fitted = fit_targets(USUAL, SLOW)
    assert fitted["enterprise"].ttft_s == pytest.approx(20 * (0.05 + 512 * 0.005))
    assert fitted["free"].ttft_s == pytest.approx(5 * fitted["enterprise"].ttft_s)
    assert fitted["free"].itl_s == USUAL["free"].itl_s


def test_what_an_operator_set_is_kept() -> None:
    set_by_hand = {**USUAL, "plus": replace(USUAL["plus"], ttft_s=0.3)}
    assert fit_targets(set_by_hand, SLOW) == set_by_hand
