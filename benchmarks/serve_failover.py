"""Workers that are killed or stopped under many streams: no client may notice, but for a gap, which is told.

200 streams of the fake, of all kinds whose state must survive, are read undisturbed, then while a worker is killed, stopped
for 1 s and for 30 s; then 8 streams of the default model while a worker is killed. Every stream must say what it said
undisturbed, on its first connection. Run from the repository's root:
.venv/bin/python benchmarks/serve_failover.py [--streams 200] [--only fake|model] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from serve_client import Reading, quantile
from serve_rig import Server, child, fake_config, keep, ms, say, server, verdict

from tests.api.kinds import KINDS

PROFILE = {"c0_s": 2e-2, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
MODEL = '[[models]]\nname = "default"\nsource = "default"\nworkers = 2\nkv_tokens = 4096\n'
# Patient: beside a dead worker the other has all the work.
TENANT = '[[tenants]]\nname = "local"\ntier = "batch"\n'
FAKE_TOKENS, MODEL_TOKENS = 150, 48
SETTLE_S = 60.0

Disturb = Callable[[int], Awaitable[None]]


def reading(one: Server, run: str, number: int, max_tokens: int) -> Reading:
    body: dict[str, Any] = {
        **KINDS[number % len(KINDS)],
        "model": "default",
        "stream": True,
        "messages": [{"role": "user", "content": f"Question {number}: what is a mill?"}],
        "seed": number,
        "max_tokens": max_tokens,
        "stream_options": {"include_usage": True},
    }
    return Reading(one, f"{run}-{number}", "/v1/chat/completions", body)


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop_for(seconds: float) -> Disturb:
    async def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        # One that was silent for too long may have been ended meanwhile.
        if os.path.exists(f"/proc/{pid}"):
            os.kill(pid, signal.SIGCONT)

    return stop


async def read_all(
    one: Server, run: str, streams: int, max_tokens: int, victim: str = "", disturb: Disturb | None = None
) -> tuple[list[Reading], float]:
    """All readings, and when the blow fell."""
    readings = [reading(one, run, number, max_tokens) for number in range(streams)]
    tasks = [asyncio.create_task(each.run()) for each in readings]
    await asyncio.gather(*(each.begun.wait() for each in readings))
    blow_s = time.perf_counter()
    if disturb is not None:
        await disturb(child(one.pid, victim))
    await asyncio.gather(*tasks)
    return readings, blow_s


def judge(
    one: Server, name: str, truth: list[Reading], found: list[Reading], blow_s: float, figures: dict[str, Any]
) -> list[bool]:
    streams = len(truth)
    errors = [each for each in found if each.error or each.broken or each.num_connections != 1 or each.num_ends != 1]
    same = sum(each.told == right.told and not each.repeated for each, right in zip(found, truth, strict=True))
    moved = [each for each in found if attempts(one, each) > 1]
    others = [each for each in found if each not in moved]
    for who, readings in (("moved", moved), ("not moved", others)):
        gaps_s = [each.gap_s(blow_s) for each in readings]
        if gaps_s:
            figures[f"{name}, {who}"] = {"streams": len(gaps_s), "gaps_s": sorted(gaps_s)}
            told = f"p50 {ms(quantile(gaps_s, 0.5))}, p99 {ms(quantile(gaps_s, 0.99))}"
            say(f"{name}: longest gap of {len(gaps_s)} streams {who}", told)
    met = [
        verdict(not errors, f"{name}: {len(errors)} of {streams} clients saw an error", "none"),
        verdict(same == streams, f"{name}: {same} of {streams} identical to the undisturbed run", "all"),
    ]
    for each in errors[:3]:
        say(f"  {each.id}", str((each.error, each.broken, each.num_connections, each.num_ends))[:300])
    return met


def attempts(one: Server, each: Reading) -> int:
    return int(json.loads(one.get(f"/v1/requests/{each.id}/explain"))["attempts"])


def settled(one: Server, name: str) -> bool:
    """Both workers are back and nothing is held."""
    give_up_s = time.monotonic() + SETTLE_S
    while True:
        ready, total = one.gauge("headrace_replica_ready"), one.gauge("headrace_replica_total_blocks")
        held = total - one.gauge("headrace_replica_free_blocks")
        if (ready == 2 and not held) or time.monotonic() > give_up_s:
            return verdict(
                ready == 2 and not held, f"{name}: {ready:.0f} workers ready, {held:.0f} blocks held", "2, 0"
            )
        time.sleep(0.5)


async def rounds(
    one: Server, streams: int, max_tokens: int, victim: str, blows: dict[str, Disturb], figures: dict[str, Any]
) -> list[bool]:
    # The first fills caches: what is cached may not change what is said, only when.
    await read_all(one, "warm", streams, max_tokens)
    truth, began_s = await read_all(one, "calm", streams, max_tokens)
    gaps_s = [each.gap_s(began_s) for each in truth]
    say("undisturbed: longest gap", f"p50 {ms(quantile(gaps_s, 0.5))}, p99 {ms(quantile(gaps_s, 0.99))}")
    met = [verdict(not any(each.error or each.broken for each in truth), "undisturbed: no errors", "none")]
    for name, disturb in blows.items():
        found, blow_s = await read_all(one, name.replace(" ", "-"), streams, max_tokens, victim, disturb)
        met += judge(one, name, truth, found, blow_s, figures)
        met.append(settled(one, name))
    return met


def main(streams: int, only: str | None, path: Path | None) -> int:
    met: list[bool] = []
    figures: dict[str, Any] = {"streams": streams}
    if only != "model":
        blows = {"kill -9": kill, "stopped 1 s": stop_for(1.0), "stopped 30 s": stop_for(30.0)}
        with server(TENANT + fake_config(PROFILE, slots=320, workers=2)) as one:
            met += asyncio.run(rounds(one, streams, FAKE_TOKENS, "headrace: worker fake 0", blows, figures))
    if only != "fake":
        victim = "headrace: worker default 0"
        with server(TENANT + MODEL) as one:
            met += asyncio.run(rounds(one, len(KINDS), MODEL_TOKENS, victim, {"model": kill}, figures))
    keep(path, figures | {"met": met})
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--streams", type=int, default=200)
    flags.add_argument("--only", choices=("fake", "model"))
    flags.add_argument("--json", type=Path, help="where to keep every figure")
    given = flags.parse_args()
    sys.exit(main(given.streams, given.only, given.json))
