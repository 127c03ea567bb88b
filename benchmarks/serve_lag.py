"""How late the gateway's loop runs while prompts of 100,000 tokens arrive, one after another on several connections.

Twice: the fake completes them; the default model's own tokeniser is asked for their ids, and refuses them once it has
found more than it tells. Said by the server's own beat, and by a client that asks for /live all the while.
Run from the repository's root: .venv/bin/python benchmarks/serve_lag.py [--seconds 40 --clients 4]
"""

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.parse
from pathlib import Path

from serve_rig import FREE, Server, fake_config, keep, ms, say, server, verdict

TOKENS = 100_000
LIMIT_S = 0.020
METRIC = "headrace_loop_lag_sampled_seconds"
WORDS = ("river", "stone", "lamp", "quiet", "over", "seven", "blue", "wheel", "under", "north", "paper", "salt")
PATHS = {"fake": "/v1/completions", "default": "/tokenize"}
STATUSES = {"fake": 200, "default": 400}
MODEL = '[[models]]\nname = "default"\nsource = "default"\n'


def prompt(model: str, seed: int) -> str:
    """That many tokens: of the fake's, which are bytes, or of words that are one token each to real vocabularies."""
    draw = random.Random(seed)
    if model == "fake":
        return "".join(draw.choices("abcdefgh ", k=TOKENS))
    return " ".join(draw.choices(WORDS, k=TOKENS))


async def answer(one: Server, method: str, path: str, body: bytes = b"") -> int:
    url = urllib.parse.urlsplit(one.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {one.key}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    told = await reader.read()
    writer.close()
    return int(told.split(b" ", 2)[1])


async def pour(one: Server, path: str, bodies: list[bytes], until_s: float, statuses: list[int]) -> None:
    while time.monotonic() < until_s:
        statuses.append(await answer(one, "POST", path, random.choice(bodies)))


async def probe(one: Server, until_s: float) -> list[float]:
    taken_s = []
    while time.monotonic() < until_s:
        began_s = time.perf_counter()
        await answer(one, "GET", "/live")
        taken_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(0.02)
    return taken_s


def beats(one: Server) -> dict[float, float]:
    """How many beats came at most so late, by bound."""
    lines = [line for line in one.get("/metrics").splitlines() if line.startswith(f"{METRIC}_bucket")]
    return {float(line.partition('le="')[2].partition('"')[0]): float(line.rpartition(" ")[2]) for line in lines}


def share_within(before: dict[float, float], after: dict[float, float], limit_s: float) -> float:
    """Of the beats between, those that were surely no later: bounds above the limit do not count."""
    bound = max(each for each in after if each <= limit_s)
    # Of a server that has just begun there may be none before.
    within, total = (after[each] - before.get(each, 0.0) for each in (bound, float("inf")))
    return within / total


async def measure(one: Server, model: str, clients: int, seconds: float) -> dict[str, float]:
    bodies = [
        json.dumps(
            {"model": model, "prompt": prompt(model, seed), **({"max_tokens": 1} if model == "fake" else {})}
        ).encode()
        for seed in range(8)
    ]
    await answer(one, "POST", PATHS[model], bodies[0])
    before, statuses, until_s = beats(one), [], time.monotonic() + seconds
    pours = [pour(one, PATHS[model], bodies, until_s, statuses) for _ in range(clients)]
    probes, *_ = await asyncio.gather(probe(one, until_s), *pours)
    probes.sort()
    within = share_within(before, beats(one), LIMIT_S)
    p99_s = probes[int(0.99 * len(probes))]
    counts = ", ".join(f"{statuses.count(status)} x {status}" for status in sorted(set(statuses)))
    say(f"{model}: prompts of {TOKENS:,} tokens in {seconds:.0f} s", counts)
    say(f"{model}: /live, p50 and p99 of {len(probes)}", f"{ms(probes[len(probes) // 2])}, {ms(p99_s)}")
    say(f"{model}: beats at most {ms(LIMIT_S)} late", f"{within:.1%}")
    answered = statuses.count(STATUSES[model]) / len(statuses)
    return {"prompts": len(statuses), "answered": answered, "live_p99_s": p99_s, "within": within}


def main(clients: int, seconds: float, path: Path | None) -> int:
    found = {}
    configs = {"fake": fake_config(FREE, blocks=65_536, context_len=TOKENS + 1000), "default": MODEL}
    for model, config in configs.items():
        with server(config) as one:
            found[model] = asyncio.run(measure(one, model, clients, seconds))
    keep(path, found)
    met = [
        verdict(each["answered"] == 1.0, f"{model}: {each['answered']:.0%} answered {STATUSES[model]}", "all")
        for model, each in found.items()
    ]
    met += [
        verdict(each["within"] >= 0.99, f"{model}: {each['within']:.1%} of beats within {ms(LIMIT_S)}", "99 %")
        for model, each in found.items()
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--seconds", type=float, default=40.0)
    flags.add_argument("--clients", type=int, default=4)
    flags.add_argument("--json", type=Path, help="where to keep every figure")
    given = flags.parse_args()
    sys.exit(main(given.clients, given.seconds, given.json))
