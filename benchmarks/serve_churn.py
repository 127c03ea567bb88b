"""Clients that go away and give up at random moments, every token checked: nothing of them may be left behind.

Run from the repository's root: .venv/bin/python benchmarks/serve_churn.py [--requests 10000]
"""

import argparse
import sys
import time

from serve_rig import fake_config, load, server, verdict

PROFILE = {"c0_s": 2e-3, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
MOST_GROWTH_BYTES = 32 << 20
# Until the gateway has heard from its workers again.
HEARTBEATS_S = 3.0


def main(requests: int) -> int:
    config = fake_config(PROFILE, slots=64, more="[gateway]\ndisconnect_grace_s = 0.0")
    with server(config) as one:
        churn = ("--disconnect", "0.3", "--timeout", "0.2", "--timeout-s", "0.1", "--check-truth")
        lengths = ("--prompt", "uniform:5:200", "--output", "uniform:1:60", "--users", "100")
        # The first load fills caches and pools; the second must leave things as it found them.
        load(one.url, one.key, *lengths, *churn, "--requests", str(max(1, requests // 10)), "--warmup", "0")
        started = time.perf_counter()
        report = load(one.url, one.key, *lengths, *churn, "--requests", str(requests), "--warmup", "0", "--seed", "1")
        seconds = time.perf_counter() - started
        time.sleep(HEARTBEATS_S)
        busy = {name: one.gauge(f"headrace_{name}") for name in ("open_streams", "replica_running", "replica_waiting")}
        busy["blocks"] = one.gauge("headrace_replica_total_blocks") - one.gauge("headrace_replica_free_blocks")
    run, truth = report["runs"][0], report["truth"]
    states = run["overall"]["states"]
    print(f"{requests:,} requests in {seconds:.1f} s: {', '.join(f'{n:,} {state}' for state, n in states.items())}")
    met = [
        verdict(sum(states.values()) == requests and not run["without_end"], "exactly one end each", "all"),
        verdict(truth["wrong"] == 0, f"{truth['tokens']:,} tokens checked, {truth['wrong']} replies wrong", "none"),
        verdict(not any(busy.values()), f"left over: {busy}", "nothing"),
    ]
    for process in run["processes"]:
        before, after = process["rss_bytes"]
        descriptors = process["descriptors"]
        told = (
            f"{process['title']}: descriptors {descriptors[0]} -> {descriptors[1]}, {(after - before) / 2**20:+.1f} MiB"
        )
        met.append(verdict(descriptors[0] >= descriptors[1] and after - before <= MOST_GROWTH_BYTES, told, "no more"))
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--requests", type=int, default=10_000)
    sys.exit(main(flags.parse_args().requests))
