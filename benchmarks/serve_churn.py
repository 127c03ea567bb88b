"""Clients that go away and give up at random moments, every token checked: nothing of them may be left behind.

Run from the repository's root: .venv/bin/python benchmarks/serve_churn.py [--requests 10000] [--rounds 1]
Each round is a load and a rest; what processes hold is read after the rest. What grows at first may be a cache or an
allocator's; a leak goes on: with --rounds 4 or more the second half of them must add next to nothing.
"""

import argparse
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from serve_rig import Server, fake_config, load, server, verdict

from headrace.cli.load.process import GATEWAY, Usage, server_pids, usage_of

PROFILE = {"c0_s": 2e-3, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
CHURN = ("--disconnect", "0.3", "--timeout", "0.2", "--timeout-s", "0.1", "--check-truth")
LENGTHS = ("--prompt", "uniform:5:200", "--output", "uniform:1:60", "--users", "100", "--warmup", "0")
WARM_UP = 1000
# Until workers have told their load again, streams that can be resumed have expired, and memory was swept.
REST_S = 10.0
# Of a process since the warm-up; and, where there are rounds enough to tell, by 10,000 requests of the later ones.
MOST_GROWTH_BYTES = 15 << 20
MOST_SLOPE_BYTES = 1 << 20
LEAST_ROUNDS = 4
# What a gateway remembers by design is no leak: the explanations of its last 10,000 requests, and of its last 100,000
# streams that they were here (`streams.shelf`).
EXPLANATION_BYTES, MOST_EXPLANATIONS = 630, 10_000
EXPIRED_BYTES, MOST_EXPIRED = 85, 100_000
MIB = 1 << 20


def main(requests: int, rounds: int) -> int:
    config = fake_config(PROFILE, slots=64, more="[gateway]\ndisconnect_grace_s = 0.0\nresume_s = 1.0")
    with server(config) as one:
        # The first load fills caches and pools; the others must leave things as they found them.
        load(one.url, one.key, *LENGTHS, *CHURN, "--requests", str(WARM_UP))
        found, met = [rested(one)], []
        for number in range(1, rounds + 1):
            started = time.perf_counter()
            report = load(one.url, one.key, *LENGTHS, *CHURN, "--requests", str(requests), "--seed", str(number))
            print(f"round {number}: {requests:,} requests in {time.perf_counter() - started:.1f} s")
            found.append(rested(one))
            met += [*judge(report, requests), nothing_left(one), *judge_processes(found, requests)]
        if rounds >= LEAST_ROUNDS:
            met += judge_slopes(found, requests)
    return 0 if all(met) else 1


def rested(one: Server) -> dict[int, Usage]:
    """The server's processes, when they had time to settle."""
    time.sleep(REST_S)
    port = urlsplit(one.url).port
    assert port is not None
    usages = (usage_of(pid) for pid in server_pids(port))
    return {usage.pid: usage for usage in usages if usage is not None}


def judge(report: dict[str, Any], requests: int) -> list[bool]:
    run, truth = report["runs"][0], report["truth"]
    states = run["overall"]["states"]
    ends = ", ".join(f"{count:,} {state}" for state, count in states.items())
    return [
        verdict(sum(states.values()) == requests and not run["without_end"], f"one end each: {ends}", "all"),
        verdict(truth["wrong"] == 0, f"{truth['tokens']:,} tokens checked, {truth['wrong']} replies wrong", "none"),
    ]


def nothing_left(one: Server) -> bool:
    busy = {name: one.gauge(f"headrace_{name}") for name in ("open_streams", "replica_running", "replica_waiting")}
    busy["blocks"] = one.gauge("headrace_replica_total_blocks") - one.gauge("headrace_replica_free_blocks")
    return verdict(not any(busy.values()), f"left over: {busy}", "nothing")


def remembered(title: str, requests: int) -> int:
    """Bytes that a process keeps by design after so many requests, warm-up included."""
    if title != GATEWAY:
        return 0
    requests += WARM_UP
    return EXPLANATION_BYTES * min(requests, MOST_EXPLANATIONS) + EXPIRED_BYTES * min(requests, MOST_EXPIRED)


def judge_processes(found: list[dict[int, Usage]], requests: int) -> list[bool]:
    """After the last round, against the warm-up."""
    met = []
    rounds = len(found) - 1
    for pid, start in found[0].items():
        now, last = found[-1].get(pid), found[-2].get(pid)
        if now is None or last is None:
            met.append(verdict(False, f"{start.title}: gone", "still there"))
            continue
        grown, more = now.rss_bytes - start.rss_bytes, now.rss_bytes - last.rss_bytes
        most = MOST_GROWTH_BYTES + remembered(start.title, rounds * requests) - remembered(start.title, 0)
        held = f"{start.rss_bytes / MIB:.1f} MiB {grown / MIB:+.1f}" + (
            f", {more / MIB:+.1f} now" if rounds > 1 else ""
        )
        met.append(verdict(grown <= most, f"{start.title}: {held}", f"{most / MIB:.1f} MiB"))
        is_met = now.descriptors <= start.descriptors and now.threads <= start.threads
        told = f"descriptors {start.descriptors} -> {now.descriptors}, threads {start.threads} -> {now.threads}"
        met.append(verdict(is_met, f"{start.title}: {told}", "no more"))
    return met


def judge_slopes(found: list[dict[int, Usage]], requests: int) -> list[bool]:
    """Whether processes still grow in the second half of the rounds, beyond what they remember by design."""
    met = []
    rounds = len(found) - 1
    half = rounds // 2
    later = (rounds - half) * requests
    for pid, usage in found[-1].items():
        if pid not in found[half]:
            continue
        known = remembered(usage.title, rounds * requests) - remembered(usage.title, half * requests)
        slope = (usage.rss_bytes - found[half][pid].rss_bytes - known) / later * 10_000
        told = f"{usage.title}: {slope / MIB:+.2f} MiB by 10,000 of the last {later:,} requests"
        met.append(verdict(slope <= MOST_SLOPE_BYTES, told, f"{MOST_SLOPE_BYTES / MIB:.0f} MiB"))
    return met


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--requests", type=int, default=10_000)
    flags.add_argument("--rounds", type=int, default=1)
    given = flags.parse_args()
    sys.exit(main(given.requests, given.rounds))
