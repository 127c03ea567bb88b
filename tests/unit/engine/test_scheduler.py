"""Plans: who computes how much, when a slot is used again, what a step may take and who pays."""

import numpy as np
import pytest

from headrace.core.config import CostProfile, TenantConfig, TierTargets
from headrace.core.plan import Plan, measure_work
from headrace.core.request import SamplingParams, Tier
from tests.builders import LOOSE, Rig, engine_config, request

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def begun(rig: Rig, number: int) -> int:
    """Step in which the sequence first started."""
    return next(plan.step for plan in rig.plans for start in plan.begun if start.number == number)


def rows_of(plan: Plan) -> list[tuple[int, int, int]]:
    return list(zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True))


def planned_tokens(plan: Plan) -> int:
    return int(plan.counts.sum())


def with_targets(ttft_s: float, itl_s: float) -> dict[str, TierTargets]:
    return LOOSE | {"plus": TierTargets(ttft_s, itl_s)}


@DEPTHS
def test_a_slot_freed_by_length_is_used_in_the_next_plan(depth: int) -> None:
    rig = Rig(engine_config(slots=1), depth=depth)
    rig.submit(request("x", max_tokens=3))
    heir = rig.submit(request("y", max_tokens=3))
    rig.run()
    assert begun(rig, heir) == 3
    rig.assert_true()


@DEPTHS
def test_a_slot_freed_by_a_stop_token_is_used_as_soon_as_it_is_known(depth: int) -> None:
    """The stop token comes of step 2: step 3 at depth 1, step 4 at depth 2."""
    rig = Rig(engine_config(slots=1), depth=depth)
    rig.submit(request("x", max_tokens=10), output=3)
    heir = rig.submit(request("y", max_tokens=3))
    rig.run()
    assert begun(rig, heir) == 2 + depth
    rig.assert_true()


@DEPTHS
def test_the_work_that_a_plan_tells_is_that_of_its_rows(depth: int) -> None:
    """Alone and mixed: decode rows, whole prompts, parts of one, and a prompt of one token."""
    rig = Rig(engine_config(slots=4, max_step_tokens=16), depth=depth)
    for index, length in enumerate((5, 1, 40, 3, 1, 20)):
        rig.submit(request(f"r{index}", length=length, max_tokens=6))
    rig.run()
    assert any(plan.work.prefill_tokens and plan.work.decode_rows for plan in rig.plans)
    assert all(plan.work == measure_work(plan.starts, plan.counts) for plan in rig.plans)
    rig.assert_true()


@DEPTHS
def test_a_foreseen_end_wastes_no_row(depth: int) -> None:
    rig = Rig(engine_config(slots=1), depth=depth)
    rig.submit(request("x", length=8, max_tokens=5))
    rig.run()
    assert [planned_tokens(plan) for plan in rig.plans] == [8, 1, 1, 1, 1]


@DEPTHS
def test_an_unforeseen_end_wastes_one_row_at_depth_2_and_none_at_depth_1(depth: int) -> None:
    rig = Rig(engine_config(slots=1), depth=depth)
    rig.submit(request("x", length=8, max_tokens=50), output=5)
    rig.run()
    assert [planned_tokens(plan) for plan in rig.plans] == [8, 1, 1, 1, 1] + [1] * (depth - 1)


@DEPTHS
def test_short_ones_end_in_their_own_five_steps_beside_a_long_one(depth: int) -> None:
    rig = Rig(engine_config(slots=8, blocks=256), depth=depth)
    long = rig.submit(request("long", max_tokens=100))
    shorts = [rig.submit(request(f"s{index}", max_tokens=5)) for index in range(31)]
    rig.run()
    steps_s = rig.token_times[long]
    for number in shorts:
        first = steps_s.index(rig.token_times[number][0])
        assert rig.token_times[number] == steps_s[first : first + 5]
    rig.assert_true()


def test_every_decode_row_is_in_every_plan() -> None:
    rig = Rig(engine_config(slots=4))
    for name in "wxyz":
        rig.submit(request(name, max_tokens=20))
    rig.run()
    assert [len(plan.slots) for plan in rig.plans] == [4] * 20


@pytest.mark.parametrize("most", [4, 5, 7, 64])
@DEPTHS
def test_a_prompt_is_computed_in_chunks_without_gap_or_overlap(most: int, depth: int) -> None:
    rig = Rig(engine_config(slots=4, max_step_tokens=most), depth=depth)
    rig.submit(request("x", length=50, max_tokens=5))
    rig.run()
    position = 0
    for plan in rig.plans:
        ((_, start, count),) = rows_of(plan)
        assert start == position and count <= most
        assert plan.samples.tolist() == [start + count >= 50]
        position += count
    assert position == 54
    rig.assert_true()


def test_a_plan_holds_at_most_the_tokens_a_runner_can_take() -> None:
    rig = Rig(engine_config(slots=8, blocks=256, max_step_tokens=16))
    for index in range(16):
        rig.submit(request(f"r{index}", length=5 * index + 1, max_tokens=9))
    rig.run()
    assert max(planned_tokens(plan) for plan in rig.plans) == 16
    rig.assert_true()


def test_what_decodes_keeps_its_target_while_a_long_prompt_is_computed() -> None:
    targets = with_targets(ttft_s=100.0, itl_s=0.03)
    rig = Rig(engine_config(slots=8, blocks=1024, context_len=4096, targets=targets))
    streams = [rig.submit(request(f"s{index}", max_tokens=200)) for index in range(4)]
    rig.step()
    rig.submit(request("long", length=3000, max_tokens=4))
    rig.run()
    gaps = [np.diff(rig.token_times[number]).max() for number in streams]
    assert max(gaps) <= 0.03 * 1.001
    assert max(planned_tokens(plan) for plan in rig.plans) > 500
    rig.assert_true()


def test_a_newcomer_waits_for_a_fifth_of_its_target_at_most() -> None:
    targets = with_targets(ttft_s=0.2, itl_s=100.0)
    rig = Rig(engine_config(slots=8, blocks=1024, context_len=4096, targets=targets))
    rig.submit(request("long", length=4000, max_tokens=4))
    rig.run()
    assert max(plan.predicted_s for plan in rig.plans) <= 0.2 / 5 * 1.001
    assert len(rig.plans) > 4


def test_a_tenant_that_comes_with_a_flood_of_another_is_in_the_next_step() -> None:
    """Neither has been charged for the other's company yet: the flood must not take the whole step for that."""
    rig = Rig(engine_config(slots=32, blocks=1024, context_len=512, max_step_tokens=512))
    rig.submit(request("before", length=4, max_tokens=20, tenant="quiet"))
    rig.step()
    for index in range(10):
        rig.submit(request(f"flood{index}", length=128, max_tokens=20, tenant="flood"))
    quiet = rig.submit(request("quiet", length=4, tenant="quiet"))
    rig.step()
    assert rig.token_times[quiet], "it waited for a step of the flood alone"
    assert planned_tokens(rig.plans[-1]) > 256, "and the flood has the rest of the step"
    rig.run()
    rig.assert_true()


def test_the_shortest_target_served_counts_and_for_a_minute_after() -> None:
    targets = LOOSE | {"plus": TierTargets(ttft_s=0.15, itl_s=1e3)}
    rig = Rig(engine_config(slots=8, blocks=2048, context_len=8192, max_step_tokens=8192, targets=targets))
    hasty = rig.submit(request("hasty", max_tokens=2))
    rig.submit(request("long", length=8000, max_tokens=4, tier=Tier.BATCH))
    while hasty not in rig.ended:
        planned = rig.plan()
        assert planned is None or planned.predicted_s <= 0.03 * 1.001
        rig.step()
    planned = rig.plan()
    assert planned is not None and planned.predicted_s <= 0.03 * 1.001, "another hasty one may come"
    rig.step()
    rig.clock.time_s += 61.0
    planned = rig.plan()
    assert planned is not None and planned.predicted_s > 0.03


def test_no_plan_is_predicted_above_the_longest_step() -> None:
    costs = CostProfile(c0_s=0.01, c_in_s=1e-2, c_out_s=1e-2, c_kv_s=1e-4, c_att_s=1e-6)
    rig = Rig(engine_config(slots=8, blocks=256, profile=costs, max_step_s=0.2))
    for index in range(8):
        rig.submit(request(f"r{index}", length=100, max_tokens=10))
    rig.run()
    assert max(plan.predicted_s for plan in rig.plans) <= 0.2 * 1.001
    rig.assert_true()


def test_decode_rows_that_do_not_fit_one_step_take_turns() -> None:
    costs = CostProfile(c0_s=0.01, c_in_s=1e-5, c_out_s=0.05, c_kv_s=0.0, c_att_s=0.0)
    rig = Rig(engine_config(slots=8, profile=costs, max_step_s=0.2))
    numbers = [rig.submit(request(f"r{index}", max_tokens=30)) for index in range(8)]
    while min(len(rig.tokens[number]) for number in numbers) < 12:
        rig.step()
    assert max(len(plan.slots) for plan in rig.plans if plan.work.prefill_tokens == 0) == 3
    assert max(len(rig.tokens[number]) for number in numbers) <= 18
    rig.run()
    rig.assert_true()


def test_prefill_does_not_starve_beside_decode_rows_that_miss_their_target() -> None:
    costs = CostProfile(c0_s=0.01, c_in_s=1e-4, c_out_s=0.02, c_kv_s=0.0, c_att_s=0.0)
    rig = Rig(engine_config(slots=8, profile=costs, targets=with_targets(100.0, 0.03)))
    for index in range(6):
        rig.submit(request(f"s{index}", max_tokens=60))
    for _ in range(8):
        rig.step()
    number = rig.submit(request("late", length=40, max_tokens=2))
    for _ in range(12):
        rig.step()
    assert rig.tokens[number]


def test_the_higher_tier_starts_first() -> None:
    rig = Rig(engine_config(slots=1))
    low = rig.submit(request("low", tier=Tier.BATCH))
    high = rig.submit(request("high", tier=Tier.ENTERPRISE))
    rig.run()
    assert begun(rig, high) < begun(rig, low)


def test_age_overcomes_tier() -> None:
    rig = Rig(engine_config(slots=1, ageing_s=1.0))
    low = rig.submit(request("low", tier=Tier.BATCH, tenant="b"))
    started_s = None
    for index in range(200):
        rig.submit(request(f"high{index}", tier=Tier.ENTERPRISE, max_tokens=2))
        rig.step()
        if started_s is None and any(start.number == low for start in rig.plans[-1].begun):
            started_s = rig.now_s
    assert started_s is not None and 1.0 <= started_s <= 1.2


def test_tenants_take_turns_whatever_their_numbers() -> None:
    rig = Rig(engine_config(slots=1))
    for index in range(20):
        rig.submit(request(f"a{index}", tenant="a", max_tokens=2))
    for index in range(5):
        rig.submit(request(f"b{index}", tenant="b", max_tokens=2))
    rig.run()
    starts = [rig.requests[start.number].tenant for plan in rig.plans for start in plan.begun]
    assert starts[:10].count("b") == 5


def test_a_tenant_pays_for_the_whole_step_it_runs_alone() -> None:
    rig = Rig()
    rig.submit(request("x", max_tokens=30))
    rig.run()
    assert rig.engine.service_levels()["a"] == pytest.approx(sum(plan.predicted_s for plan in rig.plans))


def test_what_is_charged_is_what_was_planned_however_many_share_a_step() -> None:
    tenants = [TenantConfig(name, weight=weight) for name, weight in (("a", 1.0), ("b", 2.0), ("c", 5.0))]
    rig = Rig(engine_config(slots=3, tenants=tenants, max_step_tokens=16))
    for name in "abc":
        rig.submit(request(name, length=20 * "abc".index(name) + 8, max_tokens=30, tenant=name))
    rig.run()
    levels = rig.engine.service_levels()
    paid_s = levels["a"] + 2.0 * levels["b"] + 5.0 * levels["c"]
    assert paid_s == pytest.approx(sum(plan.predicted_s for plan in rig.plans))


@pytest.mark.parametrize("paused", [False, True])
def test_recomputation_is_charged_to_the_client_that_paused_and_to_no_other(paused: bool) -> None:
    rig = Rig(engine_config(slots=1))
    number = rig.submit(request("x", length=40, max_tokens=20))
    for _ in range(5):
        rig.step()
    before = rig.engine.service_levels()["a"]
    if paused:
        rig.engine.pause(number, rig.now_s)
        rig.engine.resume(number, rig.now_s)
    else:
        state = rig.engine._state
        state.preempt(state.live[number], rig.now_s)
    again = rig.plan()
    assert again is not None and planned_tokens(again) == 45
    charged_s = rig.engine.service_levels()["a"] - before
    assert charged_s == pytest.approx(again.predicted_s) if paused else charged_s < 0.05 * again.predicted_s


def test_service_elsewhere_counts_here() -> None:
    rig = Rig(engine_config(slots=1))
    first = rig.submit(request("x", tenant="a"))
    second = rig.submit(request("y", tenant="b"))
    rig.engine.observe_service("a", 1.0)
    rig.run()
    assert begun(rig, second) < begun(rig, first)


def test_a_prefill_that_gets_no_part_of_a_step_waits_for_others() -> None:
    rig = Rig(engine_config(slots=2, max_step_tokens=12, blocks=128))
    starved = rig.submit(request("low", length=30, max_tokens=2, tier=Tier.BATCH))
    rig.step()
    favoured = rig.submit(request("high", length=60, max_tokens=2, tier=Tier.ENTERPRISE))
    rig.run()
    waits = rig.ended[starved].waits
    assert waits.prefill_others_s >= 0.04 and waits.prefill_s > 0.0
    assert rig.ended[favoured].waits.prefill_others_s == 0.0


def test_masked_rows_are_named_only_where_they_sample() -> None:
    rig = Rig(engine_config(slots=2, max_step_tokens=10))
    rig.submit(request("plain", length=4, max_tokens=6))
    rig.submit(request("masked", length=15, max_tokens=2, sampling=SamplingParams(masked=True)))
    masked = []
    for _ in range(3):
        planned = rig.plan()
        assert planned is not None
        masked.append([(int(planned.starts[row]), int(planned.counts[row])) for row in planned.masked_rows])
        rig.step()
    assert masked == [[], [(6, 9)], []]


def test_an_idle_engine_plans_nothing() -> None:
    rig = Rig()
    assert rig.plan() is None
    rig.submit(request("x", max_tokens=1))
    rig.run()
    assert rig.plan() is None and len(rig.plans) == 1
