"""Two workers and two gateways behind one port, restarted one after the other while clients ask 50 times a second.

Two rounds: clients that open a connection for each request, and the official client with its default retries. Every
other answer is streamed. Whatever a client sees but a whole answer is a failure. Run from the repository's root:
.venv/bin/python benchmarks/serve_rolling.py [--rate 50] [--rolls 1] [--json FILE]
"""

import argparse
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
from serve_client import quantile
from serve_rig import Server, child, fake_config, keep, ms, redis, say, server, verdict

PROFILE = {"c0_s": 5e-3, "c_in_s": 1e-6, "c_out_s": 1e-6, "c_kv_s": 0.0, "c_att_s": 0.0}
GATEWAY = '[gateway]\nprocesses = 2\njournal = "{journal}"\n'
CHILDREN = ("gateway 0", "gateway 1", "worker fake 0", "worker fake 1")
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
BEFORE_S = AFTER_S = 2.0
MOST_ROLL_S = 150.0
# Requests at once: an answer takes a tenth of a second, and more where it waits for a worker.
THREADS = 64


@dataclass(slots=True)
class Tally:
    """What clients saw. Latencies are counted from when a request was due."""

    latencies_s: list[float] = field(default_factory=list)
    late_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)


def with_a_connection_each(one: Server) -> Callable[[int], None]:
    url = urlsplit(one.url)
    headers = {"Authorization": f"Bearer {one.key}", "Content-Type": "application/json"}

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection(url.netloc, timeout=60)
        try:
            is_streamed = number % 2 == 1
            connection.request("POST", "/v1/chat/completions", json.dumps({**BODY, "stream": is_streamed}), headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise RuntimeError(f"{response.status} {body[:200]!r}")
            if is_streamed and (not body.endswith(b"data: [DONE]\n\n") or b'"error"' in body):
                raise RuntimeError(f"ended with {body[-200:]!r}")
        finally:
            connection.close()

    return ask


def as_the_official_client(one: Server) -> Callable[[int], None]:
    client = openai.OpenAI(base_url=f"{one.url}/v1", api_key=one.key)

    def ask(number: int) -> None:
        if number % 2:
            chunks = list(client.chat.completions.create(**BODY, stream=True))
            if not any(chunk.choices and chunk.choices[0].finish_reason for chunk in chunks):
                raise RuntimeError("a stream without an end")
        elif not client.chat.completions.create(**BODY).choices:
            raise RuntimeError("no choices")

    return ask


def load(ask: Callable[[int], None], rate: float, over: threading.Event) -> Tally:
    """Until it is over: a request every 1/rate seconds, whether those before are answered or not."""
    tally = Tally()

    def one(number: int, due_s: float) -> None:
        tally.late_s = max(tally.late_s, time.monotonic() - due_s)
        try:
            ask(number)
        except Exception as failed:  # noqa: BLE001 - counted, whatever it is
            tally.failures[f"{type(failed).__name__}: {failed}"[:200]] += 1
        tally.latencies_s.append(time.monotonic() - due_s)

    began_s = time.monotonic()
    with ThreadPoolExecutor(THREADS) as threads:
        number = 0
        while not over.is_set():
            due_s = began_s + number / rate
            time.sleep(max(0.0, due_s - time.monotonic()))
            threads.submit(one, number, due_s)
            number += 1
    return tally


def roll(one: Server) -> float:
    """Seconds until every process is another."""
    before = {name: child(one.pid, f"headrace: {name}") for name in CHILDREN}
    began_s = time.monotonic()
    os.kill(one.pid, signal.SIGUSR2)
    while time.monotonic() - began_s < MOST_ROLL_S:
        time.sleep(0.2)
        try:
            now = {name: child(one.pid, f"headrace: {name}") for name in CHILDREN}
        except (SystemExit, OSError):
            continue
        if all(now[name] != before[name] for name in CHILDREN) and one.gauge("headrace_replica_ready") == 2:
            return time.monotonic() - began_s
    sys.exit("the rolling restart did not end")


def round_of(name: str, one: Server, ask: Callable[[int], None], rate: float, rolls: int) -> tuple[list[bool], Any]:
    over, found = threading.Event(), []
    loading = threading.Thread(target=lambda: found.append(load(ask, rate, over)))
    began_s = time.monotonic()
    loading.start()
    try:
        time.sleep(BEFORE_S)
        seconds = [roll(one) for _ in range(rolls)]
        time.sleep(AFTER_S)
    finally:
        over.set()
        loading.join()
    [tally] = found
    asked, wall_s = len(tally.latencies_s), time.monotonic() - began_s
    p50_s, p99_s = quantile(tally.latencies_s, 0.5), quantile(tally.latencies_s, 0.99)
    say(f"{name}: rolling restarts", ", ".join(f"{each:.1f} s" for each in seconds))
    say(
        f"{name}: {asked:,} requests, latency p50, p99, most", f"{ms(p50_s)}, {ms(p99_s)}, {ms(max(tally.latencies_s))}"
    )
    say(f"{name}: sent late by at most", ms(tally.late_s))
    failed = sum(tally.failures.values())
    for why, count in tally.failures.most_common(5):
        say(f"  {count} x {why}", "")
    met = [
        verdict(not failed, f"{name}: {failed} of {asked:,} failed", "none"),
        verdict(asked / wall_s >= 0.95 * rate, f"{name}: {asked / wall_s:.1f} requests/s meanwhile", f"{rate:g}"),
    ]
    figures = {"asked": asked, "per_s": asked / wall_s, "failures": tally.failures, "roll_s": seconds}
    return met, figures | {"p50_s": p50_s, "p99_s": p99_s, "most_s": max(tally.latencies_s), "late_s": tally.late_s}


def main(rate: float, rolls: int, path: Path | None) -> int:
    met: list[bool] = []
    figures: dict[str, Any] = {"rate": rate}
    with redis() as journal:
        config = fake_config(PROFILE, workers=2, more=GATEWAY.format(journal=journal))
        with server(config) as one:
            for name, client in (("a connection each", with_a_connection_each), ("openai", as_the_official_client)):
                found, figures[name] = round_of(name, one, client(one), rate, rolls)
                met += found
    keep(path, figures | {"met": met})
    return 0 if all(met) else 1


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rate", type=float, default=50.0)
    flags.add_argument("--rolls", type=int, default=1)
    flags.add_argument("--json", type=Path, help="where to keep every figure")
    given = flags.parse_args()
    sys.exit(main(given.rate, given.rolls, given.json))
