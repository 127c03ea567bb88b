"""The same tokens alone, under random arrivals, after preemption, behind cached prefixes, in other chunks, and replayed.

Of the row-exact runner: not one token of a greedy stream or of a drawn one may differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from load_rig import GREEDY, PATIENT_S, Bench, ChunkWatch, Drive, hashed
from msgspec import Struct
from msgspec.structs import replace

from headrace.core.config import EngineConfig
from headrace.core.request import Request, SamplingParams
from headrace.engine.loop import Engine
from headrace.runner.cuda.runner import CudaRunner

Row = dict[str, Any]
# What some ask beyond what the graph of a step does.
_ODD: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.6, "repetition_penalty": 1.2},
    {"logit_bias": ((5, 2.0), (9, -3.0)), "logprobs": 3},
    # Nobody ends early.
    {"min_tokens": 9, "stop_ids": (7, 8), "logit_bias": ((7, -1e4), (8, -1e4))},
    {"allowed_ids": tuple(range(0, 100, 3)), "presence_penalty": 0.5},
    {"logprobs": 20},
)


class Sameness(Struct, frozen=True):
    """Sizes of the proof of equal tokens. `short_blocks` do not hold what runs; `step_tokens` are the other chunk sizes."""

    requests: int = 200
    prompt: tuple[int, int] = (10, 600)
    output: tuple[int, int] = (20, 120)
    slots: int = 128
    blocks: int = 16_384
    short_blocks: int = 200
    chunk_slots: int = 64
    step_tokens: tuple[int, ...] = (192, 1024)
    spread_s: float = 0.3


_QUICK_SAMENESS = Sameness(10, (10, 60), (16, 36), 12, 200, 14, 8, (24, 64), 0.02)


def check_exact(bench: Bench, shape: str) -> list[Row]:
    """The row-exact runner: each request alone in the engine is the truth."""
    sizes = _QUICK_SAMENESS if bench.quick else Sameness()
    with bench.open(shape, exact=True) as (runner, config):
        requests = _mixed_requests(sizes, config.vocab_size)
        wide = replace(config, slots=sizes.slots, blocks=sizes.blocks)
        alone = Drive(Engine(wide, runner))
        seconds = sum(alone.run([(0.0, request)]) for request in requests)
        truth = {stream.request.request_id: stream.tokens for stream in alone.streams.values()}
        bench.say(f"  alone: {sum(map(len, truth.values()))} tokens in {seconds:.1f} s")
        half = [replace(r, replay_ids=tuple(truth[r.request_id][: len(truth[r.request_id]) // 2])) for r in requests]
        short = replace(wide, blocks=sizes.short_blocks)
        cached = [hashed(request) for request in requests]
        cases: list[tuple[str, EngineConfig, list[Request], int]] = [
            ("under random arrivals", wide, requests, 1),
            ("after preemption", short, requests, 1),
            ("with prefix hits", wide, cached, 2),
            *((f"in steps of {most} tokens", _chunked(wide, sizes, most), requests, 1) for most in sizes.step_tokens),
            ("replayed from half-way", wide, half, 1),
            ("replayed, with all of it at once", short, [hashed(r) for r in half], 1),
        ]
        found = {name: _compare(runner, case, name, truth, sizes, bench) for name, *case in cases}
    wrong = [*alone.wrong, *(f"{name}: {line}" for name, case in found.items() for line in case["wrong"])]
    if not all(stream.is_whole for stream in alone.streams.values()):
        wrong.append("alone: not every request got all its tokens")
    different = sum(case["differ"] for case in found.values())
    compared = sum(case["streams"] for case in found.values())
    preempted, hits = found["after preemption"]["preemptions"], found["with prefix hits"]["cached_tokens"]
    row: Row = {
        "shape": shape,
        "requests": len(requests),
        "tokens": sum(map(len, truth.values())),
        "distinct_tokens": len({token for tokens in truth.values() for token in tokens}),
        "alone_seconds": seconds,
        "cases": found,
        "wrong": wrong,
        "met": not wrong,
        "text": f"{shape}: {compared - different} of {compared} streams equal to the same request alone ({len(requests)} requests,"
        f" {sum(map(len, truth.values()))} tokens, {len(found)} disturbances, {preempted} preemptions, {hits} cached tokens)",
    }
    return [row]


def _mixed_requests(sizes: Sameness, vocab: int) -> list[Request]:
    """Half of them greedy, half drawn, half odd; every third prompt begins as the one before."""
    chance = np.random.default_rng(8)
    prompts: list[list[int]] = []
    requests = []
    for index in range(sizes.requests):
        length = int(chance.integers(sizes.prompt[0], sizes.prompt[1] + 1))
        begin = prompts[-1][: min(len(prompts[-1]) * 3 // 4, length - 1)] if index % 3 == 2 else []
        prompts.append(begin + chance.integers(0, vocab, length - len(begin)).tolist())
        drawn = SamplingParams(
            temperature=float(chance.uniform(0.5, 1.2)),
            top_p=float(chance.uniform(0.8, 1.0)),
            seed=int(chance.integers(0, 2**40)),
            ignore_eos=True,
        )
        requests.append(
            Request(
                f"r{index}",
                f"tenant {index % 4}",
                tuple(prompts[-1]),
                max_tokens=int(chance.integers(sizes.output[0], sizes.output[1] + 1)),
                sampling=replace(drawn if index % 2 else GREEDY, **(_ODD[index % len(_ODD)] if index % 4 > 1 else {})),
                ttft_target_s=PATIENT_S,
                queue_timeout_s=PATIENT_S,
            )
        )
    return requests


def _chunked(wide: EngineConfig, sizes: Sameness, most: int) -> EngineConfig:
    return replace(wide, slots=min(sizes.chunk_slots, most), max_step_tokens=most)


def _compare(
    runner: CudaRunner, case: list[Any], name: str, truth: dict[str, list[int]], sizes: Sameness, bench: Bench
) -> Row:
    """Every round's streams; what was not disturbed proves nothing, and is wrong as well."""
    config, requests, rounds = case
    watch, chance = ChunkWatch(runner), np.random.default_rng(len(name))
    drive = Drive(Engine(config, watch))
    seconds = 0.0
    for _ in range(rounds):
        seconds += drive.run([(chance.uniform(0.0, sizes.spread_s), request) for request in requests])
    drive.engine.check()
    streams = list(drive.streams.values())
    differ = sum([*s.request.replay_ids, *s.tokens] != truth[s.request.request_id] for s in streams)
    counters = [stream.ended.counters for stream in streams if stream.ended is not None]
    row: Row = {
        "streams": len(streams),
        "differ": differ,
        "preemptions": drive.engine.num_preemptions,
        "cached_tokens": sum(counter.prompt_cached for counter in counters),
        "recomputed_tokens": sum(counter.recomputed for counter in counters),
        "replayed_tokens": sum(counter.replayed for counter in counters),
        "cut_chunks": watch.num_cut,
        "most_prompt_tokens_in_a_step": max(watch.chunks, default=0),
        "seconds": seconds,
    }
    needed = {
        "preemption": "preemptions",
        "prefix hits": "cached_tokens",
        "in steps": "cut_chunks",
        "replayed": "replayed_tokens",
    }
    missing = [f"no {key}" for word, key in needed.items() if word in name and not row[key]]
    lost = [f"{len(requests) * rounds - len(streams)} were refused"] if len(streams) != len(requests) * rounds else []
    row["wrong"] = drive.wrong + missing + lost + ([f"{differ} streams differ"] if differ else [])
    bench.say(f"  {name}: {len(streams) - differ} of {len(streams)} equal, {row}")
    return row
