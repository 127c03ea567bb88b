"""What a noisy neighbour may do to others: floods of long prompts, one very long prompt, endless higher tiers."""

import numpy as np
import pytest

from headrace.core.config import CostProfile, EngineConfig, TenantConfig, TierTargets
from headrace.core.plan import Plan
from headrace.core.request import Tier
from tests.builders import LOOSE, Rig, engine_config, request

PROFILE = CostProfile(c0_s=6e-3, c_in_s=1.5e-5, c_out_s=3e-5, c_kv_s=2e-8, c_att_s=1e-10)
TARGETS = {tier: TierTargets(ttft_s=0.5, itl_s=0.05) for tier in LOOSE}


def large_config(**others: object) -> EngineConfig:
    settings: dict[str, object] = {
        "slots": 32,
        "blocks": 40_000,
        "block_size": 16,
        "context_len": 70_000,
        "profile": PROFILE,
        "targets": TARGETS,
        "max_queue_s": 1e5,
        "queue_timeout_s": 1e6,
    }
    return engine_config(**(settings | others))  # type: ignore[arg-type]


def _quiet_ttfts(*, flood: bool, depth: int = 1) -> tuple[np.ndarray, float, Rig]:
    """TTFTs of a quiet tenant's requests (one a second), with and without a flood beside them."""
    rig = Rig(large_config(), depth=depth, checked=False, cells=False)
    if flood:
        for i in range(100):
            rig.submit(request(f"f{i}", 32_000, 200, tenant="flood", ttft_target_s=1e3))
    arrivals: dict[int, float] = {}
    due_s = 0.5
    idle_s = 0.01
    first_plan = 0
    while len(arrivals) < 60 or not all(rig.token_times[number] for number in arrivals):
        if rig.now_s >= due_s and len(arrivals) < 60:
            first_plan = first_plan if arrivals else max(0, len(rig.plans) - depth)
            number = rig.submit(request(f"q{len(arrivals)}", 300, 50, tenant="quiet"))
            arrivals[number] = due_s
            due_s += 1.0
        before_s = rig.now_s
        rig.step()
        if rig.now_s == before_s:
            rig.clock.time_s = min(due_s, rig.now_s + idle_s) if rig.now_s < due_s else rig.now_s + idle_s
    ttfts = np.array([rig.token_times[number][0] - due for number, due in arrivals.items()])
    # Steps that a quiet request can meet: those since the first one came.
    longest_s = max(planned.predicted_s for planned in rig.plans[first_plan:])
    return ttfts, longest_s, rig


@pytest.mark.parametrize("depth", [1, 2])
def test_a_flood_of_long_prompts_costs_others_one_step(depth: int) -> None:
    alone, _, _ = _quiet_ttfts(flood=False, depth=depth)
    beside, longest_s, rig = _quiet_ttfts(flood=True, depth=depth)
    assert np.percentile(beside, 99) <= 1.1 * np.percentile(alone, 99) + depth * longest_s
    # The flood still gets everything that is idle: steps with parts of its prompts are filled to their time.
    filled = [planned.predicted_s / _allowed_s(planned) for planned in rig.plans if not planned.samples.all()]
    assert np.median(filled) >= 0.95
    assert np.percentile(filled, 10) >= 0.9


def test_no_single_request_pays_more_than_the_step_it_met() -> None:
    alone, _, _ = _quiet_ttfts(flood=False)
    beside, _, rig = _quiet_ttfts(flood=True)
    arrivals = [0.5 + place for place in range(len(beside))]
    ends = np.cumsum([planned.predicted_s for planned in rig.plans])
    # The flood keeps the device busy, so steps follow each other without a gap.
    met = [rig.plans[int(np.searchsorted(ends, arrival_s, side="right"))].predicted_s for arrival_s in arrivals]
    assert all(ttft - alone.max() <= 1.1 * step_s for ttft, step_s in zip(beside, met, strict=True))


def _allowed_s(plan: Plan) -> float:
    """Its target; where somebody decodes in it, 1.9 times what the decode rows take alone, at most."""
    decode = plan.counts == 1
    if not decode.any():
        return plan.budget_s
    decode_s = PROFILE.c0_s + PROFILE.c_out_s * decode.sum() + PROFILE.c_kv_s * (plan.starts[decode] + 1).sum()
    return min(plan.budget_s, 1.9 * float(decode_s))


def _streams(itl_s: float) -> tuple[Rig, list[int]]:
    """32 streams that decode at ease."""
    targets = {tier: TierTargets(ttft_s=0.5, itl_s=itl_s) for tier in LOOSE}
    rig = Rig(large_config(slots=33, targets=targets), checked=False, cells=False)
    made = [request(f"s{i}", 2000, 3000, tenant="chat", ttft_target_s=1e3) for i in range(32)]
    streams = [rig.submit(each) for each in made]
    while not all(len(rig.tokens[number]) > 20 for number in streams):
        rig.step()
    return rig, streams


@pytest.mark.parametrize("target_in_steps", [1.5, 2.0, 4.0, 20.0])
def test_a_64k_prompt_among_32_streams_at_most_doubles_their_steps(target_in_steps: float) -> None:
    probe, streams = _streams(itl_s=0.05)
    steady_s = float(np.median(_inter_token(probe, streams, 300)))
    rig, streams = _streams(itl_s=target_in_steps * steady_s)
    rig.submit(request("long", 64_000, 10, tenant="other"))
    during = _inter_token(rig, streams, 1500)
    assert "long" in {event.request_id for event in rig.ended.values()}
    assert np.percentile(during, 99) <= min(target_in_steps, 2.0) * steady_s
    assert np.percentile(during, 99) > 1.2 * steady_s, "nothing happened"


def test_streams_that_grow_beside_a_long_prompt_are_held_to_what_they_were() -> None:
    """Their contexts, and with them their steps, become longer while it is read: twice is of the first steps."""
    heavy = CostProfile(c0_s=1e-3, c_in_s=1.5e-5, c_out_s=1e-5, c_kv_s=1e-7, c_att_s=3e-10)
    targets = dict.fromkeys(LOOSE, TierTargets(ttft_s=10.0, itl_s=0.05))
    rig = Rig(large_config(slots=33, profile=heavy, targets=targets), checked=False, cells=False)
    made = [request(f"s{i}", 2000, 3000, tenant="chat", ttft_target_s=1e3) for i in range(32)]
    streams = [rig.submit(each) for each in made]
    while not all(len(rig.tokens[number]) > 20 for number in streams):
        rig.step()
    first_s = float(np.median(_inter_token(rig, streams, 10)))
    prompt = rig.submit(request("long", 44_000, 1, tenant="other", ttft_target_s=1e3))
    gaps: list[float] = []
    while prompt not in rig.ended:
        gaps.extend(_inter_token(rig, streams, 50))
    last_s = float(np.median(_inter_token(rig, streams, 10)))
    assert 1.1 * first_s < last_s < 1.27 * first_s
    assert 1.7 * first_s < np.percentile(gaps, 99) <= 1.95 * first_s


def test_parts_of_prompts_are_multiples_of_what_the_runner_says() -> None:
    rig = Rig(large_config(part_tokens=48), checked=False, cells=False)
    rig.submit(request("stream", 20, 300, tenant="chat"))
    rig.step()
    prompt = rig.submit(request("long", 5003, 1, tenant="other", ttft_target_s=1e3))
    while prompt not in rig.ended:
        rig.step()
    parts = [int(count) for plan in rig.plans for count in plan.counts if count > 20]
    assert sum(parts) == 5003 and len(parts) > 3
    assert all(count % 48 == 0 for count in parts[:-1])


def _inter_token(rig: Rig, streams: list[int], steps: int) -> np.ndarray:
    gaps: list[float] = []
    for _ in range(steps):
        rig.step()
    for number in streams:
        gaps.extend(np.diff(rig.token_times[number][-steps:]).tolist())
    return np.array(gaps)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_lowest_tier_waits_no_longer_than_the_ageing_time(depth: int) -> None:
    rig = Rig(large_config(slots=8, ageing_s=3.0), depth=depth, checked=False, cells=False)
    count = 0
    low: dict[int, float] = {}
    while rig.now_s < 40.0:
        while rig.engine.load().waiting < 40:
            count += 1
            high = request(f"h{count}", 100, 20, tenant=f"high{count % 3}", tier=Tier.ENTERPRISE, ttft_target_s=1e3)
            rig.submit(high)
        if rig.now_s >= 5.0 + 1.5 * len(low) and len(low) < 16:
            made = request(f"l{len(low)}", 100, 20, tenant="low", tier=Tier.BATCH, ttft_target_s=1e3)
            low[rig.submit(made)] = rig.now_s
        rig.step()
    waits = [rig.token_times[number][0] - arrival_s for number, arrival_s in low.items() if rig.token_times[number]]
    assert len(waits) == len(low), "somebody starved"
    one_turn_s = 25 * 0.05
    assert max(waits) <= 3.0 + one_turn_s
    assert min(waits) > 1.0, "the higher tier was not ahead: the test shows nothing"


def test_a_long_prompt_of_the_lowest_tier_gets_its_slot_and_its_tokens() -> None:
    """Many chunks, all of them against endless prompts of the highest tier."""
    rig = Rig(large_config(slots=8, ageing_s=2.0), checked=False, cells=False)
    low = rig.submit(request("low", 8000, 5, tenant="low", tier=Tier.BATCH, ttft_target_s=1e3))
    count = 0
    while rig.now_s < 20.0 and not rig.token_times[low]:
        while rig.engine.load().waiting < 40:
            count += 1
            rig.submit(request(f"h{count}", 2000, 20, tenant=f"h{count % 3}", tier=Tier.ENTERPRISE, ttft_target_s=1e3))
        rig.step()
    assert rig.token_times[low], "it got a slot and starved in it"
    assert rig.token_times[low][0] < 10.0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_reserved_tenant_gets_its_slots_within_one_step(depth: int) -> None:
    tenants = [TenantConfig("vip", reserved_slots=4, reserved_blocks=64)]
    rig = Rig(engine_config(slots=8, blocks=400, tenants=tenants), depth=depth)
    for i in range(30):
        rig.submit(request(f"b{i}", 20, 60, tenant="borrower"))
    for _ in range(5):
        rig.step()
    assert rig.engine.load().free_slots == 0, "reserved slots are lent while unused"
    asked = {rig.submit(request(f"v{i}", 20, 10, tenant="vip")) for i in range(4)}
    planned = rig.plan() if depth == 2 else None
    planned = planned or rig.plan()
    assert planned is not None
    assert asked == {start.number for start in planned.begun}
    rig.run()
    rig.assert_true()
