"""A thousand clients that take one token a second, beside 32 that take all: five alternating pairs, with and without.

The slow ones read over WebSockets with a window of 8, which may never be exceeded; their sequences pause and go on with
them. Then they take nothing more, and each is ended with an error frame. The gateway's memory must be bounded meanwhile, and the others'
time between tokens must stay what it is without them. Run from the repository's root:
PYTHONPATH=src:. .venv/bin/python benchmarks/serve_slow_readers.py [--readers 1000] [--pairs 5]
"""

import argparse
import asyncio
import contextlib
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from urllib.parse import urlsplit

from serve_rig import Server, apart, child, fake_config, load, ms, say, server, verdict

from headrace.cli.load.process import usage_of
from tests.socket_client import Closed, SocketClient, opened

# Ids beyond the short words are whole words too: every token says something.
VOCAB_SIZE = 60_000
PROFILE = {"c0_s": 2e-2, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
WINDOW = 8
UNREAD_S = 6.0
GATEWAY = f"[gateway]\nmax_unread_bytes = 512\nmax_unread_s = {UNREAD_S}\ndisconnect_grace_s = 0.0\nresume_s = 1.0\n"
# Until all have begun and their sequences have paused.
RAMP_S = 9.0
OTHERS = ("--together", "32", "--prompt", "20", "--output", "250")
MOST_BYTES_EACH = 256 << 10
MIB = 1 << 20


@dataclass(slots=True)
class Crowd:
    """What the slow readers saw, and the most that the gateway held meanwhile."""

    ends: Counter[str] = field(default_factory=Counter)
    most_in_flight: int = 0
    frames: int = 0
    peak_bytes: int = 0
    has_enough: bool = False


async def slow_reader(one: Server, port: int, number: int, crowd: Crowd) -> None:
    """One token a second, then none, until the server has had enough."""
    body = {"model": "fake", "prompt": f"Reader {number}", "max_tokens": 2000, "ignore_eos": True, "seed": number}
    try:
        async with opened(port, one.key) as client:
            await client.say(type="start", id="a", api="completions", body=body, window=WINDOW)
            started = await client.hear()
            if started["type"] != "started":
                crowd.ends[f"not started: {started['error']['code']}"] += 1
                return
            crowd.ends[await _read(client, started["stream"], crowd)] += 1
    except (Closed, OSError) as error:
        crowd.ends[f"cut: {error!r}"] += 1


async def _read(client: SocketClient, stream: str, crowd: Crowd) -> str:
    heard: list[int] = []
    acks = asyncio.create_task(_acknowledge(client, stream, heard, crowd))
    try:
        while (said := await client.hear())["type"] != "end":
            if said["type"] == "frame":
                heard.append(said["seq"])
                crowd.frames += 1
                crowd.most_in_flight = max(crowd.most_in_flight, len(heard))
    finally:
        acks.cancel()
    return said["error"]["code"] if said["error"] else "finished"


async def _acknowledge(client: SocketClient, stream: str, heard: list[int], crowd: Crowd) -> None:
    """The oldest, each second. It counts as taken from when it is told so: the server cannot know before."""
    while not crowd.has_enough:
        await asyncio.sleep(1.0)
        if heard:
            await client.say(type="ack", stream=stream, seq=heard.pop(0))


async def beside(one: Server, readers: int) -> tuple[float, Crowd]:
    """The others' p99 between tokens, with a crowd around it."""
    crowd, port = Crowd(), urlsplit(one.url).port
    assert port is not None
    pid = child(one.pid, "headrace: gateway")
    tasks = [asyncio.create_task(slow_reader(one, port, number, crowd)) for number in range(readers)]

    async def watch() -> None:
        while True:
            usage = usage_of(pid)
            crowd.peak_bytes = max(crowd.peak_bytes, usage.rss_bytes if usage else 0)
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(RAMP_S)
    say("  sequences that run while the slow ones are paused", f"{await asyncio.to_thread(running, one):.0f}")
    p99_s = await asyncio.to_thread(others, one)
    crowd.has_enough = True
    await asyncio.gather(*tasks)
    watching.cancel()
    return p99_s, crowd


def running(one: Server) -> float:
    return one.gauge("headrace_replica_running")


def others(one: Server) -> float:
    report = load(one.url, one.key, *OTHERS, "--seed", str(time.time_ns() % 1_000_000))
    return float(report["runs"][0]["overall"]["itl_s"]["p99"])


def judge(pairs: list[tuple[float, float]], crowds: list[Crowd], start_bytes: int, readers: int) -> list[bool]:
    ratios = [beside_s / alone_s for alone_s, beside_s in pairs]
    ends = sum((crowd.ends for crowd in crowds), Counter())
    grown = max(crowd.peak_bytes for crowd in crowds) - start_bytes
    most = max(crowd.most_in_flight for crowd in crowds)
    told = ", ".join(f"{ratio:.2f}x" for ratio in ratios)
    return [
        verdict(median(ratios) <= 1.3, f"the others' p99 between tokens: {told}", "median 1.3x"),
        verdict(set(ends) == {"client_too_slow"}, f"each ended with an error frame: {dict(ends)}", "client_too_slow"),
        verdict(most <= WINDOW, f"at most {most} frames were not acknowledged", f"{WINDOW}"),
        verdict(
            grown <= readers * MOST_BYTES_EACH,
            f"the gateway grew from {start_bytes / MIB:.0f} by {grown / MIB:.0f} MiB, the peak of all pairs",
            f"{readers * MOST_BYTES_EACH / MIB:.0f} MiB",
        ),
    ]


def nothing_left(one: Server) -> bool:
    time.sleep(3.0)
    left = {name: one.gauge(f"headrace_{name}") for name in ("open_streams", "replica_running", "replica_waiting")}
    left["blocks"] = one.gauge("headrace_replica_total_blocks") - one.gauge("headrace_replica_free_blocks")
    return verdict(not any(left.values()), f"left over: {left}", "nothing")


def main(readers: int, pairs: int) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    config = fake_config(PROFILE, slots=readers + 100, more=GATEWAY, vocab_size=VOCAB_SIZE)
    found: list[tuple[float, float]] = []
    crowds: list[Crowd] = []
    with apart() as pin, server(config) as one:
        pin(one)
        others(one)
        usage = usage_of(child(one.pid, "headrace: gateway"))
        assert usage is not None
        for pair in range(pairs):
            # Every other pair begins with the crowd.
            alone_s = others(one) if pair % 2 == 0 else 0.0
            beside_s, crowd = asyncio.run(beside(one, readers))
            alone_s = alone_s or others(one)
            say(f"pair {pair + 1}: p99 between tokens alone, beside {readers}", f"{ms(alone_s)}, {ms(beside_s)}")
            say(
                "  frames to the slow ones, most of the gateway's memory",
                f"{crowd.frames:,}, {crowd.peak_bytes / MIB:.0f} MiB",
            )
            found.append((alone_s, beside_s))
            crowds.append(crowd)
        met = [*judge(found, crowds, usage.rss_bytes, readers), nothing_left(one)]
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--readers", type=int, default=1000)
    flags.add_argument("--pairs", type=int, default=5)
    given = flags.parse_args()
    sys.exit(main(given.readers, given.pairs))
