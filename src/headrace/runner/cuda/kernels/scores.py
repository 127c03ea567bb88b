# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Log-probabilities of ids and of the likeliest alternatives, as the model gave them: of the logits before rules,
penalties, temperature and filters. For rows that asked; a row that is not finite scores NaN."""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.ranks import FEW, best_few
from headrace.runner.cuda.kernels.scan import Scan, scan

_FEW: tl.constexpr = tl.constexpr(FEW)


def score(
    logits: Tensor,
    places: Tensor,
    ids: Tensor,
    alternatives: Tensor,
    logprobs: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    room: Scan,
) -> None:
    """Row `p = places[i]` of `logits` predicts `ids[p]` (any, where that is -1) and asked for `alternatives[i]` of the
    likeliest ids. `top_ids` and `top_logprobs` [n, k <= 64], likeliest first: -1 and -inf past what was asked. A place of
    -1 is padding."""
    assert top_ids.shape[1] <= FEW
    scan(logits, places, None, room)
    _score[(places.shape[0],)](
        logits,
        places,
        ids,
        alternatives,
        logprobs,
        top_ids,
        top_logprobs,
        room.maxima,
        room.best,
        room.mass,
        room.ids_room,
        room.values_room,
        logits.stride(0),
        vocab=room.vocab_size,
        chunks=room.chunks,
        pieces=triton.next_power_of_2(room.chunks),
        num_blocks=room.num_blocks,
        blocks=triton.next_power_of_2(room.num_blocks),
        width=top_ids.shape[1],
        num_warps=8,
    )


@triton.jit
def _score(
    logits,
    places,
    ids,
    alternatives,
    logprobs,
    top_ids,
    top_logprobs,
    maxima,
    best,
    mass,
    ids_room,
    values_room,
    stride,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
    pieces: tl.constexpr,
    num_blocks: tl.constexpr,
    blocks: tl.constexpr,
    width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    if place >= 0:
        piece = tl.arange(0, pieces)
        home = row * chunks + piece
        peaks = tl.load(best + home, mask=piece < chunks, other=float("-inf"))
        broken = tl.max((peaks != peaks).to(tl.int32), 0) > 0
        peak = tl.max(tl.where(peaks != peaks, float("-inf"), peaks), 0)
        broken = broken | (tl.abs(peak) == float("inf"))
        masses = tl.load(mass + home, mask=piece < chunks, other=0.0)
        total = tl.sum(masses * tl.exp(peaks - peak), 0)
        whole = tl.where(broken, float("nan"), peak + tl.log(total))
        line = logits + place * stride
        named = tl.maximum(tl.load(ids + place), 0)
        tl.store(logprobs + row, tl.load(line + named).to(tl.float32) - whole)
        asked = tl.load(alternatives + row)
        r = tl.arange(0, _FEW)
        name = tl.full([_FEW], -1, tl.int32)
        value = tl.full([_FEW], float("-inf"), tl.float32)
        if (asked > 0) & (broken == 0):
            value, name = best_few(
                line, maxima + row * num_blocks, ids_room + row * _FEW, values_room + row * _FEW, vocab, num_blocks, blocks
            )  # fmt: skip
            value -= whole
        absent = (r >= asked) | (value == float("-inf"))
        tl.store(top_ids + row * width + r, tl.where(absent, -1, name), mask=r < width)
        tl.store(top_logprobs + row * width + r, tl.where(absent, float("-inf"), value), mask=r < width)
