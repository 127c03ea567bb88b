"""Prints what a journal costs the gateway: CPU of one append and of each entry, by journal and streams a step; and,
with --restart, what a gateway that begins again waits for over a journal of so many MiB in files.

Run from the repository's root: PYTHONPATH=src:. .venv/bin/python benchmarks/journal.py [--restart] [--json]
Needs redis-server, but not for --restart. `us_per_append` is this process's CPU; Redis' own, in its process, is not in
it. Of a restart: `known_s` until every stream is known, `open_s` until those that have not ended are there, `stall_s` the
longest that the loop did not turn meanwhile, `find_s` to find one that ended, `kept_mib` what the process has grown by.
"""

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from redis.asyncio import Redis

from headrace.streams.file_journal import FileJournal
from headrace.streams.journal import Birth, Entry, Journal, Kept, MemoryJournal
from headrace.streams.record import Ending, Part, Record, Usage
from headrace.streams.redis_journal import RedisJournal
from tests.services import redis_server

SECRET = b"a secret of this benchmark"
TOKENS = 100
SECONDS = 1.0
ROUNDS = 2
# Appends that may wait for their answer: the gateway would not run further ahead of what it may send.
AHEAD = 8
# Streams a step, and so those that have not ended, of a journal that a restart finds.
OPEN = 256


def steps(streams: int, life: int) -> list[list[Entry]]:
    """All steps of so many replies of 100 tokens, one word a token; the last ends them."""
    names = [f"chatcmpl-{life:08x}{stream:024x}" for stream in range(streams)]
    births = [Birth(name, "acme", "tiny", "fp-0123456789", 1.0, bytes(400), bytes(60)) for name in names]
    made = []
    for number in range(1, TOKENS + 1):
        part = Part(0, (1000 + number,), " word", index=number - 1, offset=5 * (number - 1))
        ending = Ending(Usage(10, 0, TOKENS), stages={"decode": 1.0}) if number == TOKENS else None
        record = Record(number, () if ending else (part,), ending, step=number, age_s=number / 50)
        made.append(
            [
                Entry("acme", name, record, birth if number == 1 else None)
                for name, birth in zip(names, births, strict=True)
            ]
        )
    return made


async def measure(journal: Journal, streams: int) -> dict[str, float]:
    spent_s = wall_s = 0.0
    appends = answered = life = 0
    more = asyncio.Event()

    def then(refused: frozenset[tuple[str, str]]) -> None:
        nonlocal answered
        answered += 1
        more.set()

    # Making the entries counts for when to stop, not as cost: the journal in memory takes next to no time.
    stop_s = time.perf_counter() + SECONDS
    while time.perf_counter() < stop_s:
        life += 1
        made = steps(streams, life)
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        for entries in made:
            journal.append(entries, then)
            appends += 1
            while appends - answered >= AHEAD:  # asleep: waiting must not count as the journal's CPU
                more.clear()
                await more.wait()
        while answered < appends:
            more.clear()
            await more.wait()
        spent_s += time.process_time() - cpu_s
        wall_s += time.perf_counter() - begin_s
    assert journal.is_keeping, "it did not keep all of this"
    return {
        "appends_per_s": appends / wall_s,
        "us_per_append": 1e6 * spent_s / appends,
        "us_per_entry": 1e6 * spent_s / appends / streams,
    }


async def measure_kind(kind: str, streams: int, folder: Path, address: str) -> dict[str, float]:
    if kind == "redis":
        async with Redis.from_url(address) as client:
            await client.flushall()
            journal = RedisJournal(client, SECRET, "bench")
            await journal.recover()
            found = await measure(journal, streams)
            await journal.close()
            return found
    kept: Journal = MemoryJournal() if kind == "memory" else FileJournal(folder / str(time.monotonic_ns()), SECRET)
    await kept.recover()
    found = await measure(kept, streams)
    await kept.close()
    return found


def fill(folder: Path, size_mib: int, num_open: int, result: Any) -> None:
    """A life that says so much and is killed in the middle of a step: so many streams have not ended."""
    journal = FileJournal(folder, SECRET, max_bytes=1 << 40)
    life = 0
    while _size_mib(folder) < size_mib:
        life += 1
        for entries in steps(num_open, life):
            journal.append(entries, lambda refused: None)
    for entries in steps(num_open, life + 1)[: TOKENS // 2]:
        journal.append(entries, lambda refused: None)
    result.put([f"chatcmpl-{one:08x}{0:024x}" for one in (1, life)])


def restart(folder: Path, ended: list[str], result: Any) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result.put(runner.run(measure_restart(folder, ended)))


async def measure_restart(folder: Path, ended: list[str]) -> dict[str, float]:
    gc.collect()
    before_mib, begin_s = _resident_mib(), time.perf_counter()
    stalls = [0.0]
    watching = asyncio.create_task(watch(stalls))
    await asyncio.sleep(0.01)
    journal = FileJournal(folder, SECRET, max_bytes=1 << 40)
    assert not await journal.knows("acme", "never")
    known_s = time.perf_counter() - begin_s
    kept = await journal.recover()
    open_s = time.perf_counter() - begin_s
    finds = []
    for name in ended:
        find_s = time.perf_counter()
        found = await journal.find("acme", name)
        finds.append(time.perf_counter() - find_s)
        assert isinstance(found, Kept) and len(found.records) == TOKENS, found
    num_open, num_records = len(kept), sum(len(one.records) for one in kept)
    with_open_mib = _resident_mib() - before_mib
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    await journal.close()
    return {
        "known_s": known_s,
        "open_s": open_s,
        "stall_s": max(stalls),
        "find_s": max(finds),
        "kept_mib": with_open_mib,
        "open": num_open,
        "records": num_records,
    }


async def watch(stalls: list[float]) -> None:
    while True:
        begin_s = time.perf_counter()
        await asyncio.sleep(0.001)
        stalls.append(time.perf_counter() - begin_s - 0.001)


def _size_mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / (1 << 20)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def apart(work: Callable[..., None], *arguments: Any) -> Any:
    """What it says, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=work, args=(*arguments, result))
    process.start()
    said = result.get()
    process.join()
    return said


def restarts() -> list[dict[str, Any]]:
    rows = []
    for size_mib in (32, 128, 256):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "journal"
            ended = apart(fill, folder, size_mib, OPEN)
            for indices in ("all", "none"):
                if indices == "none":
                    for path in folder.glob("*.index"):
                        path.unlink()
                rows.append({"size_mib": size_mib, "indices": indices, **apart(restart, folder, ended)})
    return rows


def main() -> None:
    table = "--json" not in sys.argv[1:]
    if "--restart" in sys.argv[1:]:
        rows = restarts()
        if table:
            print("  ".join(f"{name:>9}" for name in rows[0]))
            for row in rows:
                print(
                    "  ".join(f"{value:9.3f}" if isinstance(value, float) else f"{value:>9}" for value in row.values())
                )
    else:
        rows = appends()
        if table:
            print(f"{'journal':8} {'streams':>8} {'appends/s':>12} {'µs/append':>12} {'µs/entry':>10}")
            for row in rows:
                print(
                    f"{row['journal']:8} {row['streams']:8} {row['appends_per_s']:12,.0f}"
                    f" {row['us_per_append']:12,.1f} {row['us_per_entry']:10.2f}"
                )
    if not table:
        print(json.dumps({"machine": platform.machine(), "python": platform.python_version(), "rows": rows}, indent=1))


def appends() -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as address:
        for kind in ("memory", "file", "redis"):
            for streams in (1, 32, 64, 256):
                rounds = []
                for _ in range(ROUNDS):
                    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                        rounds.append(runner.run(measure_kind(kind, streams, Path(name), address)))
                best = min(rounds, key=lambda row: row["us_per_append"])
                rows.append({"journal": kind, "streams": streams, **best})
    return rows


if __name__ == "__main__":
    main()
