"""The planner against the simulator: the same profile, mix and targets must give the same service."""

from typing import NamedTuple

import pytest

from headrace.core.config import CostProfile, EngineConfig, TierTargets
from headrace.sim.arrivals import Arrivals, Poisson, Together
from headrace.sim.lengths import parse_lengths
from headrace.sim.mix import single_mix
from headrace.sim.profile import ReplicaProfile, Targets
from headrace.sim.report import Summary, summarise
from headrace.sim.scenario import Scenario, TenantLoad, check_scenario
from headrace.sim.steady import SteadyModel
from headrace.sim.world import World

pytestmark = pytest.mark.sim

WITHIN = 0.15
AGES_S = 1e6


class Case(NamedTuple):
    prompt: str
    output: str
    slots: int
    blocks: int
    itl_s: float
    limit: str


CASES = {
    "chat": Case("lognormal:120:0.8:10:2000", "lognormal:60:1.0:5:500", 32, 4096, 0.075, "slots"),
    "documents": Case("lognormal:3000:0.7:500:7000", "lognormal:30:0.6:5:200", 32, 20_000, 0.03, "itl"),
    "bimodal": Case(
        "mix:0.8*lognormal:100:0.5:10:500+0.2*uniform:1000:3000",
        "mix:0.7*uniform:5:30+0.3*lognormal:200:0.4:50:500",
        64,
        1250,
        0.1,
        "kv",
    ),
}


def predict(case: Case) -> SteadyModel:
    mix = single_mix(parse_lengths(case.prompt, "prompt"), parse_lengths(case.output, "output"))
    return SteadyModel(ReplicaProfile(CostProfile(), case.slots, case.blocks * 16), mix, Targets(itl_s=case.itl_s))


def simulate(case: Case, arrivals: Arrivals, requests: int) -> Summary:
    """One worker that refuses nobody: a queue without bound and a TTFT target without meaning."""
    tenant = TenantLoad("a", arrivals, case.prompt, case.output, ttft_target_s=AGES_S, itl_target_s=case.itl_s)
    engine = EngineConfig(
        slots=case.slots,
        blocks=case.blocks,
        max_queue_s=AGES_S,
        queue_timeout_s=AGES_S,
        prefix_cache=False,
        targets=dict.fromkeys(("enterprise", "plus", "free", "batch"), TierTargets(AGES_S, case.itl_s)),
    )
    scenario = Scenario(seed=4, requests=requests, engine=engine, tenants=(tenant,))
    check_scenario(scenario)
    world = World(scenario, detail=False)
    world.run()
    summary = summarise(world, wall_s=1.0)
    assert summary.requests.finished == requests
    return summary


@pytest.mark.parametrize("name", CASES)
def test_saturated_throughput_is_as_planned(name: str) -> None:
    case = CASES[name]
    planned = predict(case).saturate()
    seen = simulate(case, Together(count=800), 800)
    assert planned.limit == case.limit
    assert planned.at.rate_per_s == pytest.approx(800 / seen.virtual_s, rel=WITHIN)
    assert planned.at.itl_s == pytest.approx(seen.itl_s.mean, rel=WITHIN)


@pytest.mark.parametrize("name", CASES)
def test_batch_and_step_below_saturation_are_as_planned(name: str) -> None:
    case = CASES[name]
    model = predict(case)
    seen = simulate(case, Poisson(0.7 * model.saturate().at.rate_per_s), 600)
    planned = model.operate(600 / seen.virtual_s)
    assert planned is not None
    assert planned.step_s == pytest.approx(seen.virtual_s * seen.utilisation / seen.steps, rel=WITHIN)
    # Every token but a request's first takes one decode row of one step.
    assert planned.decode_rows == pytest.approx((seen.output_tokens - 600) / seen.steps, rel=WITHIN)
