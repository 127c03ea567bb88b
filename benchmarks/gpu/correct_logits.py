"""Logits of the CUDA runner against transformers, in every way a token can be computed; and graphs against none. Of the
row-exact runner those ways against each other, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from card_rig import Desk, Family, Trace, engine_config, ids, open_runner

# Ours may be so much further from float32 than transformers in bfloat16 is.
TOLERANCE = 1.5
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 509, 1000)
CHUNKS = (1, 7, 16, 33, 100)


def check_logits(
    family: Family, device: torch.device, *, quick: bool, exact: bool = False, clustered: bool = False
) -> list[dict[str, Any]]:
    runner = open_runner(family, engine_config(family), device, graphs=True, exact=exact, clustered=clustered)
    graphed = play(Desk(runner), quick=quick)
    rows = [_compare(family, scene, traces) for scene, traces in graphed.items()]
    if exact or clustered:
        way = "row-exact" if exact else "by clusters"
        return [row | {"check": f"{row['check']}, {way}"} for row in rows]
    eager = play(Desk(open_runner(family, engine_config(family), device)), quick=quick)
    for scene, traces in eager.items():
        pairs = list(zip(traces, graphed[scene], strict=True))
        equal = sum(one.tokens == other.tokens and _same_bits(one, other) for one, other in pairs)
        rows.append(
            {"check": f"{family.name}: {scene}, with graphs as without", "ok": equal == len(pairs), "equal": equal}
        )
    return rows


def check_fp8(family: Family, device: torch.device, *, quick: bool) -> list[dict[str, Any]]:
    """In eight bits, each on the tokens it said itself: ours may be as much further from float32 than the kernels' plain
    reference as bf16 may be than transformers."""
    config = engine_config(family)
    ours = play(Desk(open_runner(family, config, device, graphs=True, fp8=True)), quick=quick)
    theirs = play(Desk(open_runner(family, config, device, fp8=True, plain=True)), quick=True)
    rows = []
    for scene in ours:
        (rms, peak), (peer_rms, peer_peak) = (_distance(family, traces[scene]) for traces in (ours, theirs))
        rows.append(
            {
                "check": f"{family.name}: {scene}, fp8 against its plain reference",
                "ok": rms <= TOLERANCE * peer_rms and peak <= 2 * TOLERANCE * peer_peak,
                "error_rms": rms,
                "error_rms_of_reference": peer_rms,
                "error_max": peak,
                "error_max_of_reference": peer_peak,
            }
        )
    return rows


def _distance(family: Family, traces: list[Trace]) -> tuple[float, float]:
    """Of all logits from float32, relative to their size: root mean square and maximum."""
    square, size, most, largest = 0.0, 0.0, 0.0, 0.0
    for trace in traces:
        exact, _ = family.truth(trace.prompt + trace.tokens[:-1], len(trace.tokens))
        error = (torch.stack(trace.logits).float() - exact).double()
        square += float(error.square().sum())
        size += float(exact.double().square().sum())
        most, largest = max(most, float(error.abs().max())), max(largest, float(exact.abs().max()))
    return (square / size) ** 0.5, most / largest


def play(desk: Desk, *, quick: bool) -> dict[str, list[Trace]]:
    lengths, chunks = (LENGTHS[:7], CHUNKS[:3]) if quick else (LENGTHS, CHUNKS)
    return {
        "odd lengths": [_whole(desk, length) for length in lengths],
        "chunked prefill": [_chunked(desk, chunk) for chunk in chunks],
        "cached prefix": [_continued(desk, blocks) for blocks in ((1, 5) if quick else (1, 5, 9, 31))],
        "mixed batch": _mixed(desk, 6 if quick else 30),
    }


def _whole(desk: Desk, length: int) -> Trace:
    desk.begin(0, ids(length, seed=length))
    return desk.generate(0, 4)


def _chunked(desk: Desk, chunk: int) -> Trace:
    desk.begin(1, ids(181, seed=chunk))
    return desk.generate(1, 4, chunk)


def _continued(desk: Desk, blocks: int) -> Trace:
    """The first blocks are another sequence's, which is gone."""
    prompt = ids(16 * blocks + 5, seed=blocks)
    desk.begin(2, prompt)
    desk.generate(2, 2)
    shared = desk.blocks[2][:blocks]
    desk.end(2, keep=blocks)
    desk.begin(3, prompt[: 16 * blocks] + ids(21, seed=100 + blocks), shared=shared)
    return desk.generate(3, 4)


def _mixed(desk: Desk, count: int) -> list[Trace]:
    """Chunks of any length beside decode rows, in any order of rows."""
    chance = np.random.default_rng(1)
    traces = [desk.begin(slot, ids(int(chance.integers(1, 400)), seed=slot)) for slot in range(5, 5 + count)]
    open_slots = list(range(5, 5 + count))
    while open_slots:
        chance.shuffle(open_slots)
        room, chunks = 900, {}
        for slot in open_slots:
            count = min(desk.missing(slot), int(chance.integers(1, 130)), room)
            if count > 0 and chance.random() < 0.7:
                chunks[slot] = count
                room -= count
        if chunks:
            assert not desk.advance(chunks).statuses.any()
        open_slots = [slot for slot in open_slots if len(desk.traces[slot].tokens) < 6]
    return traces


def check_exact_bits(family: Family, device: torch.device, *, quick: bool) -> list[dict[str, Any]]:
    """Every logit of the row-exact runner is the same, however and beside whom its sequence was computed."""
    desk = Desk(open_runner(family, engine_config(family), device, graphs=True, exact=True))
    differ: dict[str, list[int]] = {"in chunks": [], "in company": [], "recomputed": []}
    for length in LENGTHS[:7] if quick else LENGTHS:
        prompt = ids(length, seed=length)
        desk.begin(0, prompt)
        whole = desk.generate(0, 6)
        desk.begin(1, prompt)
        cut = desk.generate(1, 6, chunk=1 + length // 3)
        again = desk.begin(2, prompt + whole.tokens[:4])
        desk.generate(2, 2)
        beside = _accompanied(desk, prompt, 6)
        for way, logits, truth in (
            ("in chunks", cut.logits, whole.logits),
            ("in company", beside.logits[:6], whole.logits),
            ("recomputed", again.logits, whole.logits[4:]),
        ):
            if not all(torch.equal(one, other) for one, other in zip(logits, truth, strict=True)):
                differ[way].append(length)
    desk.runner.close()
    return [
        {"check": f"{family.name}: row-exact, bits {way}", "ok": not lengths, "differ_at_lengths": lengths}
        for way, lengths in differ.items()
    ]


def _accompanied(desk: Desk, prompt: list[int], num_tokens: int) -> Trace:
    """Its chunks and tokens in steps with decode rows, and with chunks that come and go."""
    trace = desk.begin(3, prompt)
    for slot in range(4, 4 + 20):
        desk.begin(slot, ids(3 + 11 * slot, seed=slot))
    step = 0
    while len(trace.tokens) < num_tokens:
        others = {slot: 7 + slot for slot in range(4, 24) if (slot + step) % 3}
        assert not desk.advance({**others, 3: 100}).statuses.any()
        step += 1
    return trace


def _compare(family: Family, scene: str, traces: list[Trace]) -> dict[str, Any]:
    """Squared errors over all logits of a scene, and the largest."""
    square, most, disagreed, gaps = [0.0, 0.0], [0.0, 0.0], 0, [0.0]
    for trace in traces:
        exact, peer = family.truth(trace.prompt + trace.tokens[:-1], len(trace.tokens))
        ours = torch.stack(trace.logits).float()
        for index, found in enumerate((ours, peer)):
            error = (found - exact).double()
            square[index] += float(error.square().sum())
            most[index] = max(most[index], float(error.abs().max()))
        chosen = torch.tensor(trace.tokens, device=exact.device)
        gap = exact.amax(-1) - exact.gather(1, chosen[:, None]).squeeze(1)
        disagreed += int((gap > 0).sum())
        gaps.append(float(gap.max()))
    rms, peak = (square[0] / square[1]) ** 0.5, most[0] / most[1]
    # Whoever chose another token than float32 must have been near a tie.
    ok = rms <= TOLERANCE and peak <= TOLERANCE and max(gaps) <= 2 * TOLERANCE * most[1]
    return {
        "check": f"{family.name}: {scene}, against transformers",
        "ok": ok,
        "tokens": sum(len(trace.tokens) for trace in traces),
        "error_rms_of_peers": rms,
        "error_max_of_peers": peak,
        "peer_error_max": most[1],
        "other_tokens_than_float32": disagreed,
        "their_gap_max": max(gaps),
    }


def _same_bits(one: Trace, other: Trace) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))
