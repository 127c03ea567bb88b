"""Prints the figures behind the engine's promises: the same small worlds as tests/sim, measured instead of judged.

Run from the repository's root: .venv/bin/python benchmarks/promises.py
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headrace.core.config import TenantConfig
from tests.builders import Rig, request
from tests.sim import test_cost_model, test_fairness, test_fuzz, test_memory, test_neighbours, test_overload
from tests.sim.test_straggler import _shorts_beside


def say(what: str, figure: str) -> None:
    print(f"{what:<72} {figure}", flush=True)


def straggler() -> None:
    for depth in (1, 2):
        p99 = {}
        for length in (50, 500, 5000):
            steps, ends = _shorts_beside(length, depth)
            p99[length] = 1e3 * float(np.percentile(ends, 99))
        say(f"straggler, depth {depth}: steps of a five-token reply", f"{min(steps)} to {max(steps)}")
        say(
            f"straggler, depth {depth}: short p99 in ms at 50 / 500 / 5,000",
            " / ".join(f"{v:.2f}" for v in p99.values()),
        )


def fairness() -> None:
    rig = Rig(test_fairness.fair_config(), checked=False, cells=False)
    backlog = test_fairness.Backlog(rig, {"big": (1000, 200), "small": (100, 20)})
    backlog.run(4000)
    say("device time, equal tenants, sizes 10:1", f"{backlog.given['big'] / backlog.given['small']:.3f}")
    config = test_fairness.fair_config(TenantConfig("heavy", weight=3.0), TenantConfig("light", weight=1.0))
    rig = Rig(config, checked=False, cells=False)
    backlog = test_fairness.Backlog(rig, {"heavy": (200, 60), "light": (300, 40)}, depth=40)
    backlog.run(4000)
    say("device time, weights 3:1", f"{backlog.given['heavy'] / backlog.given['light']:.3f}")
    rng = np.random.default_rng(5)
    sizes = {f"t{i:02}": (int(rng.integers(20, 800)), int(rng.integers(5, 120))) for i in range(50)}
    rig = Rig(test_fairness.fair_config(), checked=False, cells=False)
    backlog = test_fairness.Backlog(rig, sizes, depth=3)
    backlog.run(8000)
    got = np.array(list(backlog.given.values()))
    say("Jain index of device time, 50 tenants", f"{got.sum() ** 2 / (len(got) * (got**2).sum()):.4f}")


def neighbours() -> None:
    for depth in (1, 2):
        alone, _, _ = test_neighbours._quiet_ttfts(flood=False, depth=depth)
        beside, longest_s, _ = test_neighbours._quiet_ttfts(flood=True, depth=depth)
        figures = f"{1e3 * np.percentile(alone, 99):.1f} -> {1e3 * np.percentile(beside, 99):.1f} ms"
        say(
            f"100 x 32k flood, depth {depth}: quiet tenant's p99 TTFT",
            f"{figures}; longest step {1e3 * longest_s:.0f} ms",
        )
    probe, streams = test_neighbours._streams(itl_s=0.05)
    steady_s = float(np.median(test_neighbours._inter_token(probe, streams, 300)))
    rig, streams = test_neighbours._streams(itl_s=2.0 * steady_s)
    rig.submit(request("long", 64_000, 10, tenant="other"))
    p99_s = float(np.percentile(test_neighbours._inter_token(rig, streams, 1500), 99))
    say(
        "64k prompt among 32 streams: p99 inter-token time",
        f"{p99_s / steady_s:.2f}x of steady {1e3 * steady_s:.1f} ms",
    )


def cost_model() -> None:
    traffic = test_cost_model.Traffic(seed=3)
    traffic.run(600)
    say(
        "cost model: p90 error over 500 steps, 64k prompts among them",
        f"{100 * np.percentile(traffic.run(500), 90):.1f} %",
    )
    traffic = test_cost_model.Traffic(seed=4)
    traffic.run(600)
    traffic.rig.runner.speed = 1.8
    traffic.run(500)
    say("cost model: p90 error, 500 steps after a drift of 1.8x", f"{100 * np.percentile(traffic.run(200), 90):.1f} %")


def memory() -> None:
    rigs = [test_memory._crowd(depth, seed) for depth in (1, 2) for seed in range(3)]
    most = max(event.preemptions for rig in rigs for event in rig.ended.values())
    recomputed = sum(event.counters.recomputed for rig in rigs for event in rig.ended.values())
    total = sum(rig.engine.num_preemptions for rig in rigs)
    say("KV short 4x, 360 sequences: finished", str(sum(len(rig.ended) for rig in rigs)))
    say("KV short 4x: preemptions, most of one sequence, recomputed tokens", f"{total}, {most}, {recomputed}")


def overload() -> None:
    peak, rate_per_s = test_overload._peak()
    rig = Rig(test_overload._config(), checked=False, cells=False)
    traffic = test_overload.Traffic(rig, seed=2)
    traffic.run(20.0, 10.0)
    traffic.run(5.0 * rate_per_s, 70.0)
    during = traffic.goodput(15.0, 70.0)
    say("overload 5x for 60 s: goodput of peak", f"{during:.0f} of {peak:.0f} tokens/s = {100 * during / peak:.1f} %")
    retries = traffic.retries
    say("overload: refusals, their retry times", f"{len(retries)}, {min(retries):.2f} to {max(retries):.2f} s")
    say(
        "overload: most seconds of work queued",
        f"{max(traffic.queue_s):.2f} s (TTFT target {test_overload.TTFT_S:g} s)",
    )
    before = len(retries)
    last_s = rig.now_s
    while rig.now_s < 95.0:
        traffic.run(20.0, rig.now_s + 0.25)
        if len(retries) > before:
            before, last_s = len(retries), rig.now_s
    say("overload: last refusal after its end", f"{last_s - 70.0:.2f} s")


def fuzz() -> None:
    operations = preemptions = 0
    for depth in (1, 2):
        for seed in range(10):
            chaos = test_fuzz.Chaos(seed, depth, faulty=True)
            for _ in range(5000):
                chaos.operate()
            chaos.finish()
            operations += chaos.operations
            preemptions += chaos.rig.engine.num_preemptions
    say(
        "random operations, every account proven after every step",
        f"{operations:,}, {preemptions:,} preemptions, none broken",
    )


if __name__ == "__main__":
    for part in (straggler, fairness, neighbours, cost_model, memory, overload, fuzz):
        part()
