"""Random worlds: whatever the sizes, limits, clients and trouble, every stream is right and nothing is left over."""

import random
from typing import Literal

import pytest

from headrace.core.config import EngineConfig
from headrace.sim.arrivals import Arrivals, Bursty, Poisson, Together
from headrace.sim.report import summarise
from headrace.sim.scenario import (
    Cancels,
    Drift,
    Happening,
    Prefix,
    Readers,
    Retries,
    Scenario,
    SlowReaders,
    SlowWorker,
    TenantLoad,
    WorkerDeath,
    check_scenario,
)
from headrace.sim.world import World

pytestmark = pytest.mark.sim

TIERS: tuple[Literal["batch", "free", "plus", "enterprise"], ...] = ("batch", "free", "plus", "enterprise")


def random_tenant(luck: random.Random, name: str, engine: EngineConfig) -> TenantLoad:
    arrivals: list[Arrivals] = [
        Poisson(luck.choice([20.0, 100.0, 400.0])),
        Together(luck.randint(5, 60)),
        Bursty(300.0, 1.0, on_s=0.1, off_s=0.2),
    ]
    return TenantLoad(
        name=name,
        arrivals=luck.choice(arrivals),
        prompt=f"uniform:1:{luck.choice([10, 60])}",
        output=f"uniform:1:{luck.choice([5, 30, 60])}",
        requests=luck.randint(10, 60),
        tier=luck.choice(TIERS),
        weight=luck.choice([1.0, 3.0]),
        max_slots=luck.choice([None, 2, 3]),
        max_blocks=luck.choice([None, engine.blocks // 3]),
        reserved_slots=luck.choice([0, 0, engine.slots // 4]),
        reserved_blocks=luck.choice([0, 0, engine.blocks // 8]),
        admission=luck.choice(["elastic", "elastic", "guaranteed"]),
        stop_share=luck.choice([0.0, 0.5, 1.0]),
        max_tokens=luck.choice([None, 60]),
        prefix=luck.choice([None, Prefix(luck.choice([5, 32]), groups=luck.choice([1, 3]), share=0.7)]),
        cancels=luck.choice([None, Cancels(0.2, after_s=0.05), Cancels(0.3, after_tokens="uniform:1:20")]),
        slow_readers=luck.choice([None, SlowReaders(0.3, luck.choice([0.0, 20.0, 100.0]))]),
        ttft_target_s=luck.choice([None, 100.0, 0.05]),
        itl_target_s=luck.choice([None, 0.02]),
        queue_timeout_s=luck.choice([None, None, 0.3]),
        deadline_s=luck.choice([None, None, None, 1.0]),
    )


def random_scenario(seed: int) -> Scenario:
    luck = random.Random(seed)
    slots, block_size, context_len = luck.choice([1, 2, 4, 8]), luck.choice([4, 16]), luck.choice([128, 512])
    engine = EngineConfig(
        slots=slots,
        # From just enough for one sequence to twice that.
        blocks=context_len // block_size * luck.choice([1, 2]) + luck.randint(0, 9),
        block_size=block_size,
        context_len=context_len,
        vocab_size=300,
        max_step_tokens=max(slots, luck.choice([8, 64, 1024])),
        max_queue_s=luck.choice([0.2, 30.0]),
        ageing_s=luck.choice([0.1, 10.0]),
        prefix_cache=luck.random() < 0.8,
    )
    workers = luck.choice([1, 2, 3])
    happenings: list[Happening] = [
        WorkerDeath(luck.uniform(0.0, 1.0), luck.randrange(workers), restart_s=luck.choice([0.05, 0.5]))
        for _ in range(luck.choice([0, 1, 3]))
    ]
    happenings += luck.choice([[], [SlowWorker(0.1, 5.0, until_s=0.5), Drift(0.2, 2.0)]])
    return Scenario(
        seed=seed,
        workers=workers,
        depth=luck.choice([1, 2, 3]),
        host_s=luck.choice([0.0, 0.002]),
        engine=engine,
        tenants=tuple(random_tenant(luck, f"t{index}", engine) for index in range(luck.randint(1, 4))),
        happenings=tuple(happenings),
        readers=Readers(luck.choice([1, 8, 20]), limit_s=luck.choice([0.2, 3.0])),
        retries=Retries(luck.choice([0.0, 0.8])),
    )


@pytest.mark.parametrize("seed", range(16))
def test_every_stream_is_right_and_equal_seeds_agree(seed: int) -> None:
    scenario = random_scenario(seed)
    check_scenario(scenario)
    world = World(scenario, detail=True)
    world.run()
    assert world.verify() == len(world.book.streams)
    assert len(world.book.records) == world.book.num_arrived
    again = World(scenario)
    again.run()
    assert summarise(again, 1.0).trace_hash == summarise(world, 1.0).trace_hash
