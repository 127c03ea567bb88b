"""Two tenants over HTTP: one floods with long prompts, the other asks now and then. Five alternating pairs.

What the quiet one sees beside the flood is held against what it sees alone in the same pair, and what the flooder gets
against what it gets alone. Each tenant is a client process with connections of its own, as tenants are: in one process
the quiet one's requests would wait for the 200 prompts to be written, and find no connection that the flood has not
taken. The flood comes a second after the quiet one's requests begin to count, so that all of it is in them.

Run from the repository's root: .venv/bin/python benchmarks/serve_tenants.py
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

from serve_rig import Server, fake_config, fresh_key, load, ms, quiet_rounds, say, server, tenant, verdict

STEP_S = 0.020
PROFILE = {"c0_s": STEP_S, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
QUIET = "name=quiet,key={quiet},rate=5,prompt=20,output=8"
FLOOD = "name=flood,key={flood},together=200,prompt=2000,output=64"
# Of each tenant's own count.
WARMUP_S = {QUIET: 2.0, FLOOD: 3.0}
FLOOD_OUTPUT = 64
FLOOD_REQUESTS = 200
# The whole flood may wait its turn: what a tenant gets is asked here, not what is refused for its wait.
PATIENT = "[engine]\nmax_queue_s = 600.0\nqueue_timeout_s = 600.0\n" + "".join(
    f"[engine.targets.{tier}]\nttft_s = 600.0\nitl_s = {itl_s}\n"
    for tier, itl_s in {"enterprise": 0.05, "plus": 0.075, "free": 0.15, "batch": 0.5}.items()
)

LOADS = {"alone": (QUIET,), "beside the flood": (QUIET, FLOOD), "flood alone": (FLOOD,)}


def clients(one: Server, tenants: tuple[str, ...], keys: dict[str, str], seconds: float, seed: int) -> dict[str, Any]:
    """What each tenant saw, all at once."""

    def client(text: str) -> dict[str, Any]:
        flags = ("--duration", str(seconds), "--warmup", str(WARMUP_S[text]), "--seed", str(seed))
        found: dict[str, Any] = load(one.url, one.key, "--tenant", text.format(**keys), *flags)["runs"][0]["tenants"]
        return found

    with ThreadPoolExecutor() as pool:
        return {name: figures for found in pool.map(client, tenants) for name, figures in found.items()}


def told(name: str, figures: dict[str, Any]) -> None:
    if "quiet" in figures:
        ttft_s, late_s = figures["quiet"]["ttft_s"]["p99"], figures["quiet"]["lateness_s"]["max"]
        say(f"{name}: TTFT p99", f"{ms(ttft_s)} (sent {ms(late_s)} late at most)")
    if "flood" in figures:
        say(f"{name}: the flooder's output tokens/s", f"{speed(figures):,.0f}")


def speed(figures: dict[str, Any]) -> float:
    return float(figures["flood"]["requests"] * FLOOD_OUTPUT / figures["flood"]["e2e_s"]["max"])


def main(pairs: int, seconds: float) -> int:
    keys = {"quiet": fresh_key(), "flood": fresh_key()}
    config = fake_config(PROFILE, slots=32, more=PATIENT + "".join(tenant(name, key) for name, key in keys.items()))
    with server(config) as one:

        def leg(number: int, place: int, name: str) -> dict[str, Any]:
            found = clients(one, LOADS[name], keys, seconds, seed=3 * number + place)
            told(f"pair {number + 1}, {name}", found)
            return found

        def legs(number: int) -> dict[str, Callable[[], dict[str, Any]]]:
            order = LOADS if number % 2 == 0 else reversed(LOADS)
            return {name: partial(leg, number, place, name) for place, name in enumerate(order)}

        quiet, _ = quiet_rounds(legs, pairs, 3 * pairs)
    if len(quiet) < pairs:
        verdict(False, f"{len(quiet)} of {3 * pairs} pairs were quiet", f"{pairs}")
        return 1
    alone, beside = ([pair[name]["quiet"]["ttft_s"]["p99"] for pair in quiet] for name in ("alone", "beside the flood"))
    limits = [1.1 * (before_s + 2 * STEP_S) for before_s in alone]
    met = sum(after_s <= most_s for after_s, most_s in zip(beside, limits, strict=True))
    shared, whole = (median(speed(pair[name]) for pair in quiet) for name in ("beside the flood", "flood alone"))
    least = min(pair[name]["flood"]["requests"] for pair in quiet for name in ("beside the flood", "flood alone"))
    waits = f"p99 TTFT {ms(median(alone))} alone, {ms(median(beside))} beside the flood; {met} of {pairs} pairs within"
    verdicts = [
        verdict(least == FLOOD_REQUESTS, f"{least} of {FLOOD_REQUESTS} of the flood served", "all, each time"),
        verdict(met == pairs, waits, f"alone + two steps + 10 %: {ms(median(limits))}"),
        verdict(
            shared >= 0.9 * whole,
            f"the flooder gets {shared / whole:.1%} of what it gets alone",
            "90 %: the quiet one uses 3 %",
        ),
    ]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--pairs", type=int, default=5)
    flags.add_argument("--seconds", type=float, default=9.0)
    given = flags.parse_args()
    sys.exit(main(given.pairs, given.seconds))
