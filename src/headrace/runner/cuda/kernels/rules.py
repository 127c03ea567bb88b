# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""What requests forbid, favour and penalise among ids, applied to the logits of those rows that ask, in float32.

Order: bias, limits and masks (a forbidden id becomes -inf), then penalties. Rows without any of it do not come here.
Owns no pool; a row names its line in each, or -1. Roundings are those of the same operations one by one, on any device.
"""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.scan import Scan, chunk_ids, take_stock
from headrace.runner.cuda.odd_space import PROMPT_BIT, RuledRows

_PROMPT: tl.constexpr = tl.constexpr(PROMPT_BIT)


def apply_rules(logits: Tensor, rows: RuledRows, temperature: Tensor, into: Scan) -> None:
    """Row i of `rows.logits` becomes row `rows.places[i]` of `logits` under the rules, and row i of `into` is about that,
    with `temperature[rows.slots[i]]`. A place of -1 is padding, left as it is. What is not finite in the logits stays so,
    forbidden or not: the row is broken and must be seen to be."""
    rules, vocab = rows.rules, into.vocab_size
    _apply[(rows.places.shape[0], into.chunks)](
        logits,
        rows.places,
        rows.slots,
        temperature,
        rules.bias,
        rules.bias_lines,
        rules.limits,
        rules.limit_lines,
        rules.masks,
        rules.mask_lines,
        rules.counts,
        rules.count_lines,
        rules.factors,
        rows.logits,
        into.maxima,
        into.best,
        into.at,
        into.mass,
        logits.stride(0),
        rules.factors.stride(0),
        vocab=vocab,
        words=triton.cdiv(vocab, 32),
        chunks=into.chunks,
        num_warps=8,
        enable_fp_fusion=False,
    )


@triton.jit
def _apply(
    logits,
    places,
    slots,
    temperature,
    bias,
    bias_lines,
    limits,
    limit_lines,
    masks,
    mask_lines,
    counts,
    count_lines,
    factors,
    out,
    maxima,
    best,
    at,
    mass,
    stride,
    factor_stride,
    vocab: tl.constexpr,
    words: tl.constexpr,
    chunks: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + row).to(tl.int64)
    if place >= 0:
        ids = chunk_ids(chunk)
        there = ids < vocab
        raw = tl.load(logits + place * stride + ids, mask=there, other=float("-inf")).to(tl.float32)
        value = raw
        line = tl.load(bias_lines + row).to(tl.int64)
        if line >= 0:
            value += tl.load(bias + line * vocab + ids, mask=there, other=0.0)
        value = _limited(value, limits, tl.load(limit_lines + row).to(tl.int64), ids, there, words)
        value = _limited(value, masks, tl.load(mask_lines + row).to(tl.int64), ids, there, words)
        line = tl.load(count_lines + row).to(tl.int64)
        if line >= 0:
            count = tl.load(counts + line * vocab + ids, mask=there, other=0)
            repetition = tl.load(factors + row) + tl.zeros_like(value)
            again = tl.where(value > 0.0, tl.div_rn(value, repetition), value * repetition)
            value = tl.where(count != 0, again, value)
            count = count & (_PROMPT - 1)
            value -= tl.load(factors + factor_stride + row) * count.to(tl.float32)
            value -= tl.where(count > 0, tl.load(factors + 2 * factor_stride + row), 0.0)
        # Only -inf itself is a number less than all others; NaN and +inf mean that the model failed.
        value = tl.where((raw != raw) | (raw == float("inf")), raw, value)
        tl.store(out + row * vocab + ids, value, mask=there)
        take_stock(value, ids, row, chunk, tl.load(temperature + tl.load(slots + row)), maxima, best, at, mass, chunks)


@triton.jit
def _limited(value, lines, line, ids, there, words: tl.constexpr):
    """What the line does not allow becomes -inf."""
    if line >= 0:
        word = tl.load(lines + line * words + ids // 32, mask=there, other=0)
        value = tl.where(((word >> (ids % 32)) & 1) != 0, value, float("-inf"))
    return value
