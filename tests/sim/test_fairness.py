"""Every step's time is shared by weight, in device-seconds: floods, idle tenants, weights, many tenants."""

import numpy as np
import pytest

from headrace.core.config import CostProfile, EngineConfig, TenantConfig
from headrace.core.errors import Refused
from headrace.core.plan import Plan
from headrace.core.request import Tier
from tests.builders import Rig, engine_config, request

PROFILE = CostProfile(c0_s=5e-3, c_in_s=2e-5, c_out_s=5e-5, c_kv_s=2e-8, c_att_s=1e-10)


def fair_config(*tenants: TenantConfig) -> EngineConfig:
    return engine_config(
        slots=16,
        blocks=16 * 64,
        block_size=16,
        context_len=4096,
        profile=PROFILE,
        tenants=tenants,
        max_queue_s=1e5,
        queue_timeout_s=1e6,
        max_step_tokens=2048,
    )


class Backlog:
    """Keeps `depth` requests of each tenant open, so that everyone always wants more, and measures what each gets.

    Measured from the plans and the device's true costs, not from the scheduler's own accounts.
    """

    def __init__(self, rig: Rig, sizes: dict[str, tuple[int, int]], depth: int = 24) -> None:
        self.rig = rig
        self.sizes = sizes
        self.open = dict.fromkeys(sizes, 0)
        self.owner: dict[int, str] = {}
        self.depth = depth
        self.count = 0
        self.given: dict[str, float] = dict.fromkeys(sizes, 0.0)
        rig.on_plan = self.see

    def see(self, planned: Plan) -> None:
        """Each row's part of the step's real time; the step's fixed time is shared in proportion."""
        ends = (planned.starts + planned.counts).astype(float)
        chunks = planned.counts > 1
        tokens = np.where(chunks, PROFILE.c_in_s * planned.counts, PROFILE.c_out_s)
        rows = tokens + PROFILE.c_kv_s * ends + np.where(chunks, PROFILE.c_att_s * planned.counts * ends, 0.0)
        rows *= (PROFILE.c0_s + rows.sum()) / rows.sum()
        for sequence, seconds in zip(self.rig.engine._flights[-1].sequences, rows.tolist(), strict=True):
            self.given[sequence.request.tenant] += seconds

    def refill(self) -> None:
        for tenant, (length, output) in self.sizes.items():
            while self.open[tenant] < self.depth:
                self.count += 1
                number = self.rig.submit(request(f"{tenant}{self.count}", length, output, tenant=tenant))
                self.owner[number] = tenant
                self.open[tenant] += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.refill()
            for event in self.rig.step().ended:
                if event.number in self.owner:
                    self.open[self.owner[event.number]] -= 1


@pytest.mark.parametrize("depth", [1, 2])
def test_equal_tenants_with_ten_to_one_sizes_get_equal_device_time(depth: int) -> None:
    rig = Rig(fair_config(), depth=depth, checked=False, cells=False)
    backlog = Backlog(rig, {"big": (1000, 200), "small": (100, 20)})
    backlog.run(4000)
    assert backlog.given["big"] / backlog.given["small"] == pytest.approx(1.0, rel=0.05)


def test_weights_three_to_one_give_three_to_one() -> None:
    config = fair_config(TenantConfig("heavy", weight=3.0), TenantConfig("light", weight=1.0))
    rig = Rig(config, checked=False, cells=False)
    backlog = Backlog(rig, {"heavy": (200, 60), "light": (300, 40)}, depth=40)
    backlog.run(4000)
    assert backlog.given["heavy"] / backlog.given["light"] == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("beside", ["nobody", "a tenant at its cap", "a lower tier", "a paused tenant"])
def test_a_tenant_that_returns_from_idle_gets_no_credit(beside: str) -> None:
    """Nor does it take over the low level of somebody who is held back for another reason."""
    rig = Rig(fair_config(TenantConfig("capped", max_slots=1)), checked=False, cells=False)
    sizes = {"early": (200, 50)}
    if beside == "a tenant at its cap":
        sizes["capped"] = (200, 50)
    early = Backlog(rig, sizes)
    if beside == "a lower tier":
        for i in range(50):
            rig.submit(request(f"low{i}", 200, 50, tenant="low", tier=Tier.BATCH))
        early.given["low"] = 0.0
    if beside == "a paused tenant":
        paused = rig.submit(request("paused", 20, 2000, tenant="paused"))
        early.given["paused"] = 0.0
        rig.step()
        rig.engine.pause(paused, rig.now_s)
    early.run(1000)
    both = Backlog(rig, {**sizes, "late": (200, 50)})
    both.given.update(dict.fromkeys(early.given, 0.0))
    both.open.update(early.open)
    both.owner.update(early.owner)
    both.count = 10_000
    both.run(1500)
    assert both.given["late"] / both.given["early"] == pytest.approx(1.0, rel=0.05)


def test_a_tenant_that_was_lightly_active_gets_no_credit() -> None:
    rig = Rig(fair_config(), checked=False, cells=False)
    light = Backlog(rig, {"light": (20, 50), "busy": (200, 50)}, depth=24)
    light.open["light"] = 23
    light.run(1500)
    light.open["light"] -= 23
    light.given.update({"light": 0.0, "busy": 0.0})
    light.run(1500)
    assert light.given["light"] / light.given["busy"] == pytest.approx(1.0, rel=0.1)


def test_jain_index_over_fifty_tenants() -> None:
    rng = np.random.default_rng(5)
    sizes = {f"t{i:02}": (int(rng.integers(20, 800)), int(rng.integers(5, 120))) for i in range(50)}
    rig = Rig(fair_config(), checked=False, cells=False)
    backlog = Backlog(rig, sizes, depth=3)
    backlog.run(8000)
    got = np.array(list(backlog.given.values()))
    assert got.sum() ** 2 / (len(got) * (got**2).sum()) >= 0.95


def test_fresh_tenants_are_served_in_the_order_they_come_and_bounded() -> None:
    """A new tenant for every request, twice what one slot can do: first come, first served, the rest refused."""
    rig = Rig(engine_config(slots=1, max_queue_s=5.0, ageing_s=2.0), cells=False, checked=False)
    refused = 0
    order: list[int] = []
    for i in range(400):
        try:
            order.append(rig.submit(request(f"r{i}", 20, 20, tenant=f"t{i}")))
        except Refused:
            refused += 1
        until_s = rig.now_s + 0.1
        while rig.now_s < until_s and not rig.engine.idle:
            rig.step()
        rig.clock.time_s = max(rig.now_s, until_s)
    rig.run()
    assert refused > 100
    assert max(rig.engine.load().queue_s, 0.0) == 0.0
    started = sorted(order, key=lambda number: rig.token_times[number][0])
    assert started == order
