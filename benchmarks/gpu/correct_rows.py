"""Rows of the CUDA runner: sampled as on the CPU from the same logits, scored, failing alone; and which of a row's bits
depend on how many others there are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from card_rig import EOS, GREEDY, VOCAB, Desk, Family, Trace, engine_config, ids, open_runner
from msgspec.structs import replace

from headrace.core.plan import Masks, RowStatus
from headrace.core.request import SamplingParams
from headrace.runner.cuda.buckets import row_buckets
from headrace.runner.torch.sampler import Sampler

# The id whose embedding becomes NaN.
_BAD = 999
_HOT = SamplingParams(temperature=1.0, seed=3)
_BIAS = ((11, 3.0), (12, -4.0), (40, 2.5))
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "temperature": _HOT,
    "top-k": replace(_HOT, temperature=0.7, top_k=40),
    "top-p": replace(_HOT, top_p=0.9),
    "min-p": replace(_HOT, min_p=0.05),
    "wide": replace(_HOT, temperature=1.5, top_k=400, top_p=0.95),
    "some": replace(_HOT, temperature=1.5, top_k=200),
    "some, again": replace(_HOT, temperature=1.5, top_k=200, top_p=0.5),
    "flat min-p": replace(_HOT, temperature=1.5, min_p=0.01),
    "repetition": replace(GREEDY, repetition_penalty=1.3),
    "presence, frequency": replace(_HOT, presence_penalty=0.5, frequency_penalty=0.3),
    "bias": replace(GREEDY, logit_bias=_BIAS),
    "allowed ids": replace(_HOT, allowed_ids=(5, 9, 100, 2000)),
    "no end yet": replace(GREEDY, min_tokens=50, logit_bias=((EOS, 100.0),)),
    "log-probabilities": replace(_HOT, logprobs=5),
    "mask": replace(GREEDY, masked=True),
    "mask, drawn": replace(_HOT, masked=True, top_p=0.8),
    "all": replace(_HOT, masked=True, top_k=30, repetition_penalty=1.2, logprobs=3, logit_bias=_BIAS, min_tokens=9),
}
# Of drawn tokens, the share that the last bits of a softmax may move across an edge.
FEW = 0.01


def check_sampling(family: Family, device: torch.device, *, quick: bool) -> list[dict[str, Any]]:
    """Every row's token is the one that the CPU's sampler draws from the same logits."""
    steps = 5 if quick else 60
    config = engine_config(family)
    desk = Desk(open_runner(family, config, device, graphs=True))
    twin = Sampler(config.slots, VOCAB, config.eos_ids, torch.device("cpu"))
    for slot, sampling in enumerate(KINDS.values()):
        desk.begin(slot, ids(20 + slot, seed=slot), sampling=replace(sampling, seed=sampling.seed + slot))
        twin.begin(desk.begun[-1])
    slots = np.arange(len(KINDS), dtype=np.int32)
    wrong, worst, failed = dict.fromkeys(KINDS, 0), 0.0, 0
    for step in range(steps):
        words = np.random.default_rng(step).integers(0, 2**32, (len(KINDS), -(-VOCAB // 32)), np.uint32)
        masked = np.flatnonzero([sampling.masked for sampling in KINDS.values()]).astype(np.int32)
        masks = Masks(masked, words[masked])
        ends = np.array([desk.computed[slot] + desk.missing(slot) for slot in slots.tolist()], np.int32)
        result = desk.advance(dict.fromkeys(slots.tolist(), 1000), lambda plan, masks=masks: masks)
        failed += int((result.statuses != RowStatus.OK).sum())
        logits = torch.stack([desk.runner.last_logits[row] for row in slots.tolist()]).float().cpu()
        truth = twin.sample(logits.clone(), slots, ends, masks, slots)
        for kind, one, other in zip(KINDS, result.tokens.tolist(), truth.tokens.tolist(), strict=True):
            wrong[kind] += one != other
        worst = max(worst, _score_error(result.scores, logits, result.tokens))
    desk.runner.close()
    exact = sum(count for kind, count in wrong.items() if KINDS[kind].temperature == 0.0)
    drawn = sum(wrong.values()) - exact
    ok = not failed and not exact and drawn <= FEW * steps * len(KINDS) and worst < 1e-4
    row = {"check": f"{family.name}: sampled as on the CPU, {steps} steps of {len(KINDS)} kinds", "ok": ok}
    return [row | {"failed": failed, "differ": {k: n for k, n in wrong.items() if n}, "logprob_error": worst}]


def _score_error(scores: Any, logits: torch.Tensor, tokens: np.ndarray) -> float:
    if scores is None:
        return math.inf
    exact = logits.double().log_softmax(-1)
    worst = 0.0
    for index, row in enumerate(scores.owners.tolist()):
        worst = max(worst, abs(float(exact[row, tokens[row]]) - float(scores.logprobs[index])))
        count = KINDS[list(KINDS)[row]].logprobs or 0
        best = exact[row].topk(count).values
        found = torch.from_numpy(scores.top_logprobs[index][:count].copy()).double()
        worst = max(worst, float((best - found).abs().max()))
    return worst


def check_prompt_scores(family: Family, device: torch.device) -> list[dict[str, Any]]:
    desk = Desk(open_runner(family, engine_config(family), device, graphs=True))
    prompt = ids(211, seed=9)
    desk.begin(0, prompt, sampling=replace(GREEDY, prompt_logprobs=2))
    desk.begin(1, ids(50, seed=8))
    found, positions = [], []
    for count in (40, 1, 70, 100):
        scores = desk.advance({1: 1000, 0: count}).scores
        found.append(scores.logprobs)
        positions.append(scores.positions)
    exact, peer = (logits.log_softmax(-1).cpu() for logits in family.truth(prompt, len(prompt)))
    at, following = torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])
    truth, theirs = exact[at, following], peer[at, following]
    ours = torch.from_numpy(np.concatenate(found))
    ratio = float((ours - truth).square().sum() / (theirs - truth).square().sum()) ** 0.5
    ok = np.concatenate(positions).tolist() == list(range(1, len(prompt))) and ratio <= 1.5
    desk.runner.close()
    return [{"check": f"{family.name}: scores of a prompt in chunks", "ok": ok, "error_rms_of_peers": ratio}]


def check_failing(family: Family, device: torch.device) -> list[dict[str, Any]]:
    """A NaN in one row's embedding: that row fails, in chunks and as a decode row; the others keep every bit."""
    assert not family.checkpoint.shape.tied_embeddings
    runs = []
    for poisoned in (True, False):
        desk = _desk_with_bad(family, device, poisoned=poisoned)
        traces = [desk.begin(slot, prompt) for slot, prompt in enumerate(_prompts_with_bad(30))]
        everyone, others = range(6), (0, 1, 3, 4, 5)
        steps = [everyone, everyone, *[others] * 5]
        statuses = [desk.advance(dict.fromkeys(step, 25)).statuses.tolist() for step in steps]
        if poisoned:
            # The engine may have planned one more row for it.
            traces[2].tokens.append(1)
        statuses.append(desk.advance(dict.fromkeys(everyone, 1)).statuses.tolist())
        runs.append((statuses, [trace for slot, trace in enumerate(traces) if slot != 2]))
        desk.runner.close()
    return [_judge_failing(f"{family.name}: a NaN row fails alone", *runs), _check_fresh_failing(family, device)]


def _check_fresh_failing(family: Family, device: torch.device) -> dict[str, Any]:
    """Whole prompts in one step, whose attention reads them where they lie one behind the other."""
    runs = []
    for poisoned in (True, False):
        desk = _desk_with_bad(family, device, poisoned=poisoned)
        traces = [desk.begin(slot, prompt) for slot, prompt in enumerate(_prompts_with_bad(120))]
        statuses = [desk.advance(dict.fromkeys(range(6), 200)).statuses.tolist()]
        others = (0, 1, 3, 4, 5)
        statuses += [desk.advance(dict.fromkeys(others, 1)).statuses.tolist() for _ in range(3)]
        runs.append((statuses, [traces[slot] for slot in others]))
        desk.runner.close()
    return _judge_failing(f"{family.name}: a NaN row fails alone among whole prompts", *runs)


def _desk_with_bad(family: Family, device: torch.device, *, poisoned: bool) -> Desk:
    runner = open_runner(family, engine_config(family), device, graphs=True)
    if poisoned:
        with torch.inference_mode():
            runner._weights.embeddings[_BAD] = math.nan  # type: ignore[union-attr]
            torch.cuda.synchronize() if device.type == "cuda" else None
    return Desk(runner)


def _prompts_with_bad(length: int) -> list[list[int]]:
    prompts = [[min(i, _BAD - 1) for i in ids(length + 9 * slot, seed=slot)] for slot in range(6)]
    prompts[2][4] = _BAD
    return prompts


def _judge_failing(
    name: str, poisoned: tuple[list[list[int]], list[Trace]], calm: tuple[list[list[int]], list[Trace]]
) -> dict[str, Any]:
    alone = all(status == (RowStatus.NOT_FINITE if len(row) == 6 and i == 2 else RowStatus.OK)
                for row in poisoned[0] for i, status in enumerate(row))  # fmt: skip
    same = all(
        a.tokens == b.tokens and all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))
        for a, b in zip(poisoned[1], calm[1], strict=True)
    )
    return {"check": name, "ok": alone and same, "alone": alone, "bits": same}


def look_at_bits(family: Family, device: torch.device) -> list[dict[str, Any]]:
    """Not a check: in how many ways a row's logits round, by how many rows it is computed with."""
    desk = Desk(open_runner(family, engine_config(family), device, graphs=True))
    seen: dict[int, torch.Tensor] = {}
    for count in row_buckets(40):
        for slot in range(count):
            desk.begin(slot, ids(100 + slot, seed=slot))
            desk.advance({slot: 1000})
        desk.advance(dict.fromkeys(range(count), 1))
        seen[count] = desk.runner.last_logits[0]
    desk.runner.close()
    return [{"look": f"{family.name}: decode rows with equal bits", "classes": _classes(seen)}]


def look_at_products(device: torch.device) -> list[dict[str, Any]]:
    """The library's product of the same rows, alone and among others, for layers of real models."""
    rows = []
    for name, inner, outer in (
        ("0.6b qkv", 1024, 4096),
        ("0.6b down", 3072, 1024),
        ("0.6b head", 1024, 151936),
        ("8b qkv", 4096, 6144),
        ("8b gate-up", 4096, 28672),
        ("8b down", 14336, 4096),
    ):
        weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16) * 0.02
        given = torch.randn(8192, inner, device=device, dtype=torch.bfloat16)
        sizes = (*row_buckets(256), 384, 512, 1024, 2048, 4096, 8192)
        sizes = tuple(size for size in sizes if size * outer <= 1 << 28)
        rows.append(
            {
                "look": f"{name}: rows with equal bits",
                "classes": _classes({m: (given[:m] @ weight.t())[0] for m in sizes}),
            }
        )
    return rows


def _classes(seen: dict[int, torch.Tensor]) -> list[list[int]]:
    classes: list[tuple[torch.Tensor, list[int]]] = []
    for count, bits in seen.items():
        for known, members in classes:
            if torch.equal(known, bits):
                members.append(count)
                break
        else:
            classes.append((bits, [count]))
    return [members for _, members in classes]
