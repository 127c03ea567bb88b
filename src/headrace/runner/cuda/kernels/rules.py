# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""What requests forbid, favour and penalise among ids, applied to the logits of those rows that ask, in float32.

Order: bias (a forbidden id has bias -inf), stops that come too early, grammar mask, then penalties. Rows without any
of it do not come here. Owns no pool; a row names its line in each, or -1.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
# In a line of counts: how often an id was put out, and a bit for ids of the prompt.
PROMPT_BIT = 1 << 30
_PROMPT: tl.constexpr = tl.constexpr(PROMPT_BIT)


@dataclass(slots=True, frozen=True)
class Rules:
    """Pools and, by row, the lines in them (-1: none). None: nobody asked.

    `bias` [pool, vocabulary] float32. `masks` [pool, words] int32: bit v of a line, little end first, says that v may be
    taken; ids past the words may not. `counts` [pool, vocabulary] int32, `factors` [rows, 3] float32: repetition,
    frequency, presence. `stops` [rows, n] int32, -1 for none: forbidden while `positions` < `stops_from`, both [rows].
    """

    bias: Tensor | None = None
    bias_lines: Tensor | None = None
    masks: Tensor | None = None
    mask_lines: Tensor | None = None
    counts: Tensor | None = None
    count_lines: Tensor | None = None
    factors: Tensor | None = None
    stops: Tensor | None = None
    stops_from: Tensor | None = None
    positions: Tensor | None = None


def apply_rules(logits: Tensor, places: Tensor, rules: Rules, out: Tensor) -> None:
    """Row i of `out` [n, vocabulary] float32 becomes row `places[i]` of `logits` under the rules; -1 is padding, left as it
    is. What is not finite in the logits stays so, forbidden or not: the row is broken and must be seen to be."""
    vocab = logits.shape[1]
    rows = places.shape[0]
    _apply[(rows, triton.cdiv(vocab, _TILE))](
        logits,
        places,
        _or(rules.bias, out),
        _or(rules.bias_lines, places),
        _or(rules.masks, places),
        _or(rules.mask_lines, places),
        _or(rules.counts, places),
        _or(rules.count_lines, places),
        _or(rules.factors, out),
        out,
        logits.stride(0),
        out.stride(0),
        0 if rules.masks is None else rules.masks.shape[1],
        vocab=vocab,
        tile=_TILE,
        biased=rules.bias is not None,
        masked=rules.masks is not None,
        counted=rules.counts is not None,
        num_warps=4,
    )
    if rules.stops is not None:
        assert rules.stops_from is not None and rules.positions is not None
        size = rules.stops.shape[1]
        _forbid[(rows,)](
            places, rules.stops, rules.stops_from, rules.positions, out, out.stride(0),
            vocab=vocab, size=size, padded=triton.next_power_of_2(size), num_warps=1,
        )  # fmt: skip


def note_tokens(counts: Tensor, lines: Tensor, tokens: Tensor) -> None:
    """`tokens[i]` was put out by the owner of line `lines[i]`; -1 in either is nobody. No line stands here twice."""
    _note[(lines.shape[0],)](counts, lines, tokens, counts.stride(0), num_warps=1)


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    """A kernel takes a pointer also where it will not look."""
    return other if given is None else given


@triton.jit
def _apply(
    logits,
    places,
    bias,
    bias_lines,
    masks,
    mask_lines,
    counts,
    count_lines,
    factors,
    out,
    stride,
    out_stride,
    words,
    vocab: tl.constexpr,
    tile: tl.constexpr,
    biased: tl.constexpr,
    masked: tl.constexpr,
    counted: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    if place >= 0:
        ids = tl.program_id(1) * tile + tl.arange(0, tile)
        there = ids < vocab
        raw = tl.load(logits + place * stride + ids, mask=there, other=0.0).to(tl.float32)
        value = raw
        if biased:
            line = tl.load(bias_lines + row).to(tl.int64)
            value += tl.load(bias + line * vocab + ids, mask=there & (line >= 0), other=0.0)
        if masked:
            line = tl.load(mask_lines + row).to(tl.int64)
            word = tl.load(masks + line * words + ids // 32, mask=there & (line >= 0) & (ids // 32 < words), other=0)
            value = tl.where((line < 0) | (((word >> (ids % 32)) & 1) != 0), value, float("-inf"))
        if counted:
            line = tl.load(count_lines + row).to(tl.int64)
            count = tl.load(counts + line * vocab + ids, mask=there & (line >= 0), other=0)
            repetition = tl.load(factors + 3 * row)
            again = tl.where(value > 0.0, value / repetition, value * repetition)
            value = tl.where(count != 0, again, value)
            count = count & (_PROMPT - 1)
            fee = tl.load(factors + 3 * row + 1) * count.to(tl.float32) + tl.load(factors + 3 * row + 2)
            value -= tl.where(count > 0, fee, 0.0)
        # Only -inf itself is a number less than all others; NaN and +inf mean that the model failed.
        value = tl.where((raw != raw) | (raw == float("inf")), raw, value)
        tl.store(out + row * out_stride + ids, value, mask=there)


@triton.jit
def _forbid(
    places,
    stops,
    stops_from,
    positions,
    out,
    out_stride,
    vocab: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(places + row) >= 0) & (tl.load(positions + row) < tl.load(stops_from + row)):
        i = tl.arange(0, padded)
        ids = tl.load(stops + row * size + i, mask=i < size, other=-1)
        held = (ids >= 0) & (ids < vocab)
        home = out + row * out_stride + ids
        value = tl.load(home, mask=held, other=0.0)
        sound = (value == value) & (value != float("inf"))
        tl.store(home, tl.full([padded], float("-inf"), tl.float32), mask=held & sound)


@triton.jit
def _note(counts, lines, tokens, stride):
    row = tl.program_id(0)
    line = tl.load(lines + row).to(tl.int64)
    token = tl.load(tokens + row)
    if (line >= 0) & (token >= 0):
        home = counts + line * stride + token
        tl.store(home, tl.load(home) + 1)
