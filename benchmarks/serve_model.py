"""The default model over HTTP: what serving costs beside the engine alone, and first tokens at 60 % of capacity. Only what was
measured while the host left the processors to us counts; the first that did, however it came out.

Run from the repository's root: .venv/bin/python benchmarks/serve_model.py [--requests 16 --pairs 3]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from math import inf
from statistics import median

from serve_rig import HEADRACE, fresh_key, load, ms, quiet_rounds, say, server, tenant, verdict

PROMPT, OUTPUT = 64, 64
# A short question in a chat; the template adds its own, which all of them share.
QUESTION = 24
TOO_FEW = "too few rounds were quiet"
# Of first tokens, until one was quiet.
MOST_TRIES = 4
CONFIG = '[[models]]\nname = "default"\nsource = "default"\n'


def engine_speed(requests: int) -> float:
    argv = [HEADRACE, "bench", "engine", "--load", f"{requests}:{PROMPT}:{OUTPUT}", "--json"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout)["loads"][0]["output_tokens_per_s"])


def served_speed(requests: int, seed: int) -> float:
    """All requests at once, prompts as ids and so of the same length as the engine's, and in its tier: what an enterprise is
    promised between tokens cuts prompts into more parts (decision 22)."""
    key = fresh_key()
    with server(CONFIG + tenant("crowd", key, 'tier = "batch"')) as one:
        # One first, so that nothing is measured that happens once.
        flags = ("--prompt", str(PROMPT), "--output", str(OUTPUT), "--api", "completions", "--model", "default")
        load(one.url, key, *flags, "--together", "1", "--seed", str(seed + 1000))
        run = load(one.url, key, *flags, "--together", str(requests), "--seed", str(seed))["runs"][0]
    return float(run["overall"]["output_tokens_per_s"])


def first_tokens(requests: int, seconds: float) -> dict[str, float]:
    """At 60 % of what the same server can do."""
    with server(CONFIG) as one:
        flags = ("--prompt", str(QUESTION), "--output", str(OUTPUT))
        load(one.url, one.key, *flags, "--together", "1", "--seed", "1000")
        full = load(one.url, one.key, *flags, "--together", str(requests), "--seed", "1001")["runs"][0]
        rate = 0.6 * float(full["overall"]["output_tokens_per_s"]) / OUTPUT
        flags = (*flags, "--duration", str(seconds), "--warmup", "10")
        run = load(one.url, one.key, *flags, "--rate", str(rate), "--slo", "ttft=0.5,itl=0.5")["runs"][0]["overall"]
    p95_s = float(run["ttft_s"]["p95"])
    say(f"at {rate:.2f} requests/s: goodput, TTFT p95", f"{run['good_share']:.1%}, {ms(p95_s)}")
    return {"rate": rate, "p95_s": p95_s}


def main(requests: int, pairs: int, seconds: float) -> int:
    def legs(pair: int) -> dict[str, Callable[[], float]]:
        both = {"over HTTP": partial(served_speed, requests, pair), "engine alone": partial(engine_speed, requests)}
        return both if pair % 2 else dict(reversed(both.items()))

    quiet, disturbed = quiet_rounds(legs, pairs, 2 * pairs)
    for kind, rounds in (("quiet", quiet), ("disturbed", disturbed)):
        for one in rounds:
            speeds = (f"{name} {one[name]:,.1f}" for name in ("engine alone", "over HTTP"))
            say(f"output tokens/s, {kind} ({one['stolen']:.1%} stolen)", ", ".join(speeds))
    ratio = median(one["over HTTP"] for one in quiet) / median(one["engine alone"] for one in quiet) if quiet else 0.0
    told = f"over HTTP {ratio:.1%} of the engine's output tokens/s" if len(quiet) == pairs else TOO_FEW
    met = [verdict(ratio >= 0.9 and len(quiet) == pairs, told, "90 %")]
    quiet, _ = quiet_rounds(lambda _: {"paced": partial(first_tokens, requests, seconds)}, 1, MOST_TRIES)
    p95_s = quiet[0]["paced"]["p95_s"] if quiet else inf
    told = f"TTFT p95 at 60 % of capacity: {ms(p95_s)}" if quiet else TOO_FEW
    met.append(verdict(p95_s < 0.5, told, "500 ms"))
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--requests", type=int, default=16)
    flags.add_argument("--pairs", type=int, default=3)
    flags.add_argument("--seconds", type=float, default=60.0)
    given = flags.parse_args()
    sys.exit(main(given.requests, given.pairs, given.seconds))
