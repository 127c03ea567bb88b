"""Prints what a journal costs the gateway: CPU of one append and of each entry, by journal and streams a step.

Run from the repository's root: PYTHONPATH=src:. .venv/bin/python benchmarks/journal.py [--json]
Needs redis-server. `us_per_append` is this process's CPU; Redis' own, in its process, is not in it.
"""

import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from redis.asyncio import Redis

from headrace.streams.file_journal import FileJournal
from headrace.streams.journal import Birth, Entry, Journal, MemoryJournal
from headrace.streams.record import Ending, Part, Record, Usage
from headrace.streams.redis_journal import RedisJournal
from tests.services import redis_server

SECRET = b"a secret of this benchmark"
TOKENS = 100
SECONDS = 1.0
ROUNDS = 2
# Appends that may wait for their answer: the gateway would not run further ahead of what it may send.
AHEAD = 8


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


def main() -> None:
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
    if "--json" in sys.argv[1:]:
        print(json.dumps({"machine": platform.machine(), "python": platform.python_version(), "rows": rows}, indent=1))
        return
    print(f"{'journal':8} {'streams':>8} {'appends/s':>12} {'µs/append':>12} {'µs/entry':>10}")
    for row in rows:
        print(
            f"{row['journal']:8} {row['streams']:8} {row['appends_per_s']:12,.0f}"
            f" {row['us_per_append']:12,.1f} {row['us_per_entry']:10.2f}"
        )


if __name__ == "__main__":
    main()
