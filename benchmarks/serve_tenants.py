"""Two tenants over HTTP: one floods with long prompts, the other asks now and then. Five alternating pairs.

What the quiet one sees beside the flood is held against what it sees alone in the same pair, and what the flooder gets
against what it gets alone. Run from the repository's root: .venv/bin/python benchmarks/serve_tenants.py
"""

import argparse
import sys
from statistics import median

from serve_rig import fake_config, fresh_key, load, ms, say, server, tenant, verdict

STEP_S = 0.020
PROFILE = {"c0_s": STEP_S, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
QUIET = "name=quiet,key={quiet},rate=5,prompt=20,output=8"
FLOOD = "name=flood,key={flood},together=200,prompt=2000,output=64"
FLOOD_OUTPUT = 64
FLOOD_REQUESTS = 200
# The whole flood may wait its turn: what a tenant gets is asked here, not what is refused for its wait.
PATIENT = "[engine]\nmax_queue_s = 600.0\nqueue_timeout_s = 600.0\n" + "".join(
    f"[engine.targets.{tier}]\nttft_s = 600.0\nitl_s = {itl_s}\n"
    for tier, itl_s in {"enterprise": 0.05, "plus": 0.075, "free": 0.15, "batch": 0.5}.items()
)

LOADS = {"alone": (QUIET,), "beside the flood": (QUIET, FLOOD), "flood alone": (FLOOD,)}


def main(pairs: int, seconds: float) -> int:
    keys = {"quiet": fresh_key(), "flood": fresh_key()}
    config = fake_config(PROFILE, slots=32, more=PATIENT + "".join(tenant(name, key) for name, key in keys.items()))
    ttft: dict[str, list[float]] = {name: [] for name in LOADS}
    speed: dict[str, list[float]] = {name: [] for name in LOADS}
    served: list[int] = []
    with server(config) as one:
        for pair in range(pairs):
            for place, name in enumerate(LOADS if pair % 2 == 0 else reversed(LOADS)):
                tenants = [word for text in LOADS[name] for word in ("--tenant", text.format(**keys))]
                flags = ("--duration", str(seconds), "--warmup", "2", "--seed", str(3 * pair + place))
                found = load(one.url, one.key, *tenants, *flags)["runs"][0]["tenants"]
                if "quiet" in found:
                    ttft[name].append(found["quiet"]["ttft_s"]["p99"])
                    say(f"pair {pair + 1}, {name}: TTFT p99", ms(ttft[name][-1]))
                if "flood" in found:
                    served.append(found["flood"]["requests"])
                    speed[name].append(found["flood"]["requests"] * FLOOD_OUTPUT / found["flood"]["e2e_s"]["max"])
                    say(f"pair {pair + 1}, {name}: the flooder's output tokens/s", f"{speed[name][-1]:,.0f}")
    limits = [1.1 * (before_s + 2 * STEP_S) for before_s in ttft["alone"]]
    met = sum(after_s <= most_s for after_s, most_s in zip(ttft["beside the flood"], limits, strict=True))
    share = median(speed["beside the flood"]) / median(speed["flood alone"])
    told = f"p99 TTFT {ms(median(ttft['alone']))} alone, {ms(median(ttft['beside the flood']))} beside the flood"
    target = f"alone + two steps + 10 %: {ms(median(limits))}"
    verdicts = [
        verdict(
            set(served) == {FLOOD_REQUESTS}, f"{min(served)} of {FLOOD_REQUESTS} of the flood served", "all, each time"
        ),
        verdict(2 * met > pairs, f"{told}; {met} of {pairs} pairs within", target),
        verdict(share >= 0.9, f"the flooder gets {share:.1%} of what it gets alone", "90 %: the quiet one uses 3 %"),
    ]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--pairs", type=int, default=5)
    flags.add_argument("--seconds", type=float, default=8.0)
    given = flags.parse_args()
    sys.exit(main(given.pairs, given.seconds))
