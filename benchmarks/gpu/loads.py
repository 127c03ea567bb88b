"""The engine on a CUDA card under loads in real time: first tokens at 80 % load, a long prompt among streams, the same
tokens under every disturbance, and minutes of random requests. Random weights, no network; engine and runner in one process.

usage: PYTHONPATH=src python benchmarks/gpu/loads.py [--only ttft,long,exact,random] [--seconds 180] [--json PATH]
`met` and `MISSED` are about figures; what is wrong is said as `WRONG`, and makes the exit status 1.
`--device cpu --quick` proves the program itself, tiny, over the plain reference of the kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from load_exact import check_exact
from load_random import check_random
from load_rig import GREEDY, PATIENT_S, Bench, ChunkWatch, Drive, Stream, gaps_s, percentiles_ms
from msgspec import Struct
from msgspec.structs import replace

from headrace.core.config import EngineConfig, TierTargets
from headrace.core.request import Request
from headrace.engine.loop import Engine
from headrace.runner.cuda.runner import CudaRunner

SECTIONS = ("ttft", "long", "exact", "random")
Row = dict[str, Any]

_TTFT_MS = 500.0
_LOAD = 0.8
_MOST_STEADY = 2.0
# Of twice the steady time between tokens, what a user would promise: the rest is for what predictions miss.
_PROMISED = 0.9


class Arrivals(Struct, frozen=True):
    """A full engine is measured with `saturating` requests; then they come for `ramp_s`, which does not count, and `spell_s`."""

    saturating: int = 1024
    prompt: int = 128
    output: int = 256
    ramp_s: float = 5.0
    spell_s: float = 30.0


class Reading(Struct, frozen=True):
    """A prompt that arrives among streams, which are looked at for `steps` steps before and after it. Streams have long
    prompts themselves, so that their growth hardly lengthens a step; a prompt is given up after `most_s`."""

    streams: int = 64
    stream_prompt: int = 1024
    prompt: int = 65_536
    room: int = 8192
    settling: int = 40
    steps: int = 320
    most_s: float = 45.0


def _request(name: str, chance: np.random.Generator, vocab: int, prompt: int, output: int, tenant: str) -> Request:
    ids = tuple(chance.integers(0, vocab, prompt).tolist())
    return Request(name, tenant, ids, max_tokens=output, sampling=GREEDY)


def check_ttft(bench: Bench) -> list[Row]:
    """Nothing is asked and nothing set: requests of the `plus` tier, as they come. Who is refused has missed the target."""
    load = Arrivals(24, 24, 12, 0.3, 1.5) if bench.quick else Arrivals()
    chance = np.random.default_rng(3)
    with bench.open("8b") as (runner, config):

        def make(name: str) -> Request:
            return _request(name, chance, config.vocab_size, load.prompt, load.output, "bench")

        Drive(Engine(config, runner)).run([(0.0, make("warm")) for _ in range(8)])
        full, waiting = Drive(Engine(config, runner)), [make(f"full {i}") for i in range(load.saturating)]
        patient = [replace(one, ttft_target_s=PATIENT_S, queue_timeout_s=PATIENT_S) for one in waiting]
        capacity = load.saturating / full.run([(0.0, request) for request in patient])
        rate, until_s = _LOAD * capacity, load.ramp_s + load.spell_s
        times = np.cumsum(chance.exponential(1.0 / rate, int(1.5 * rate * until_s) + 10))
        arrivals = [(at_s, make(f"come {i}")) for i, at_s in enumerate(times[times < until_s].tolist())]
        bench.say(f"  capacity {capacity:.1f} requests/s; {len(arrivals)} arrive in {until_s:g} s")
        drive = Drive(Engine(config, runner))
        began_s = drive.now_s()
        drive.run(arrivals)
    counted = [stream for stream in drive.streams.values() if stream.due_s >= began_s + load.ramp_s and stream.at_s]
    ttft, itl = percentiles_ms([stream.ttft_s for stream in counted]), percentiles_ms(gaps_s(counted))
    wrong = [*full.wrong, *drive.wrong, *_unfinished(full), *_unfinished(drive)]
    row: Row = {
        "capacity_requests_per_s": capacity,
        "capacity_tokens_per_s": capacity * load.output,
        "offered_requests_per_s": rate,
        "arrivals": len(arrivals),
        "counted": len(counted),
        "refused": drive.num_refused,
        "preemptions": drive.engine.num_preemptions,
        "ttft_ms": ttft,
        "itl_ms": itl,
        "wrong": wrong,
        "met": ttft["p95"] < _TTFT_MS and not drive.num_refused,
        "text": f"TTFT p50 {ttft['p50']:.0f}, p95 {ttft['p95']:.0f}, p99 {ttft['p99']:.0f} ms (p95 < {_TTFT_MS:.0f}) at {_LOAD:.0%} of"
        f" {capacity:.1f} requests/s = {capacity * load.output:.0f} tok/s; inter-token p99 {itl['p99']:.1f} ms;"
        f" {len(counted)} requests, {drive.num_refused} refused",
    }
    return [row]


def _unfinished(drive: Drive) -> list[str]:
    count = sum(not stream.is_whole for stream in drive.streams.values())
    return [f"{count} requests did not get all their tokens"] if count else []


def check_long(bench: Bench) -> list[Row]:
    """Twice: the prompt is another tenant's and nothing is set; then it is the streams' own tenant's, and their tier's promise
    between tokens (`engine.targets.plus.itl_s`) is what a user would write who wants at most twice the steady time."""
    reading = Reading(4, 16, 600, 400, 8, 30, 10.0) if bench.quick else Reading()
    with bench.open("8b", context=reading.prompt + reading.room) as (runner, config):
        Drive(Engine(config, runner)).run([(0.0, _request("warm", np.random.default_rng(0), 99, 64, 16, "warm"))])
        free = _read(reading, runner, config, "reader", "another tenant's prompt, nothing set")
        promised_s = _PROMISED * _MOST_STEADY * free["before_ms"]["p50"] / 1e3
        targets = config.targets | {"plus": TierTargets(config.targets["plus"].ttft_s, promised_s)}
        case = f"the same tenant's prompt, engine.targets.plus.itl_s = {promised_s:.4f}"
        own = _read(reading, runner, replace(config, targets=targets), "streams", case)
    return [free, own]


def _read(reading: Reading, runner: CudaRunner, config: EngineConfig, tenant: str, case: str) -> Row:
    chance, watch = np.random.default_rng(4), ChunkWatch(runner)
    prompt = _request("prompt", chance, config.vocab_size, reading.prompt, 1, tenant)
    drive = Drive(Engine(config, watch))
    for index in range(reading.streams):
        length, output = reading.stream_prompt, reading.room - reading.stream_prompt
        request = _request(f"stream {index}", chance, config.vocab_size, length, output, "streams")
        assert drive.submit(replace(request, ttft_target_s=PATIENT_S)) is not None
    streams = list(drive.streams.values())
    drive.run_steps(streams[-1], reading.settling)
    since_s = drive.now_s()
    drive.run_steps(streams[-1], reading.steps)
    arrived_s = drive.now_s()
    watch.chunks.clear()
    watch.steps.clear()
    number = drive.submit(prompt)
    assert number is not None, "the prompt was refused"
    read = drive.streams[number]
    while read.ended is None and drive.now_s() < arrived_s + reading.most_s:
        drive.turn()
    drive.engine.abort(number, drive.now_s())
    done_s = drive.now_s()
    drive.run_steps(streams[-1], reading.steps)
    spells = ((since_s, arrived_s), (arrived_s, done_s), (done_s, drive.now_s()))
    figures = [percentiles_ms(gaps_s(streams, *spell)) for spell in spells]
    if any(stream.ended for stream in streams):
        drive.wrong.append("a stream ended before the prompt had its token")
    for each in drive.streams:
        drive.engine.abort(each, drive.now_s())
    while not drive.engine.idle:
        drive.turn()
    return _read_row(reading, case, read, figures, watch.chunks) | {"wrong": drive.wrong, "steps": watch.steps}


def _read_row(reading: Reading, case: str, read: Stream, figures: list[dict[str, float]], chunks: list[int]) -> Row:
    before, among, after = figures
    ratio, later = among["p99"] / before["p99"], among["p99"] / after["p99"]
    least, median, most = (int(size) for size in np.percentile(chunks or [0], [0, 50, 100]))
    told = f"given up after {sum(chunks)} tokens in {reading.most_s:g} s"
    return {
        "case": case,
        "before_ms": before,
        "among_ms": among,
        "after_ms": after,
        "ratio_to_before": ratio,
        "ratio_to_after": later,
        "prompt_tokens": reading.prompt,
        "prompt_ttft_s": read.ttft_s if read.at_s else None,
        "steps_before": reading.steps,
        "chunks": {"count": len(chunks), "least": least, "median": median, "most": most, "all": chunks},
        "met": ratio <= _MOST_STEADY and read.is_whole,
        "text": f"{reading.prompt} tokens among {reading.streams} streams ({case}): inter-token p99 {among['p99']:.2f} ms ="
        f" {ratio:.2f} x the {before['p99']:.2f} before (at most {_MOST_STEADY:g} x; {later:.2f} x the {after['p99']:.2f} after, in"
        f" longer contexts); {f'its TTFT {read.ttft_s:.2f} s' if read.at_s else told}; {len(chunks)} chunks of {least} to {most},"
        f" median {median}",
    }


def run_section(name: str, check: Callable[[], list[Row]], bench: Bench) -> list[Row]:
    since_s = time.perf_counter()
    try:
        rows = check()
    except Exception as error:  # noqa: BLE001 - one broken section must not hide the others
        rows = [{"text": "broke off", "wrong": [f"{type(error).__name__}: {error}"], "met": False}]
    seconds = time.perf_counter() - since_s
    for row in rows:
        row |= {"section": name, "ok": not row["wrong"], "section_seconds": seconds}
        verdict = ("met" if row["met"] else "MISSED") if row["ok"] else "WRONG"
        bench.say(f"{verdict} {name}: {row['text']}")
        for line in row["wrong"][:10]:
            bench.say(f"  wrong: {line}")
    bench.say(f"  {name} took {seconds:.1f} s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=180.0, help="of random load")
    parser.add_argument("--requests", type=int, default=5000, help="at least so many of random load")
    parser.add_argument("--exact-shapes", default="0.6b")
    parser.add_argument("--random-shape", default="135m")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    if options.quick != (options.device == "cpu"):
        parser.error("--quick is how it runs on a CPU: both or neither")
    bench = Bench(options.quick)
    checks: dict[str, Callable[[], list[Row]]] = {
        "ttft": lambda: check_ttft(bench),
        "long": lambda: check_long(bench),
        "exact": lambda: [row for shape in options.exact_shapes.split(",") for row in check_exact(bench, shape)],
        "random": lambda: check_random(bench, options.random_shape, options.seconds, options.requests),
    }
    only = options.only.split(",")
    if not set(only) <= set(SECTIONS):
        parser.error(f"--only takes some of {', '.join(SECTIONS)}")
    report: dict[str, Any] = {
        "card": "none" if bench.quick else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": options.commit,
        "rows": [],
    }
    for name in only:
        report["rows"] += run_section(name, checks[name], bench)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1))
    sys.exit(not all(row["ok"] for row in report["rows"]))


if __name__ == "__main__":
    main()
