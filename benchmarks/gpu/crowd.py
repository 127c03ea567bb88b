"""A crowd of clients that ask a server at once, in processes of their own, and what it and they used meanwhile.

Owns the client processes and the figures of a round. Starts no server; judges nothing.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))
from serve_rig import ms, say, with_variable

from headrace.cli.load.process import Usage, usage_of

HERE = Path(__file__).resolve().parent
MODEL = "random"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Started(NamedTuple):
    url: str
    key: str
    port: int
    start: dict[str, Any]


@contextmanager
def clients(one: Started, count: int, load: tuple[int, ...], ids_below: int) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that are ready to ask; together they have all the requests."""
    environment = with_variable("HEADRACE_API_KEY", one.key)
    with ExitStack() as stack:
        found = []
        for number in range(count):
            requests = load[0] // count + (number < load[0] % count)
            words = (one.url, MODEL, *map(str, (requests, *load[1:], ids_below, 1000 + number)))
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(HERE / "crowd_client.py"), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
            stack.callback(process.kill)
            found.append(process)
        for process in found:
            _answer(process)
        yield found


def _answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit("a client process ended")
    return line


def _read(file: Path) -> Any:
    told = json.loads(file.read_text())
    file.unlink()
    return told


def crowd(asking: list["subprocess.Popen[str]"], number: int, watched: list[int]) -> dict[str, Any]:
    """One round: all at once, until the last has its last token."""
    go_s = time.perf_counter() + 0.5
    for process in asking:
        assert process.stdin is not None
        process.stdin.write(f"{number} {go_s}\n")
        process.stdin.flush()
    time.sleep(max(0.0, go_s - time.perf_counter()))
    before, since_s = {pid: _look(pid) for pid in watched}, time.perf_counter()
    told = [_read(Path(_answer(process).strip())) for process in asking]
    looked_s = time.perf_counter() - since_s
    after = {pid: _look(pid) for pid in watched}
    outcomes = [outcome for each in told for outcome in each["outcomes"]]
    ended_s = max(outcome["ended_s"] for outcome in outcomes)
    pieces = [np.array(outcome["pieces_s"]) for outcome in outcomes]
    gaps = np.concatenate([np.diff(each) for each in pieces])
    tokens = sum(outcome["output_tokens"] for outcome in outcomes)
    bad = [f"{outcome['state']}: {outcome['told']}" for outcome in outcomes if outcome["state"] != "finished"]
    return {
        "seconds": ended_s - go_s,
        "tokens": tokens,
        "prompt_tokens": sum(outcome["prompt_tokens"] for outcome in outcomes),
        "tokens_per_s": tokens / (ended_s - go_s),
        "ttft_s": _quantiles(np.array([each[0] - go_s for each in pieces if len(each)])),
        "itl_s": _quantiles(gaps),
        "frames": sum(each["frames"] for each in told),
        "tokens_per_piece": tokens / max(1, sum(map(len, pieces))),
        "late_s": max(each["started_s"] for each in told) - go_s,
        "client_cpu_shares": [each["cpu_s"] / (each["ended_s"] - each["started_s"]) for each in told],
        "processes": [_shares(before[pid], after[pid], looked_s) for pid in watched],
        "bad": bad[:5],
        "num_bad": len(bad),
    }


def _quantiles(values: Any) -> dict[str, float]:
    return {
        name: float(np.percentile(values, share))
        for name, share in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100))
    }


def _look(pid: int) -> tuple[Usage | None, dict[int, float]]:
    """A process, and the CPU time of each of its threads."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        threads[int(task.name)] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return usage_of(pid), threads


def _shares(
    before: tuple[Usage | None, dict[int, float]], after: tuple[Usage | None, dict[int, float]], seconds: float
) -> dict[str, Any]:
    (first, threads), (last, later) = before, after
    assert first is not None and last is not None
    used = {thread: (cpu_s - threads.get(thread, 0.0)) / seconds for thread, cpu_s in later.items()}
    busiest = sorted(used.items(), key=lambda item: -item[1])[:3]
    return {
        "pid": last.pid,
        "title": last.title,
        "cores": (last.cpu_s - first.cpu_s) / seconds,
        # The main thread of a worker turns its engine.
        "threads": {"main" if thread == last.pid else str(thread): round(share, 3) for thread, share in busiest},
        "rss_bytes": last.rss_bytes,
    }


def tell(round_: dict[str, Any], number: int) -> None:
    name = f"round {number}"
    say(
        f"{name}: output tokens/s over HTTP",
        f"{round_['tokens_per_s']:,.0f} ({round_['tokens']:,} in {round_['seconds']:.2f} s)",
    )
    say(f"{name}: time between pieces, p50, p95, p99", ", ".join(ms(round_["itl_s"][p]) for p in ("p50", "p95", "p99")))
    say(f"{name}: first piece, p50, p95, p99", ", ".join(ms(round_["ttft_s"][p]) for p in ("p50", "p95", "p99")))
    say(
        f"{name}: tokens per piece, client processes' cores",
        f"{round_['tokens_per_piece']:.2f}, {max(round_['client_cpu_shares']):.0%} at most",
    )
    for process in round_["processes"]:
        say(f"{name}:   {process['title'][:44]}", f"{process['cores']:.2f} cores, threads {process['threads']}")
    for line in round_["bad"]:
        print(f"{name}: {line}", flush=True)
