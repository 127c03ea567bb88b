"""Streams of the engine on the CUDA runner: under load, with cached prefixes and after preemption as alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from card_rig import Family, engine_config, ids, open_runner
from msgspec.structs import replace
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.core.hashing import chain_blocks, chain_root
from headrace.core.request import Request, SamplingParams
from headrace.engine.loop import Engine
from headrace.runner.cuda.runner import CudaRunner

# Two logits of float32 are near a tie when they differ by less than this many of the largest errors that transformers
# in bfloat16 makes there: each of the two may be off by 1.5 of them. Where tokens choose experts, a choice near a tie makes
# an error much larger than its neighbours': there it is the median of so many places; and what comes out may be what float32
# says with the other choice, of the one token and in the one layer where it is as near.
NEAR = 3.0
_PLACES = 64


def check_streams(family: Family, device: torch.device, *, quick: bool) -> list[dict[str, Any]]:
    count, output = (6, 6) if quick else (60, 24)
    requests = _requests(count, output)
    wide = engine_config(family)
    runner = open_runner(family, wide, device, graphs=True)
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= _run(runner, wide, [request]).streams
    together, again = (_run(runner, wide, requests).streams for _ in range(2))
    cached = _run(runner, wide, [_hashed(request) for request in requests], rounds=2)
    runner.close()
    narrow = engine_config(family, blocks=max(30, count * 2), slots=16)
    runner = open_runner(family, narrow, device, graphs=True)
    squeezed = _run(runner, narrow, requests)
    runner.close()
    rows = [
        _judge(family, "under load as alone", requests, alone, together),
        {"check": f"{family.name}: the same load twice", "ok": again == together},
        _judge(family, "with cached prefixes as alone", requests, alone, cached.streams),
        _judge(family, "after preemption as alone", requests, alone, squeezed.streams),
    ]
    rows[2] |= {"cached_tokens": cached.cached_tokens, "ok": rows[2]["ok"] and cached.cached_tokens > 0}
    rows[3] |= {"preemptions": squeezed.preemptions, "ok": rows[3]["ok"] and (quick or squeezed.preemptions > 0)}
    return rows


def _requests(count: int, output: int) -> list[Request]:
    """Every third one begins as the one before."""
    chance = np.random.default_rng(2)
    prompts: list[list[int]] = []
    for index in range(count):
        length = int(chance.integers(1, 300))
        begin = prompts[-1][: len(prompts[-1]) // 2] if index % 3 == 2 else []
        prompts.append(begin + ids(length, seed=1000 + index))
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    return [
        Request(f"r{index}", "t", tuple(prompt), max_tokens=output, sampling=greedy, queue_timeout_s=1e6)
        for index, prompt in enumerate(prompts)
    ]


def _hashed(request: Request) -> Request:
    root = chain_root(salt=b"salt", version="version")
    return replace(request, prefix_root=root, block_hashes=chain_blocks(root, request.prompt_ids, 16))


def check_exact(family: Family, device: torch.device, *, quick: bool) -> list[dict[str, Any]]:
    """The row-exact runner: not one token may differ, of greedy streams and of drawn ones."""
    count, output = (6, 6) if quick else (200, 24)
    greedy = _requests(count, output)
    hot = [SamplingParams(temperature=1.0, seed=i, top_p=0.95, ignore_eos=True) for i in range(count)]
    requests = [replace(r, sampling=hot[i]) if i % 2 else r for i, r in enumerate(greedy)]
    wide, narrow = engine_config(family), engine_config(family, blocks=max(30, count * 2 // 3), slots=16)
    short = engine_config(family, max_step_tokens=72)
    runner = open_runner(family, wide, device, graphs=True, exact=True)
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= _run(runner, wide, [request]).streams
    # So many as leave their blocks in the cache until the second round.
    few = [_hashed(request) for request in requests[:60]]
    found = {
        "under load": _run(runner, wide, requests),
        "with cached prefixes": _run(runner, wide, few, rounds=2),
        "in other chunks": _run(runner, short, requests),
    }
    replayed = [replace(r, replay_ids=tuple(alone[r.request_id][: output // 3])) for r in requests]
    found["replayed"] = _run(runner, wide, replayed)
    runner.close()
    runner = open_runner(family, narrow, device, graphs=True, exact=True)
    found["after preemption"] = _run(runner, narrow, requests)
    runner.close()
    for name, tokens in found["replayed"].streams.items():
        tokens[:0] = alone[name][: output // 3] if len(tokens) < output else []
    rows = [
        {
            "check": f"{family.name}: row-exact, {what}",
            "ok": all(tokens == alone[name] for name, tokens in outcome.streams.items()),
            "differ": sum(tokens != alone[name] for name, tokens in outcome.streams.items()),
            "streams": len(outcome.streams),
            "preemptions": outcome.preemptions,
            "cached_tokens": outcome.cached_tokens,
        }
        for what, outcome in found.items()
    ]
    # What was not disturbed proves nothing.
    rows[1]["ok"] = rows[1]["ok"] and found["with cached prefixes"].cached_tokens > 0
    rows[-1]["ok"] = rows[-1]["ok"] and (quick or found["after preemption"].preemptions > 0)
    return rows


class Outcome(NamedTuple):
    streams: dict[str, list[int]]
    preemptions: int
    cached_tokens: int


def _run(runner: CudaRunner, config: EngineConfig, requests: list[Request], rounds: int = 1) -> Outcome:
    """What the last round said; earlier ones fill the prefix cache."""
    engine, now_s, cached = Engine(config, runner), 0.0, 0
    streams: dict[str, list[int]] = {}
    for _ in range(rounds):
        names = {engine.submit(request, now_s): request.request_id for request in requests}
        streams = {name: [] for name in names.values()}
        while not engine.idle:
            frame = engine.turn(now_s)
            now_s += 0.001
            for number, token in zip(frame.numbers.tolist(), frame.tokens.tolist(), strict=True):
                streams[names[number]].append(token)
            for ended in frame.ended:
                assert ended.outcome.name == "FINISHED", ended
                cached += ended.counters.prompt_cached
        engine.check()
    return Outcome(streams, engine.num_preemptions, cached)


def _judge(
    family: Family,
    what: str,
    requests: list[Request],
    alone: dict[str, list[int]],
    found: dict[str, list[int]],
) -> dict[str, Any]:
    """Streams may part only where float32 has two tokens close together, by the choice of experts that it makes or by one that
    it nearly makes; what follows is another story then."""
    gaps: list[float] = []
    explained: list[dict[str, Any]] = []
    has_experts = family.checkpoint.shape.experts is not None
    for request in requests:
        one, other = alone[request.request_id], found[request.request_id]
        if one == other:
            continue
        place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        text = [*request.prompt_ids, *one[:place]]
        exact, peer = family.truth(text, min(len(text), _PLACES) if has_experts else 1)
        error = float((peer - exact).abs().amax(1).median())
        gap = abs(float(exact[-1, one[place]] - exact[-1, other[place]])) / error
        if gap > NEAR and has_experts:
            explained.append(_explain(family, text, exact[-1], (one[place], other[place]), error) | {"gap": gap})
            gap = explained[-1]["widest"]
        gaps.append(gap)
    return {
        "check": f"{family.name}: {what}",
        "ok": max(gaps, default=0.0) <= NEAR,
        "streams": len(requests),
        "parted_at_near_ties": len(gaps),
        "by_another_choice_of_experts": explained,
        "widest_gap_in_errors": max(gaps, default=0.0),
    }


def _explain(family: Family, text: list[int], exact: Tensor, tokens: tuple[int, int], error: float) -> dict[str, Any]:
    """By which choice each of two tokens is nearest to the one that float32 says, and how near; the widest of the two."""
    choices = family.other_choices(text, NEAR)
    said = [("its own", exact), *((f"layer {c.layer}, {c.place}, {c.margin:.2f} errors", c.logits) for c in choices)]
    nearest = [min((float(each.max() - each[token]) / error, name) for name, each in said) for token in tokens]
    return {"widest": max(nearest)[0], "choices": len(choices), "nearest": nearest}
