"""A thousand clients that take one token a second, beside 32 that take all: five alternating pairs, with and without.

Over WebSockets with a window of 8, which may never be exceeded, their sequences pause and go on with them; then they
take nothing more, and each is ended with an error frame. As server-sent events (`--face events`) they never read faster;
each is cut off in the end, and finds the error frame when it reads on. The gateway's memory must be bounded meanwhile, and
the others' time between tokens must stay what it is without them. Run from the repository's root:
.venv/bin/python benchmarks/serve_slow_readers.py [--face events] [--readers 1000] [--pairs 5] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from serve_rig import Server, apart, child, fake_config, keep, load, ms, say, server, verdict
from slow_events import SlowReader

from headrace.cli.load.process import usage_of
from tests.socket_client import Closed, SocketClient, opened

# Ids beyond the short words are whole words too: every token says something.
VOCAB_SIZE = 60_000
PROFILE = {"c0_s": 2e-2, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
WINDOW = 8
# A stream whose only reader has more to read than this is paused (over a socket it is before, for its reader's pace), and
# how long a reader may be so far behind, or take nothing: long enough to look at the others, or they would be looked at
# while a thousand are cut off.
UNREAD_BYTES = {"socket": 4096, "events": 512}
UNREAD_S = 30.0
GATEWAY = """[gateway]
max_unread_bytes = {unread_bytes}
max_unread_s = {unread_s}
disconnect_grace_s = 0.0
resume_s = {resume_s}
"""
# Until all have begun and their sequences have paused; with events the kernel's buffers are filled before.
RAMP_S = 9.0
MOST_RAMP_S = 120.0
TOKENS = {"socket": 2000, "events": 8000}
OTHERS = ("--together", "32", "--prompt", "20", "--output", "250")
# Of the gateway's memory. Over a socket a sequence pauses a second after it has outrun its reader: some 75 tokens, and 70 KiB
# with the connection (measured), once for all crowds. With events some five hundred tokens are said before buffers are
# full; they are kept to be read on.
MOST_BYTES_EACH = {"socket": 128 << 10, "events": 640 << 10}
MIB = 1 << 20


@dataclass(slots=True)
class Crowd:
    """What the slow readers saw, and the most that the gateway held meanwhile."""

    ends: Counter[str] = field(default_factory=Counter)
    most_in_flight: int = 0
    frames: int = 0
    peak_bytes: int = 0
    repeated: int = 0
    # How many were there until the others were done.
    num_beside: int = 0
    # Frames a second of each, where they came slowly.
    rates: list[float] = field(default_factory=list)
    has_enough: bool = False


async def slow_reader(one: Server, port: int, number: int, crowd: Crowd) -> None:
    """One token a second, then none, until the server has had enough."""
    try:
        async with opened(port, one.key) as client:
            await client.say(type="start", id="a", api="completions", body=body_of(number, "socket"), window=WINDOW)
            started = await client.hear()
            if started["type"] != "started":
                crowd.ends[f"not started: {started['error']['code']}"] += 1
                return
            crowd.ends[await _read(client, started["stream"], crowd)] += 1
    except (Closed, OSError) as error:
        crowd.ends[f"cut: {error!r}"] += 1


def body_of(number: int, face: str) -> dict[str, Any]:
    asked = {"model": "fake", "prompt": f"Reader {number}", "max_tokens": TOKENS[face]}
    return {**asked, "ignore_eos": True, "seed": number, "stream": True}


async def slow_events(one: Server, number: int, crowd: Crowd) -> None:
    """One token a second, until it is cut off; then the rest, which ends with an error."""
    reader = SlowReader(one, f"slow-{time.time_ns()}-{number}", body_of(number, "events"))
    began_s = time.monotonic()
    crowd.ends[await reader.run()] += 1
    crowd.frames += reader.frames
    crowd.repeated += reader.repeated
    if reader.cut_s is not None:
        crowd.rates.append(reader.frames / (reader.cut_s - began_s))


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


async def beside(one: Server, readers: int, face: str) -> tuple[float, Crowd]:
    """The others' p99 between tokens, with a crowd around it."""
    crowd, port = Crowd(), urlsplit(one.url).port
    assert port is not None
    pid = child(one.pid, "headrace: gateway")
    if face == "socket":
        tasks = [asyncio.create_task(slow_reader(one, port, number, crowd)) for number in range(readers)]
    else:
        tasks = [asyncio.create_task(slow_events(one, number, crowd)) for number in range(readers)]

    async def watch() -> None:
        while True:
            usage = usage_of(pid)
            crowd.peak_bytes = max(crowd.peak_bytes, usage.rss_bytes if usage else 0)
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(RAMP_S)
    began_s = time.monotonic()
    while (num := await asyncio.to_thread(running, one)) and time.monotonic() - began_s < MOST_RAMP_S:
        await asyncio.sleep(0.5)
    say("  sequences that run while the slow ones are paused", f"{num:.0f}, {time.monotonic() - began_s:.0f} s later")
    p99_s = await asyncio.to_thread(others, one)
    crowd.num_beside = readers - sum(crowd.ends.values())
    crowd.has_enough = True
    await asyncio.gather(*tasks)
    watching.cancel()
    return p99_s, crowd


def running(one: Server) -> float:
    return one.gauge("headrace_replica_running")


def others(one: Server) -> float:
    report = load(one.url, one.key, *OTHERS, "--seed", str(time.time_ns() % 1_000_000))
    return float(report["runs"][0]["overall"]["itl_s"]["p99"])


def judge(
    pairs: list[tuple[float, float]], crowds: list[Crowd], start_bytes: int, readers: int, face: str
) -> list[bool]:
    ratios = [beside_s / alone_s for alone_s, beside_s in pairs]
    ends = sum((crowd.ends for crowd in crowds), Counter())
    grown = max(crowd.peak_bytes for crowd in crowds) - start_bytes
    most = max(crowd.most_in_flight for crowd in crowds)
    told = ", ".join(f"{ratio:.2f}x" for ratio in ratios)
    if face == "socket":
        own = verdict(most <= WINDOW, f"at most {most} frames were not acknowledged", f"{WINDOW}")
    else:
        repeated = sum(crowd.repeated for crowd in crowds)
        own = verdict(not repeated, f"{repeated} frames came twice to those who read on", "none")
    return [
        verdict(median(ratios) <= 1.3, f"the others' p99 between tokens: {told}", "median 1.3x"),
        verdict(set(ends) == {"client_too_slow"}, f"each ended with an error frame: {dict(ends)}", "client_too_slow"),
        own,
        verdict(all(crowd.num_beside == readers for crowd in crowds), "all were there beside the others", f"{readers}"),
        verdict(
            grown <= readers * MOST_BYTES_EACH[face],
            f"the gateway grew from {start_bytes / MIB:.0f} by {grown / MIB:.0f} MiB, the peak of all pairs",
            f"{readers * MOST_BYTES_EACH[face] / MIB:.0f} MiB",
        ),
    ]


def nothing_left(one: Server) -> bool:
    time.sleep(3.0)
    left = {name: one.gauge(f"headrace_{name}") for name in ("open_streams", "replica_running", "replica_waiting")}
    left["blocks"] = one.gauge("headrace_replica_total_blocks") - one.gauge("headrace_replica_free_blocks")
    return verdict(not any(left.values()), f"left over: {left}", "nothing")


def main(readers: int, pairs: int, face: str, path: Path | None) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    more = GATEWAY.format(
        unread_s=UNREAD_S, unread_bytes=UNREAD_BYTES[face], resume_s=1.0 if face == "socket" else 120.0
    )
    config = fake_config(
        PROFILE, slots=readers + 100, blocks=max(32_768, 40 * readers), more=more, vocab_size=VOCAB_SIZE
    )
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
            beside_s, crowd = asyncio.run(beside(one, readers, face))
            alone_s = alone_s or others(one)
            say(f"pair {pair + 1}: p99 between tokens alone, beside {readers}", f"{ms(alone_s)}, {ms(beside_s)}")
            say(
                "  frames to the slow ones, most of the gateway's memory",
                f"{crowd.frames:,}, {crowd.peak_bytes / MIB:.0f} MiB",
            )
            if crowd.rates:
                say("  frames a second that each took, median", f"{median(crowd.rates):.2f}")
            found.append((alone_s, beside_s))
            crowds.append(crowd)
        met = [*judge(found, crowds, usage.rss_bytes, readers, face), nothing_left(one)]
    figures = {"face": face, "readers": readers, "start_bytes": usage.rss_bytes, "p99_s": found, "met": met}
    keep(path, figures | {"crowds": [{"ends": crowd.ends, "peak_bytes": crowd.peak_bytes} for crowd in crowds]})
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--face", choices=tuple(TOKENS), default="socket")
    flags.add_argument("--readers", type=int, default=1000)
    flags.add_argument("--pairs", type=int, default=5)
    flags.add_argument("--json", type=Path, help="where to keep every figure")
    given = flags.parse_args()
    sys.exit(main(given.readers, given.pairs, given.face, given.json))
