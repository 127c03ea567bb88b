"""Stages against wall time: they must sum to it, and time injected at a hop must show in that stage and no other.

Run from the repository's root: .venv/bin/python benchmarks/serve_stages.py [--requests 1000]
"""

import argparse
import json
import sys
import time
import urllib.request
from statistics import median
from typing import NamedTuple

from serve_rig import Server, fake_config, ms, say, server, verdict

from headrace.core.stages import INJECTABLE

PROFILE = {"c0_s": 2e-3, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
INJECTED_S, SLACK_S = 0.050, 0.005
# Two tokens: one of the prompt's step, one of a step that decodes.
BODY = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}


class Explained(NamedTuple):
    """A request's stages and wall time as the server tells them, and the time its client waited."""

    stages: dict[str, float]
    wall_s: float
    seen_s: float


def explained(one: Server) -> Explained:
    head = {"authorization": f"Bearer {one.key}", "content-type": "application/json"}
    started = time.perf_counter()
    request = urllib.request.Request(f"{one.url}/v1/chat/completions", json.dumps(BODY).encode(), head)
    with urllib.request.urlopen(request, timeout=30) as reply:
        reply.read()
        request_id = reply.headers["x-request-id"]
    seen_s = time.perf_counter() - started
    found = json.loads(one.get(f"/v1/requests/{request_id}/explain"))
    return Explained(found["stages"], found["total_s"], seen_s)


def stages(hop: str | None, requests: int) -> tuple[dict[str, float], list[Explained]]:
    """Median seconds by stage, and the requests."""
    config = fake_config(PROFILE, slots=8)
    if hop is not None:
        config += f'\n[inject]\n"{hop}" = {INJECTED_S}\n'
    with server(config) as one:
        found = [explained(one) for _ in range(requests)][requests // 10 :]
    names = {name for each in found for name in each.stages}
    return {name: median(each.stages.get(name, 0.0) for each in found) for name in names}, found


def main(requests: int, hop_requests: int) -> int:
    calm, found = stages(None, requests)
    say("without injection", ", ".join(f"{name} {ms(value)}" for name, value in calm.items()))
    say("median of what the client waited beyond it", ms(median(each.seen_s - each.wall_s for each in found)))
    missed = max(abs(sum(each.stages.values()) - each.wall_s) for each in found)
    # The server's clock stops before it hands over the last bytes, and it is the same clock: no client can be faster.
    longer = sum(each.wall_s > each.seen_s for each in found)
    met = [
        verdict(missed <= 1e-3, f"the stages miss wall time by at most {ms(missed)}", "1 ms"),
        verdict(not longer, f"{longer} requests took longer in the server than for their client", "none"),
    ]
    for hop in INJECTABLE:
        slow, _ = stages(hop, hop_requests)
        grown = {name: slow.get(name, 0.0) - calm.get(name, 0.0) for name in slow.keys() | calm.keys()}
        own = grown.pop(hop, 0.0)
        other = max(grown, key=lambda name: abs(grown[name]))
        told = f"{hop}: its stage {ms(own)}, at most another ({other}) {ms(grown[other])}"
        fits = abs(own - INJECTED_S) <= SLACK_S and abs(grown[other]) <= SLACK_S
        met.append(verdict(fits, told, "50 ± 5 ms, others ± 5 ms"))
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--requests", type=int, default=10_000, help="without injection")
    flags.add_argument("--hop-requests", type=int, default=50, help="for each hop")
    given = flags.parse_args()
    sys.exit(main(given.requests, given.hop_requests))
