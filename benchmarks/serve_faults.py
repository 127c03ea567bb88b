"""Requests by the thousand whose connections, workers and gateway go away at random: each ends once, and rightly.

Some clients lose their connection and read on, some stop their stream, some leave for good; meanwhile workers and
gateways are killed every few seconds, and what workers say comes twice, late, again or not at all. Every token is held
against what the fake must say. Afterwards nothing is left. Run from the repository's root:
.venv/bin/python benchmarks/serve_faults.py [--requests 10000] [--harsh] [--gateways 2] [--json FILE]
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from frame_proxy import Mischief, between
from serve_client import Broken, Reading
from serve_rig import Server, child, fake_config, keep, redis, say, server, verdict

from headrace.cli.load.process import Usage, server_pids, usage_of
from headrace.runner.truth import truth
from headrace.text.byte_vocabulary import byte_vocabulary

PROFILE = {"c0_s": 5e-3, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
# Streams must be there when a gateway is back, and gone when all rest.
GATEWAY_CONFIG = (
    '[gateway]\ndisconnect_grace_s = 3.0\nresume_s = {resume_s}\nprocesses = {gateways}\njournal = "{journal}"\n'
)
WORKERS, USERS = 3, 60
VOCAB_SIZE = 512
SHARES = {"read": 0.5, "cut": 0.3, "stop": 0.1, "leave": 0.1}
REST_S = 25.0
PROGRESS_S = 10.0
MOST_GROWTH_BYTES = 21 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often somebody is killed, in turn, and how long streams are kept that have ended."""

    every_s: float
    resume_s: float


MILD, HARSH = Schedule(4.0, 20.0), Schedule(3.0, 5.0)


class Left(Exception):
    """This client does not come back."""


@dataclass(slots=True)
class Visit:
    """One client: what it asks, and what it does at its `at`th frame."""

    one: Server
    number: int
    rng: random.Random
    end: str = ""
    reading: Reading = field(init=False)
    prompt: list[int] = field(init=False)
    max_tokens: int = field(init=False)
    deed: str = field(init=False)
    _at: int = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.prompt = [rng.randrange(256) for _ in range(rng.randint(5, 100))]
        self.max_tokens = rng.randint(1, 80)
        self.deed = rng.choices(list(SHARES), list(SHARES.values()))[0]
        self._at = rng.randint(1, self.max_tokens)
        body = {
            "model": "default",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "seed": self.number,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self.reading = Reading(self.one, f"fault-{self.number}", "/v1/completions", body, self._act)

    async def _act(self, reading: Reading) -> None:
        self._at -= 1
        if self._at:
            return
        if self.deed == "cut":
            self._at = self.rng.randint(1, self.max_tokens)
            raise Broken
        if self.deed == "leave":
            raise Left
        if self.deed == "stop":
            await stop(self.one, reading.id)

    async def run(self) -> "Visit":
        try:
            await self.reading.run()
        except Left:
            self.end = "left"
            return self
        if self.reading.broken:
            self.end = f"broken: {self.reading.broken[:80]}"
        elif self.reading.num_ends != 1:
            self.end = f"{self.reading.num_ends} ends"
        elif self.reading.error:
            self.end = f"error {self.reading.error['code']}"
        else:
            self.end = "finished"
        return self

    def fault(self) -> str:
        """What is wrong with its tokens; empty where all is right."""
        eos_ids = (byte_vocabulary(VOCAB_SIZE).eos_id,)
        right = truth(
            self.prompt, self.max_tokens, vocab_size=VOCAB_SIZE, eos_ids=eos_ids, seed=self.number, stop_at_eos=False
        )  # fmt: skip
        told = self.reading.ids.get(0, [])
        if told != right[: len(told)]:
            return f"{self.number}: a wrong token"
        if self.end == "finished" and len(told) != len(right):
            return f"{self.number}: {len(told)} tokens of {len(right)}"
        return f"{self.number}: a frame came twice" if self.reading.repeated else ""


async def stop(one: Server, id: str) -> None:
    """It may be over, or its gateway away: then the client reads on."""
    url = urlsplit(one.url)
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"DELETE /v1/streams/{id} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {one.key}\r\n\r\n"
        writer.write(head.encode())
        await reader.readline()
        writer.close()


async def strike(one: Server, victims: list[str], every_s: float, blows: Counter[str]) -> None:
    for number in range(1_000_000):
        await asyncio.sleep(every_s)
        victim = victims[number % len(victims)]
        try:
            os.kill(child(one.pid, f"headrace: {victim}"), signal.SIGKILL)
        except (SystemExit, OSError):
            blows["not back yet"] += 1
            continue
        blows[victim] += 1


def victims_of(gateways: list[str]) -> list[str]:
    """In turn; a gateway as every third, and never the next before the last is back."""
    workers = [f"worker fake {index}" for index in range(WORKERS)]
    return [name for gateway in gateways for name in (workers[0], gateway, *workers[1:], *workers[:2])]


async def visit_all(one: Server, requests: int, seed: int) -> list[Visit]:
    visits: list[Visit] = []
    telling = asyncio.create_task(tell_progress(visits))
    rng = random.Random(seed)
    numbers = iter(range(seed * 1_000_000, seed * 1_000_000 + requests))

    async def user() -> None:
        for number in numbers:
            visits.append(await Visit(one, number, random.Random(rng.random())).run())

    try:
        await asyncio.gather(*(user() for _ in range(USERS)))
    finally:
        telling.cancel()
    return visits


async def tell_progress(visits: list[Visit]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        print(f"{len(visits):,} are over", file=sys.stderr, flush=True)


async def usages(one: Server) -> dict[str, Usage]:
    """By title, after a rest: who died has another process id."""
    await asyncio.sleep(REST_S)
    port = urlsplit(one.url).port
    assert port is not None
    found = [usage for pid in server_pids(port) if (usage := usage_of(pid)) is not None]
    return {usage.title: usage for usage in found if usage.title.startswith("headrace: ")}


def judge(visits: list[Visit], requests: int) -> list[bool]:
    ends = Counter(visit.end for visit in visits)
    told = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
    bad = [visit for visit in visits if visit.end.startswith("broken") or visit.end.endswith(" ends")]
    faults = [fault for visit in visits if (fault := visit.fault())]
    tokens = sum(len(visit.reading.ids.get(0, [])) for visit in visits)
    failed = sum(count for end, count in ends.items() if end.startswith("error") and "cancelled" not in end)
    say("connections per request", f"{sum(visit.reading.num_connections for visit in visits) / requests:.2f}")
    say("refused with Retry-After and sent again", f"{sum(visit.reading.refusals for visit in visits):,}")
    met = [
        verdict(len(visits) == requests and not bad, f"one end each: {told}", "all"),
        verdict(not faults, f"{tokens:,} tokens checked, {len(faults)} replies wrong", "none"),
        verdict(not failed, f"{failed} ended by an error they did not ask for", "none"),
    ]
    for what in [*faults[:3], *(f"{visit.reading.id}: {visit.end}" for visit in bad[:3])]:
        say(f"  {what}", "")
    return met


def left_over(one: Server) -> dict[str, float]:
    """The most that any gateway knows of: who answers is not for us to choose."""
    found: list[dict[str, float]] = []
    names = ("open_streams", "replica_running", "replica_waiting", "loop_tasks")
    for _ in range(10):
        left = {name: one.gauge(f"headrace_{name}") for name in names}
        left["blocks"] = one.gauge("headrace_replica_total_blocks") - one.gauge("headrace_replica_free_blocks")
        found.append(left)
    return {name: max(left[name] for left in found) for name in found[0]}


def judge_rest(tasks: float, left: dict[str, float], before: dict[str, Usage], after: dict[str, Usage]) -> list[bool]:
    tasks_left = left.pop("loop_tasks")
    met = [
        verdict(not any(left.values()), f"left over: {left}", "nothing"),
        verdict(tasks_left <= tasks, f"tasks of a gateway's loop: {tasks:.0f} -> {tasks_left:.0f}", "no more"),
    ]
    for title, start in before.items():
        now = after.get(title)
        if now is None:
            met.append(verdict(False, f"{title}: gone", "back"))
            continue
        grown = now.rss_bytes - start.rss_bytes
        told = (
            f"{start.rss_bytes / MIB:.1f} MiB {grown / MIB:+.1f}, descriptors {start.descriptors} -> {now.descriptors}"
        )
        # A gateway that has just been started has not opened all that one has which served.
        is_met = grown <= MOST_GROWTH_BYTES and now.descriptors <= start.descriptors
        met.append(verdict(is_met, f"{title}: {told}", f"{MOST_GROWTH_BYTES / MIB:.0f} MiB, no more descriptors"))
    return met


async def run(one: Server, requests: int, schedule: Schedule, gateways: list[str]) -> tuple[list[bool], dict[str, Any]]:
    blows: Counter[str] = Counter()
    async with between(one, gateways, Mischief(), seed=1) as frames:
        await visit_all(one, min(1000, requests), 1)
        before = await usages(one)
        tasks = (await asyncio.to_thread(left_over, one))["loop_tasks"]
        assert len([title for title in before if title.startswith("headrace: gateway")]) == len(gateways)
        frames.clear()
        started_s = time.perf_counter()
        striking = asyncio.create_task(strike(one, victims_of(gateways), schedule.every_s, blows))
        visits = await visit_all(one, requests, 2)
        striking.cancel()
        seconds = time.perf_counter() - started_s
        say(f"{requests:,} requests, {dict(blows)} killed", f"{seconds:.1f} s")
        say("frames of workers, and what was done to them", str(dict(frames)))
        met = judge(visits, requests)
        after = await usages(one)
        left = await asyncio.to_thread(left_over, one)
    met += judge_rest(tasks, dict(left), before, after)
    ends = Counter(visit.end for visit in visits)
    figures = {"seconds": seconds, "killed": blows, "frames": frames, "ends": ends, "left": left, "met": met}
    return met, figures | {"deeds": Counter(visit.deed for visit in visits)}


def main(requests: int, schedule: Schedule, num_gateways: int, path: Path | None) -> int:
    gateways = ["gateway"] if num_gateways == 1 else [f"gateway {index}" for index in range(num_gateways)]
    with redis() if num_gateways > 1 else nullcontext("file") as journal:
        more = GATEWAY_CONFIG.format(resume_s=schedule.resume_s, gateways=num_gateways, journal=journal)
        config = fake_config(PROFILE, slots=64, workers=WORKERS, more=more, vocab_size=VOCAB_SIZE)
        with server(config) as one:
            met, figures = asyncio.run(run(one, requests, schedule, gateways))
    keep(path, {"requests": requests, "every_s": schedule.every_s, "resume_s": schedule.resume_s, **figures})
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--requests", type=int, default=10_000)
    flags.add_argument("--harsh", action="store_true", help="streams are kept for 5 s, and a kill falls every 3 s")
    flags.add_argument("--gateways", type=int, default=1, help="more than one share a Redis of their own")
    flags.add_argument("--json", type=Path, help="where to keep every figure")
    given = flags.parse_args()
    sys.exit(main(given.requests, HARSH if given.harsh else MILD, given.gateways, given.json))
