# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Attention of single tokens near what a card's memory gives, however unequal the rows are: straight from the product of
queries, keys and values, as `turned_attention`, or from queries and cells that are turned and written, as `decode_attention`.

The warps of a program divide the work: one fetches pages, and fetches the next stretch's while the others still look at
this one's, turn its query or merge; so memory is never waited for twice. Programs stay, and draw stretches: as many as all
rows have, in the order of the rows, of which the longest lie first. Written in Gluon for compute capability 9.0 alone, and
unknown to the interpreter: `benchmarks/gpu/kernels.py` checks it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.runner.cuda.kernels.decode_attention import LOG2_E
from headrace.runner.cuda.kernels.rings import advance, barriers, clear_from, fetch, meet
from headrace.runner.cuda.kernels.streamed_attention import TileQueue

_DIM, _PAGE = 128, 16
# Heads of a group, of the 64 lines that tensor cores multiply at once.
_FEW = 16
# Positions read at a time, of which so many tiles are fetched or waited for; so two programs fill a multiprocessor.
_TILE, _STAGES, _EACH = 64, 3, 2
# No row is cut into shorter stretches than these: each is merged with the others.
_SHORTEST = 512
# Of a thread as the program starts, for two programs of eight warps have 65,536; and of one that fetches, which keeps the
# lengths of so many rows at hand.
_FIRST, _FETCHER = 128, 80
_MOST_ROWS = 256
# Rows times key heads from which it is the faster one (H200).
_LEAST_ITEMS = 64


def can_stream_decode(heads: int, kv_heads: int, dim: int) -> bool:
    return dim == _DIM and heads // kv_heads <= _FEW


def is_worth_streaming_decode(rows: int, kv_heads: int) -> bool:
    return rows <= _MOST_ROWS and rows * kv_heads >= _LEAST_ITEMS


def is_streamed_memory(cells: Tensor) -> bool:
    return cells.dtype == torch.bfloat16 and cells.shape[2] == _PAGE


@dataclass(slots=True, frozen=True)
class StretchScratch:
    """What stretches leave for those who merge them: sums [stretches, kv heads, group, dim], and maximum and weight of each;
    `marks` count those that are there, and are zero between launches. All rows have no more stretches together than there
    are rows, and programs that share out one head's positions. One for any number of rows."""

    queue: TileQueue
    sums: Tensor
    stats: Tensor
    marks: Tensor

    @classmethod
    def make(cls, heads: int, kv_heads: int, dim: int, queue: TileQueue) -> "StretchScratch":
        stretches, device = _MOST_ROWS + _EACH * queue.programs // kv_heads + 1, queue.tickets.device
        return cls(
            queue=queue,
            sums=torch.empty(stretches * heads * dim, dtype=torch.float32, device=device),
            stats=torch.empty(stretches * heads * 2, dtype=torch.float32, device=device),
            marks=torch.zeros(stretches * kv_heads, dtype=torch.int32, device=device),
        )


def streamed_decode(
    out: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    scratch: StretchScratch,
    *,
    row_factors: Tensor | None = None,
) -> None:
    """As `turned_attention`. Rows may lie in any order: where the longest lie first, none is waited for alone."""
    assert (q_norm is None) == (k_norm is None)
    norms = (cos if q_norm is None else q_norm, cos if k_norm is None else k_norm)
    factors = cos if row_factors is None else row_factors
    _launch(
        out,
        (qkv, cos, sin, *norms, eps),
        (keys, values, tables, slots, lengths, scale),
        factors,
        scratch,
        normed=q_norm is not None,
        scaled=row_factors is not None,
    )


def streamed_decode_turned(
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    scratch: StretchScratch,
) -> None:
    """As `decode_attention`: the rows' own keys and values are in their cells."""
    none, lines = queries, queries.flatten(1)
    assert lines.data_ptr() == queries.data_ptr()
    context = (keys, values, tables, slots, lengths, scale)
    _launch(out, (lines, none, none, none, none, 0.0), context, none, scratch, turned=True)


def _launch(
    out: Tensor,
    turns: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float],
    context: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float],
    row_factors: Tensor,
    scratch: StretchScratch,
    *,
    turned: bool = False,
    normed: bool = False,
    scaled: bool = False,
) -> None:
    rows, heads, dim = out.shape
    keys, values, tables, slots, lengths, scale = context
    kv_heads, queue, given = keys.shape[1], scratch.queue, turns[0]
    assert can_stream_decode(heads, kv_heads, dim) and is_streamed_memory(keys) and rows <= _MOST_ROWS
    assert given.dtype == torch.bfloat16
    _look_streamed[(_EACH * queue.programs,)](
        out,
        *turns,
        keys,
        values,
        _pages(keys),
        _pages(values),
        tables,
        slots,
        lengths,
        scale * LOG2_E,
        scratch.sums,
        scratch.stats,
        scratch.marks,
        queue.tickets,
        row_factors,
        given.stride(0),
        out.stride(0),
        tables.stride(0),
        rows,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        few=_FEW // 2 if heads // kv_heads <= _FEW // 2 else _FEW,
        shortest=_SHORTEST,
        most=_MOST_ROWS,
        dim=dim,
        page=_PAGE,
        tile=_TILE,
        stages=_STAGES,
        turned=turned,
        normed=normed,
        scaled=scaled,
        fetcher=_FETCHER,
        num_warps=4,
        maxnreg=_FIRST,
        launch_pdl=True,
    )


def _pages(cells: Tensor) -> TensorDescriptor:
    lines = cells.view(-1, _DIM)
    block = [_PAGE, _DIM]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(lines, list(lines.shape), list(lines.stride()), block, layout)


@gluon.jit(do_not_specialize=["table_stride", "rows"])
def _look_streamed(
    out,
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    keys,
    values,
    key_pages,
    value_pages,
    tables,
    slots,
    lengths,
    scale,
    sums,
    stats,
    marks,
    tickets,
    row_factors,
    qkv_stride,
    out_stride,
    table_stride,
    rows,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    few: gl.constexpr,
    shortest: gl.constexpr,
    most: gl.constexpr,
    dim: gl.constexpr,
    page: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
    turned: gl.constexpr,
    normed: gl.constexpr,
    scaled: gl.constexpr,
    fetcher: gl.constexpr,
):
    gdc_launch_dependents()
    qs = gl.allocate_shared_memory(
        gl.bfloat16, [few, dim], gl.NVMMASharedLayout.get_default_for([few, dim], gl.bfloat16)
    )
    ps = gl.allocate_shared_memory(
        gl.bfloat16, [few, tile], gl.NVMMASharedLayout.get_default_for([few, tile], gl.bfloat16)
    )
    ks = gl.allocate_shared_memory(gl.bfloat16, [stages, tile, dim], key_pages.layout)
    vs = gl.allocate_shared_memory(gl.bfloat16, [stages, tile, dim], value_pages.layout)
    owns = gl.allocate_shared_memory(gl.bfloat16, [2, dim], gl.SwizzledSharedLayout(8, 1, 1, [0]))
    notes = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told, heard = barriers(2, 1), barriers(2, 1)
    full, free = barriers(stages, 1), barriers(stages, 1)
    fence_async_shared()
    ring, post, where = (ks, vs, full, free), (notes, told, heard), (tables, slots, table_stride)
    turns = (qkv, cos, sin, q_norm, k_norm, row_factors, eps, qkv_stride)
    cells, piles, owned = (keys, values), (sums, stats, marks), (qs, ps, owns)
    gl.warp_specialize(
        [
            (
                _look,
                (
                    out,
                    out_stride,
                    scale,
                    turns,
                    cells,
                    where,
                    piles,
                    ring,
                    post,
                    owned,
                    kv_heads,
                    group,
                    few,
                    dim,
                    page,
                    tile,
                    stages,
                    turned,
                    normed,
                    scaled,
                ),
            ),
            (
                _provide,
                (
                    key_pages,
                    value_pages,
                    lengths,
                    where,
                    rows,
                    tickets,
                    ring,
                    post,
                    kv_heads,
                    shortest,
                    most,
                    dim,
                    page,
                    tile,
                    stages,
                    turned,
                ),
            ),
        ],
        [1],
        [fetcher],
    )


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _provide(
    key_pages,
    value_pages,
    lengths,
    where,
    rows,
    tickets,
    ring,
    post,
    kv_heads: gl.constexpr,
    shortest: gl.constexpr,
    most: gl.constexpr,
    dim: gl.constexpr,
    page: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
    turned: gl.constexpr,
):
    ks, vs, full, free = ring
    notes, told, heard = post
    tables, slots, table_stride = where
    # Of each row its length, and how many stretches there are up to its last. None is longer than a program's fair share of
    # all; a row without a token has one, which is empty.
    i = gl.arange(0, most, gl.BlockedLayout([most // 32], [32], [1], [0]))
    slot_of = gl.load(slots + i, mask=i < rows, other=-1)
    length_of = gl.load(lengths + slot_of, mask=slot_of >= 0, other=0)
    share = gl.cdiv(gl.sum(length_of.to(gl.int64), 0) * kv_heads, gl.num_programs(0)).to(gl.int32)
    stretch = gl.cdiv(gl.maximum(share, shortest), tile) * tile
    ends = gl.associative_scan(gl.where(i < rows, gl.maximum(gl.cdiv(length_of, stretch), 1), 0), 0, _sum)
    items = gl.max(ends, 0) * kv_heads
    stage, phase, place, side = 0, 1, 0, 1
    ticket = gl.program_id(0)
    if turned:
        # The launch before may be the one that writes the rows' own cells.
        gdc_wait()
    while ticket < items:
        head, unit = ticket % kv_heads, ticket // kv_heads
        row = gl.sum((ends <= unit).to(gl.int32), 0)
        pile = gl.max(gl.where(ends <= unit, ends, 0), 0)
        slot = gl.max(gl.where(i == row, slot_of, -1), 0)
        length = gl.max(gl.where(i == row, length_of, 0), 0)
        first = (unit - pile) * stretch
        stop = gl.minimum(first + stretch, length)
        mbarrier.wait(heard.index(place), side)
        _note(notes.index(place), row, head, first, stop, length, gl.cdiv(length, stretch), unit, pile)
        mbarrier.arrive(told.index(place))
        place, side = advance(place, side, 2)
        table = tables + slot.to(gl.int64) * table_stride
        last = (length - 1) // page
        for at in range(first, stop, tile):
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(full.index(stage), 4 * tile * dim)
            for part in gl.static_range(tile // page):
                # Behind the last page it is fetched again: what lies there counts for nothing.
                block = gl.load(table + gl.minimum(at // page + part, last))
                line = (block * kv_heads + head) * page
                fetch(key_pages, [line, 0], full.index(stage), ks.index(stage).slice(part * page, page))
                fetch(value_pages, [line, 0], full.index(stage), vs.index(stage).slice(part * page, page))
            stage, phase = advance(stage, phase, stages)
        # Tables, and cells of earlier tokens, are no launch's that may still run. Tickets may be.
        gdc_wait()
        ticket = gl.num_programs(0) + gl.atomic_add(tickets, 1, sem="relaxed")
    mbarrier.wait(heard.index(place), side)
    _note(notes.index(place), -1, 0, 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(told.index(place))
    gdc_wait()
    if gl.atomic_add(tickets + 1, 1) == gl.num_programs(0) - 1:
        gl.store(tickets, 0)
        gl.store(tickets + 1, 0)


@gluon.jit
def _note(notes, row, head, first, stop, length, used, unit, pile):
    """For those who look: whose stretch comes next. No row: none does."""
    i = gl.arange(0, 8, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    low = gl.where(i == 0, row, gl.where(i == 1, head, gl.where(i == 2, first, stop)))
    high = gl.where(i == 4, length, gl.where(i == 5, used, gl.where(i == 6, unit, pile)))
    notes.store(gl.where(i < 4, low, high))
    meet()


@gluon.jit
def _noted(notes):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.arange(0, 8, layout)
    words = notes.load(layout)
    row, head, first, stop = _word(words, i, 0), _word(words, i, 1), _word(words, i, 2), _word(words, i, 3)
    return row, head, first, stop, _word(words, i, 4), _word(words, i, 5), _word(words, i, 6), _word(words, i, 7)


@gluon.jit
def _word(words, i, which: gl.constexpr):
    return gl.sum(gl.where(i == which, words, 0), 0)


@gluon.jit
def _look(
    out,
    out_stride,
    scale,
    turns,
    cells,
    where,
    piles,
    ring,
    post,
    owned,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    few: gl.constexpr,
    dim: gl.constexpr,
    page: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
    turned: gl.constexpr,
    normed: gl.constexpr,
    scaled: gl.constexpr,
):
    ks, vs, full, free = ring
    notes, told, heard = post
    qs, ps, owns = owned
    # Positions, or numbers of a head, times heads.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, few, 16])
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    none = gl.zeros([tile, few], gl.float32, layout)
    seen = gl.arange(0, tile, gl.SliceLayout(1, layout))
    h = gl.arange(0, few, gl.SliceLayout(0, layout))
    d = gl.arange(0, dim, gl.SliceLayout(1, layout))
    kept = (h < group)[None, :]
    # All before this is no other launch's.
    gdc_wait()
    stage, phase, place, side = 0, 0, 0, 0
    mbarrier.wait(told.index(place), side)
    row, head, first, stop, length, used, unit, pile = _noted(notes.index(place))
    while row >= 0:
        meet()
        mbarrier.arrive(heard.index(place))
        place, side = advance(place, side, 2)
        is_last = stop == length
        if length > 0:
            if turned:
                _take(qs, turns, row, head, group, few, dim, spread)
            else:
                _turn(
                    qs,
                    owns,
                    turns,
                    cells,
                    where,
                    row,
                    head,
                    length,
                    is_last,
                    kv_heads,
                    group,
                    few,
                    dim,
                    page,
                    normed,
                    scaled,
                    spread,
                )
        best = gl.full([few], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
        weights = gl.zeros([tile, few], gl.float32, layout)
        summed = gl.zeros([dim, few], gl.float32, layout)
        for at in range(first, stop, tile):
            mbarrier.wait(full.index(stage), phase)
            if is_last & (at + tile >= stop):
                if turned:
                    clear_from(vs.index(stage), length - at, tile)
                else:
                    _put(ks.index(stage), vs.index(stage), owns, length - 1 - at, tile, spread)
            asked = warpgroup_mma(ks.index(stage), qs.permute((1, 0)), none, use_acc=False, is_async=True)
            score = warpgroup_mma_wait(0, deps=(asked,)) * scale
            score = gl.where((at + seen)[:, None] < stop, score, float("-inf"))
            peak = gl.maximum(best, gl.max(score, 0))
            p = gl.exp2(score - peak[None, :])
            faded = gl.exp2(best - peak)[None, :]
            ps.store(p.to(gl.bfloat16).permute((1, 0)))
            fence_async_shared()
            meet()
            weights = weights * faded + p
            best = peak
            total = warpgroup_mma(vs.index(stage).permute((1, 0)), ps.permute((1, 0)), summed * faded, is_async=True)
            summed = warpgroup_mma_wait(0, deps=(total,))
            mbarrier.arrive(free.index(stage))
            stage, phase = advance(stage, phase, stages)
        weight = gl.sum(weights, 0)
        home = out + row.to(gl.int64) * out_stride + (head * group + h)[None, :] * dim + d[:, None]
        if used <= 1:
            # A row of padding becomes zeros.
            kind = out.dtype.element_ty
            gl.store(home, gl.where(length > 0, summed / weight[None, :], 0.0).to(kind), mask=kept)
        else:
            _pile(home, piles, unit, pile, head, used, best, weight, summed, h, d, kv_heads, group, dim)
        mbarrier.wait(told.index(place), side)
        row, head, first, stop, length, used, unit, pile = _noted(notes.index(place))


@gluon.jit
def _turn(
    qs,
    owns,
    turns,
    cells,
    where,
    row,
    head,
    length,
    is_last,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    few: gl.constexpr,
    dim: gl.constexpr,
    page: gl.constexpr,
    normed: gl.constexpr,
    scaled: gl.constexpr,
    spread: gl.constexpr,
):
    """The row's queries of one key head, and its own key and value, to their places; these to their cell, too, where the
    stretch is its row's last."""
    qkv, cos, sin, q_norm, k_norm, row_factors, eps, stride = turns
    keys, values = cells
    tables, slots, table_stride = where
    half: gl.constexpr = dim // 2
    g = gl.arange(0, few, gl.SliceLayout(1, spread))
    d = gl.arange(0, dim, gl.SliceLayout(0, spread))
    other = (d + half) % dim
    position = length - 1
    angle = position.to(gl.int64) * half + d % half
    line = qkv + row.to(gl.int64) * stride
    source = line + (head * group + g)[:, None] * dim
    mine = line + (kv_heads * group + head) * dim
    kept = (g < group)[:, None]
    # All that is read is asked for first.
    x = gl.load(source + d[None, :], mask=kept, other=0.0)
    y = gl.load(source + other[None, :], mask=kept, other=0.0)
    low, high, value = gl.load(mine + d), gl.load(mine + other), gl.load(mine + kv_heads * dim + d)
    c, s = gl.load(cos + angle), gl.load(sin + angle)
    slot = gl.load(slots + row).to(gl.int64)
    s = gl.where(d < half, -s, s)
    x, y, low, high = x.to(gl.float32), y.to(gl.float32), low.to(gl.float32), high.to(gl.float32)
    if scaled:
        factor = gl.load(row_factors + row)
        x *= factor
        y *= factor
        low *= factor
        high *= factor
        value = (value.to(gl.float32) * factor).to(gl.bfloat16)
    if normed:
        size = gl.rsqrt(gl.sum(x * x, 1) / dim + eps)[:, None]
        x *= size * gl.load(q_norm + d).to(gl.float32)[None, :]
        y *= size * gl.load(q_norm + other).to(gl.float32)[None, :]
        own_size = gl.rsqrt(gl.sum(low * low, 0) / dim + eps)
        low *= own_size * gl.load(k_norm + d).to(gl.float32)
        high *= own_size * gl.load(k_norm + other).to(gl.float32)
    qs.store((x * c[None, :] + y * s[None, :]).to(gl.bfloat16))
    key = (low * c + high * s).to(gl.bfloat16)
    owns.index(0).store(key)
    owns.index(1).store(value)
    fence_async_shared()
    meet()
    if is_last:
        block = gl.load(tables + slot * table_stride + position // page).to(gl.int64)
        cell = ((block * kv_heads + head) * page + position % page) * dim
        gl.store(keys + cell + d, key)
        gl.store(values + cell + d, value)


@gluon.jit
def _take(qs, turns, row, head, group: gl.constexpr, few: gl.constexpr, dim: gl.constexpr, spread: gl.constexpr):
    """The row's queries of one key head, which are turned, to their place."""
    queries, stride = turns[0], turns[-1]
    g = gl.arange(0, few, gl.SliceLayout(1, spread))
    d = gl.arange(0, dim, gl.SliceLayout(0, spread))
    source = queries + row.to(gl.int64) * stride + (head * group + g)[:, None] * dim + d[None, :]
    qs.store(gl.load(source, mask=(g < group)[:, None], other=0.0))
    fence_async_shared()
    meet()


@gluon.jit
def _put(k, v, owns, own, tile: gl.constexpr, spread: gl.constexpr):
    """The row's own token to line `own` of a tile, and zeros for values behind it, where memory may have anything."""
    some: gl.constexpr = 16
    key, value = owns.index(0).load(gl.SliceLayout(0, spread)), owns.index(1).load(gl.SliceLayout(0, spread))
    for at in gl.static_range(0, tile, some):
        if at + some > own:
            line = at + gl.arange(0, some, gl.SliceLayout(1, spread))
            is_own, is_before = (line == own)[:, None], (line < own)[:, None]
            behind = gl.where(is_own, value[None, :], 0.0)
            lines = v.slice(at, some)
            lines.store(gl.where(is_before, lines.load(spread), behind))
            if at <= own:
                wanted = k.slice(at, some)
                wanted.store(gl.where(is_own, key[None, :], wanted.load(spread)))
    fence_async_shared()
    meet()


@gluon.jit
def _pile(
    home,
    piles,
    unit,
    pile,
    head,
    used,
    peaks,
    shares,
    summed,
    h,
    d,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
):
    """A stretch to the others of its row and head; whoever brings the last one merges them, in the order of positions."""
    sums, stats, marks = piles
    kept = h < group
    mine = (unit * kv_heads + head) * group + h
    gl.store(sums + mine.to(gl.int64)[None, :] * dim + d[:, None], summed, mask=kept[None, :])
    gl.store(stats + mine * 2, peaks, mask=kept)
    gl.store(stats + mine * 2 + 1, shares, mask=kept)
    # Every thread's part is written before one of them says so.
    meet()
    mark = marks + pile * kv_heads + head
    if gl.atomic_add(mark, 1, sem="acq_rel") == used - 1:
        gl.store(mark, 0)
        best = peaks
        for other in range(pile, pile + used):
            piece = (other * kv_heads + head) * group + h
            best = gl.maximum(best, gl.load(stats + piece * 2, mask=kept, other=0.0, cache_modifier=".cg"))
        weight, merged = gl.zeros_like(shares), gl.zeros_like(summed)
        for other in range(pile, pile + used):
            piece = (other * kv_heads + head) * group + h
            faded = gl.exp2(gl.load(stats + piece * 2, mask=kept, other=0.0, cache_modifier=".cg") - best)
            weight += faded * gl.load(stats + piece * 2 + 1, mask=kept, other=1.0, cache_modifier=".cg")
            place = piece.to(gl.int64)[None, :] * dim + d[:, None]
            merged += faded[None, :] * gl.load(sums + place, mask=kept[None, :], other=0.0, cache_modifier=".cg")
        gl.store(home, (merged / weight[None, :]).to(home.dtype.element_ty), mask=kept[None, :])
