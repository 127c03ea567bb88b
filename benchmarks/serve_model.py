"""The default model over HTTP: what serving costs beside the engine alone, and first tokens at 60 % of capacity.

Run from the repository's root: .venv/bin/python benchmarks/serve_model.py [--requests 16 --pairs 3]
"""

import argparse
import json
import subprocess
import sys
from statistics import median

from serve_rig import HEADRACE, load, ms, say, server, verdict

PROMPT, OUTPUT = 64, 64
# A short question in a chat; the template adds its own, which all of them share.
QUESTION = 24
CONFIG = '[[models]]\nname = "default"\nsource = "default"\n'


def engine_speed(requests: int) -> float:
    argv = [HEADRACE, "bench", "engine", "--load", f"{requests}:{PROMPT}:{OUTPUT}", "--json"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout)["loads"][0]["output_tokens_per_s"])


def served_speed(requests: int, seed: int) -> float:
    """All requests at once, prompts as ids and so of the same length as the engine's."""
    with server(CONFIG) as one:
        # One first, so that nothing is measured that happens once.
        flags = ("--prompt", str(PROMPT), "--output", str(OUTPUT), "--api", "completions", "--model", "default")
        load(one.url, one.key, *flags, "--together", "1", "--seed", str(seed + 1000))
        run = load(one.url, one.key, *flags, "--together", str(requests), "--seed", str(seed))["runs"][0]
    return float(run["overall"]["output_tokens_per_s"])


def main(requests: int, pairs: int, seconds: float) -> int:
    alone, served = [], []
    for pair in range(pairs):
        for http in (False, True) if pair % 2 == 0 else (True, False):
            speed = served_speed(requests, pair) if http else engine_speed(requests)
            (served if http else alone).append(speed)
            say(f"pair {pair + 1}, {'over HTTP' if http else 'engine alone'}: output tokens/s", f"{speed:,.1f}")
    ratio = median(served) / median(alone)
    met = [verdict(ratio >= 0.9, f"over HTTP {ratio:.1%} of the engine's output tokens/s", "90 %")]
    with server(CONFIG) as one:
        flags = ("--prompt", str(QUESTION), "--output", str(OUTPUT))
        load(one.url, one.key, *flags, "--together", "1", "--seed", "1000")
        full = load(one.url, one.key, *flags, "--together", str(requests), "--seed", "1001")["runs"][0]
        rate = 0.6 * float(full["overall"]["output_tokens_per_s"]) / OUTPUT
        flags = (*flags, "--duration", str(seconds), "--warmup", "10")
        run = load(one.url, one.key, *flags, "--rate", str(rate), "--slo", "ttft=0.5,itl=0.5")["runs"][0]
    p95_s = run["overall"]["ttft_s"]["p95"]
    say(f"goodput at {rate:.2f} requests/s", f"{run['overall']['good_share']:.1%}")
    met.append(verdict(p95_s < 0.5, f"TTFT p95 at 60 % of capacity: {ms(p95_s)}", "500 ms"))
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--requests", type=int, default=16)
    flags.add_argument("--pairs", type=int, default=3)
    flags.add_argument("--seconds", type=float, default=60.0)
    given = flags.parse_args()
    sys.exit(main(given.requests, given.pairs, given.seconds))
