# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""The next token of every row: greedy rows by one pass, drawn rows under temperature, min-p, top-k and top-p.

Filters act in this order, each over what the one before left; of equal logits the lower id is the better. Nothing is
sorted: most rows settle among their 64 best ids; others draw from all and draw again, among the better ones, what
turns out to lie outside of the nucleus. The random number is a function of (seed, position) alone, as on the CPU.
A row with a NaN gets its status and touches no other. Every launch can be captured.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from headrace.core.plan import RowStatus
from headrace.runner.cuda.kernels.ranks import CHUNK, FEW, NOBODY, best_few, from_ordered, kth, ordered
from headrace.runner.cuda.kernels.scan import Scan, scan
from headrace.runner.cuda.odd_space import RuledRows

_CHUNK: tl.constexpr = tl.constexpr(CHUNK)
_FEW: tl.constexpr = tl.constexpr(FEW)
_NOT_FINITE: tl.constexpr = tl.constexpr(RowStatus.NOT_FINITE)
_MASK: tl.constexpr = tl.constexpr(RowStatus.MASK)
# splitmix64, as `runner.torch.luck` has it.
_STEP: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_RETRY: tl.constexpr = tl.constexpr(0xD1342543DE82EF95)
_MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@dataclass(slots=True, frozen=True)
class Draws:
    """Settings by slot. `seeds` int64 (`luck.key`), `positions` int32: the place of the token to come. `temperature` 0 is
    greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    seeds: Tensor
    positions: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def sample(
    logits: Tensor,
    slots: Tensor,
    draws: Draws,
    tokens: Tensor,
    statuses: Tensor,
    room: Scan,
    *,
    last: Tensor | None = None,
) -> None:
    """`logits` [rows, vocabulary] bf16 or float32, unchanged; `slots` [rows], -1 for padding (token -1, status 0);
    `tokens` [rows] int32, -1 for a failed row; `statuses` [rows] uint8; `last` [slots] takes the tokens too."""
    scan(logits, slots, draws.temperature, room)
    _launch(logits, slots, draws, tokens, statuses, room, last, None)


def draw_ruled(rows: RuledRows, draws: Draws, tokens: Tensor, statuses: Tensor, room: Scan, last: Tensor) -> None:
    """Likewise from logits that went through rules, and that `room` is about: a row without any finite one has no id that it
    may take. What is chosen becomes the token and the status at the row's place, unless that one failed before, and is
    counted in the row's line, if it has one. No line stands here twice."""
    _launch(rows.logits, rows.slots, draws, tokens, statuses, room, last, rows)


def _launch(
    logits: Tensor,
    slots: Tensor,
    draws: Draws,
    tokens: Tensor,
    statuses: Tensor,
    room: Scan,
    last: Tensor | None,
    ruled: RuledRows | None,
) -> None:
    places, counts, lines = (
        (slots,) * 3 if ruled is None else (ruled.places, ruled.rules.counts, ruled.rules.count_lines)
    )
    _draw[(slots.shape[0],)](
        logits,
        slots,
        draws.seeds,
        draws.positions,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        room.maxima,
        room.best,
        room.at,
        room.mass,
        room.ids_room,
        room.values_room,
        tokens,
        statuses,
        tokens if last is None else last,
        places,
        counts,
        lines,
        logits.stride(0),
        vocab=room.vocab_size,
        chunks=room.chunks,
        pieces=triton.next_power_of_2(room.chunks),
        num_blocks=room.num_blocks,
        blocks=triton.next_power_of_2(room.num_blocks),
        ruled=ruled is not None,
        remembers=last is not None,
        num_warps=8,
    )


@triton.jit(do_not_specialize_on_alignment=["statuses"])
def _draw(
    logits,
    slots,
    seeds,
    positions,
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    best,
    at,
    mass,
    ids_room,
    values_room,
    tokens,
    statuses,
    last,
    places,
    counts,
    lines,
    stride,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
    pieces: tl.constexpr,
    num_blocks: tl.constexpr,
    blocks: tl.constexpr,
    ruled: tl.constexpr,
    remembers: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    token = tl.full([], -1, tl.int32)
    status = tl.full([], 0, tl.int32)
    if slot >= 0:
        piece = tl.arange(0, pieces)
        home = row * chunks + piece
        peaks = tl.load(best + home, mask=piece < chunks, other=float("-inf"))
        broken = tl.max((peaks != peaks).to(tl.int32), 0) > 0
        peaks = tl.where(peaks != peaks, float("-inf"), peaks)
        peak = tl.max(peaks, 0)
        none = peak == float("-inf")
        barren: tl.constexpr = _MASK if ruled else _NOT_FINITE
        status = tl.where(broken | (peak == float("inf")), _NOT_FINITE, tl.where(none, barren, 0)).to(tl.int32)
        if status == 0:
            firsts = tl.load(at + home, mask=piece < chunks, other=NOBODY)
            token = tl.min(tl.where(peaks == peak, firsts, NOBODY), 0)
            warmth = tl.load(temperature + slot)
            if warmth > 0.0:
                masses = tl.load(mass + home, mask=piece < chunks, other=0.0) * tl.exp((peaks - peak) / warmth)
                token = _choose(
                    logits + row * stride, maxima + row * num_blocks, ids_room + row * _FEW, values_room + row * _FEW,
                    masses.to(tl.float64), peak, warmth, tl.load(top_k + slot), tl.load(top_p + slot),
                    tl.load(min_p + slot), _random(tl.load(seeds + slot), tl.load(positions + slot)),
                    vocab, chunks, pieces, num_blocks, blocks,
                )  # fmt: skip
        if remembers:
            # A failed row's next input must only be an id.
            tl.store(last + slot, tl.maximum(token, 0))
    if ruled:
        _settle(tl.load(places + row), token, status, tokens, statuses, counts, tl.load(lines + row), vocab)
    else:
        tl.store(tokens + row, token)
        tl.store(statuses + row, status.to(tl.uint8))


@triton.jit
def _settle(place, token, status, tokens, statuses, counts, line, vocab: tl.constexpr):
    # Without branches: warps may see the status before and after it is written.
    sound = tl.load(statuses + place, mask=place >= 0, other=1) == 0
    tl.store(tokens + place, token, mask=sound)
    tl.store(statuses + place, status.to(tl.uint8), mask=sound)
    counted = sound & (line >= 0) & (token >= 0)
    home = counts + line.to(tl.int64) * vocab + token
    tl.store(home, tl.load(home, mask=counted, other=0) + 1, mask=counted)


@triton.jit
def _choose(
    logits,
    maxima,
    ids_room,
    values_room,
    masses,
    peak,
    warmth,
    k,
    p,
    cut,
    bits,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
    pieces: tl.constexpr,
    num_blocks: tl.constexpr,
    blocks: tl.constexpr,
):
    token = tl.full([], -1, tl.int32)
    # p >= min_p * best p, said of logits.
    floor = tl.where(cut > 0.0, peak + warmth * tl.log(tl.maximum(cut, 1e-30)), float("-inf"))
    if ((k > 0) & (k <= _FEW)) | (cut > 0.0) | (p < 1.0):
        value, name = best_few(logits, maxima, ids_room, values_room, vocab, num_blocks, blocks)
        token = _draw_few(value, name, peak, warmth, k, p, floor, tl.sum(masses, 0), bits)
    if token < 0:
        token = _draw_wide(
            logits, maxima, masses, peak, warmth, k, p, floor, bits, vocab, chunks, pieces, num_blocks, blocks
        )
    return token


@triton.jit
def _draw_few(value, name, peak, warmth, k, p, floor, whole, bits):
    """Among the FEW best ids; -1 where what the filters leave may go on after them."""
    rank = tl.arange(0, _FEW)
    limited = (k > 0) & (k <= _FEW)
    within = (value >= floor) & ((rank < k) | (k <= 0) | (k > _FEW))
    weight = tl.where(within, tl.exp((value - peak) / warmth), 0.0).to(tl.float64)
    inside = tl.sum(weight, 0)
    lowest = tl.min(value, 0)
    ended = limited | (lowest < floor) | (lowest == float("-inf"))
    bare = (k <= 0) & (floor == float("-inf"))
    limit = p.to(tl.float64) * tl.where(ended, inside, whole)
    before = tl.cumsum(weight, 0) - weight
    weight = tl.where((before < limit) | (rank == 0), weight, 0.0)
    place = _place(weight, rank, _uniform(bits) * tl.sum(weight, 0))
    chosen = tl.sum(tl.where(rank == place, name, 0), 0)
    return tl.where(ended | (bare & (inside >= limit)), chosen, -1)


@triton.jit
def _draw_wide(
    logits,
    maxima,
    masses,
    peak,
    warmth,
    k,
    p,
    floor,
    bits,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
    pieces: tl.constexpr,
    num_blocks: tl.constexpr,
    blocks: tl.constexpr,
):
    """Among all ids. What is left is what comes before a bound: a value, and an id among equal values."""
    piece = tl.arange(0, pieces)
    lowest = floor
    before_id = tl.full([], NOBODY, tl.int32)
    if (k > 0) & (k < vocab):
        edge, after = _kth_id(logits, maxima, peak, k, vocab, chunks, num_blocks, blocks)
        if edge >= floor:
            lowest = edge
            before_id = after
    if lowest > float("-inf"):
        masses = _weigh(logits, lowest, before_id, peak, warmth, vocab, chunks, pieces)
    limit = p.to(tl.float64) * tl.sum(masses, 0)
    token = tl.full([], -1, tl.int32)
    attempt = tl.full([], 0, tl.uint64)
    luck = bits
    while token < 0:
        mark = _uniform(luck) * tl.sum(masses, 0)
        chunk = _place(masses, piece, mark)
        mark -= tl.sum(tl.where(piece < chunk, masses, 0.0), 0)
        ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        left = (x > lowest) | ((x == lowest) & (ids < before_id))
        weight = tl.where(left, tl.exp((x - peak) / warmth), 0.0)
        drawn = _place(weight, ids, mark.to(tl.float32))
        value = tl.max(tl.where(ids == drawn, x, float("-inf")), 0)
        if p < 1.0:
            masses = _weigh(logits, value, drawn, peak, warmth, vocab, chunks, pieces)
            better = tl.sum(masses, 0)
            # The best id has nothing before it and always counts.
            token = tl.where((better == 0.0) | (better < limit), drawn, -1)
            lowest = value
            before_id = drawn
        else:
            token = drawn
        attempt += 1
        luck = _mix(bits + attempt * _RETRY)
    return token


@triton.jit
def _weigh(logits, lowest, before_id, peak, warmth, vocab: tl.constexpr, chunks: tl.constexpr, pieces: tl.constexpr):
    """The weight of every chunk's ids before the bound."""
    piece = tl.arange(0, pieces)
    masses = tl.zeros([pieces], tl.float64)
    for chunk in range(chunks):
        ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        left = (x > lowest) | ((x == lowest) & (ids < before_id))
        weight = tl.sum(tl.where(left, tl.exp((x - peak) / warmth), 0.0), 0)
        masses = tl.where(piece == chunk, weight.to(tl.float64), masses)
    return masses


@triton.jit
def _kth_id(
    logits,
    maxima,
    peak,
    k,
    vocab: tl.constexpr,
    chunks: tl.constexpr,
    num_blocks: tl.constexpr,
    blocks: tl.constexpr,
):
    """The value of the k-th best id, and the first id that is no longer among the k best if its value is the same."""
    # Keys without the low bits that say nothing in a bfloat16.
    spare: tl.constexpr = 16 if logits.dtype.element_ty == tl.bfloat16 else 0
    low = tl.full([], -2147483648 >> spare, tl.int64)
    if k <= num_blocks:
        # As many blocks, and so ids, reach the k-th largest maximum.
        b = tl.arange(0, blocks)
        low = kth(ordered(tl.load(maxima + b, mask=b < num_blocks, other=float("-inf"))) >> spare, k).to(tl.int64)
    high = (ordered(peak) >> spare).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = _count(logits, middle.to(tl.int32), vocab, chunks, spare) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    # In a negative number's key those bits were set.
    edge = from_ordered((low.to(tl.int32) << spare) | tl.where(low < 0, (1 << spare) - 1, 0))
    room = k - _count(logits, (low + 1).to(tl.int32), vocab, chunks, spare)
    after = tl.full([], NOBODY, tl.int32)
    for chunk in range(chunks):
        ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        level = ((x == edge) & (ids < vocab)).to(tl.int32)
        passed = tl.cumsum(level, 0)
        after = tl.minimum(after, tl.min(tl.where((level > 0) & (passed > room), ids, NOBODY), 0))
        room -= tl.sum(level, 0)
    return edge, after


@triton.jit
def _count(logits, key, vocab: tl.constexpr, chunks: tl.constexpr, spare: tl.constexpr):
    """How many ids have at least this key."""
    count = tl.full([], 0, tl.int32)
    for chunk in range(chunks):
        ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        count += tl.sum((((ordered(x) >> spare) >= key) & (ids < vocab)).to(tl.int32), 0)
    return count


@triton.jit
def _place(weights, names, mark):
    """The name at which the sum of weights passes the mark; one with a weight in any case."""
    held = weights > 0.0
    passed = held & (tl.cumsum(weights, 0) > mark)
    place = tl.min(tl.where(passed, names, NOBODY), 0)
    # The sum may round to less than the mark.
    return tl.where(place == NOBODY, tl.max(tl.where(held, names, 0), 0), place)


@triton.jit
def _random(seed, position):
    return _mix(seed.to(tl.uint64, bitcast=True) + (position.to(tl.uint64) + 1) * _STEP)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def _uniform(bits):
    """[0, 1) in steps of 2^-53."""
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16
