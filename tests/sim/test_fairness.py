"""Every step's time is shared by weight, in device-seconds: floods, idle tenants, weights, many tenants."""

import numpy as np
import pytest

from headrace.core.config import CostProfile, EngineConfig, TenantConfig
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
    """Keeps `depth` requests of each tenant waiting, so that everyone always wants more."""

    def __init__(self, rig: Rig, sizes: dict[str, tuple[int, int]], depth: int = 24) -> None:
        self.rig = rig
        self.sizes = sizes
        self.open = dict.fromkeys(sizes, 0)
        self.owner: dict[int, str] = {}
        self.depth = depth
        self.count = 0
        self.served: dict[str, float] = dict.fromkeys(sizes, 0.0)

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
                self.open[self.owner[event.number]] -= 1


def _levels(rig: Rig, tenants: list[str]) -> dict[str, float]:
    levels = rig.engine.service_levels()
    return {tenant: levels[tenant] for tenant in tenants}


@pytest.mark.parametrize("depth", [1, 2])
def test_equal_tenants_with_ten_to_one_sizes_get_equal_device_time(depth: int) -> None:
    rig = Rig(fair_config(), depth=depth, checked=False, cells=False)
    backlog = Backlog(rig, {"big": (1000, 200), "small": (100, 20)})
    backlog.run(4000)
    levels = _levels(rig, ["big", "small"])
    assert levels["big"] / levels["small"] == pytest.approx(1.0, rel=0.05)


def test_weights_three_to_one_give_three_to_one() -> None:
    config = fair_config(TenantConfig("heavy", weight=3.0), TenantConfig("light", weight=1.0))
    rig = Rig(config, checked=False, cells=False)
    backlog = Backlog(rig, {"heavy": (200, 60), "light": (300, 40)}, depth=40)
    backlog.run(4000)
    levels = _levels(rig, ["heavy", "light"])
    assert 3.0 * levels["heavy"] / levels["light"] == pytest.approx(3.0, rel=0.05)


def test_a_tenant_that_returns_from_idle_gets_no_credit() -> None:
    rig = Rig(fair_config(), checked=False, cells=False)
    early = Backlog(rig, {"early": (200, 50)})
    early.run(1000)
    before = rig.engine.service_levels()["early"]
    both = Backlog(rig, {"early": (200, 50), "late": (200, 50)})
    both.open["early"] = early.open["early"]
    both.owner.update(early.owner)
    both.count = 10_000
    both.run(2000)
    levels = rig.engine.service_levels()
    gained = {"early": levels["early"] - before, "late": levels["late"] - before}
    assert gained["late"] / gained["early"] == pytest.approx(1.0, rel=0.05)


def test_jain_index_over_fifty_tenants() -> None:
    rng = np.random.default_rng(5)
    sizes = {f"t{i:02}": (int(rng.integers(20, 800)), int(rng.integers(5, 120))) for i in range(50)}
    rig = Rig(fair_config(), checked=False, cells=False)
    Backlog(rig, sizes, depth=3).run(8000)
    got = np.array(list(_levels(rig, list(sizes)).values()))
    jain = got.sum() ** 2 / (len(got) * (got**2).sum())
    assert jain >= 0.95
