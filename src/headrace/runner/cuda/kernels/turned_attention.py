# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Attention of single tokens straight from the product of queries, keys and values: norms, rotation, the token's own key
and value written to their cell, and attention over all before it, in one launch.

A row's first stretch begins with its own token, which it has at hand: nothing that this launch writes is read by it.
Otherwise as `decode_attention`, whose stretches and merge these are.
"""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.decode_attention import LOG2_E, DecodeScratch, merge
from headrace.runner.cuda.kernels.early import await_inputs, let_next_start, starts_early


def turned_attention(
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
    scratch: DecodeScratch,
    *,
    row_factors: Tensor | None = None,
) -> None:
    """`out` [rows, heads, dim]; `qkv` [rows, (heads + 2 kv heads) dim]; `cos`, `sin` [context, dim / 2]; `keys`, `values`
    [blocks, kv heads, block size, dim] of one layer; `tables` [slots, max blocks]; `slots` [rows], -1 for rows that are
    padding and become zeros; `lengths` [slots], the rows' own tokens included; `row_factors` [rows]: what `qkv` is still to
    be multiplied with."""
    config, (rows, heads, dim) = scratch.config, out.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    few = triton.next_power_of_2(heads // kv_heads)
    pieces = rows * kv_heads * config.splits * few
    assert scratch.stats.numel() >= 2 * pieces and scratch.tickets.numel() >= rows * kv_heads
    normed, early = q_norm is not None, starts_early(qkv.device)
    assert normed == (k_norm is not None)
    _turned[(kv_heads, rows, config.splits)](
        out,
        qkv,
        cos,
        sin,
        q_norm if normed else cos,
        k_norm if normed else cos,
        eps,
        keys,
        values,
        tables,
        slots,
        lengths,
        scale * LOG2_E,
        scratch.sums,
        scratch.stats,
        scratch.tickets,
        cos if row_factors is None else row_factors,
        qkv.stride(0),
        out.stride(0),
        tables.stride(0),
        config.shortest,
        config.splits,
        config.least,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        few=few,
        rows=max(16, few),
        dim=dim,
        block_size=block_size,
        tile=config.tile,
        together=max(1, 4096 // (few * dim)),
        normed=normed,
        scaled=row_factors is not None,
        ahead=config.ahead,
        early=early,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=early,
    )


@triton.jit(do_not_specialize=["table_stride", "shortest", "splits", "least"])
def _turned(
    out,
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    keys,
    values,
    tables,
    slots,
    lengths,
    scale,
    sums,
    stats,
    tickets,
    row_factors,
    qkv_stride,
    out_stride,
    table_stride,
    shortest,
    splits,
    least,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    few: tl.constexpr,
    rows: tl.constexpr,
    dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    together: tl.constexpr,
    normed: tl.constexpr,
    scaled: tl.constexpr,
    ahead: tl.constexpr,
    early: tl.constexpr,
):
    let_next_start(early)
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    length = tl.load(lengths + slot, mask=slot >= 0, other=0)
    # Positions that lie in memory.
    past = length - 1
    stretch = tl.maximum(tl.cdiv(past, splits), tl.minimum(shortest, tl.cdiv(past, least)))
    stretch = tl.maximum(tl.cdiv(stretch, tile), 1) * tile
    first = split * stretch
    g = tl.arange(0, rows)
    d = tl.arange(0, dim)
    held = (g < group)[:, None]
    home = out + row.to(tl.int64) * out_stride + (head * group + g)[:, None] * dim + d[None, :]
    # A program without a stretch waits for nobody: every row has one that does.
    if length <= 0:
        if split == 0:
            await_inputs(early)
            tl.store(home, tl.zeros([rows, dim], out.dtype.element_ty), mask=held)
    elif (first < past) | (split == 0):
        half: tl.constexpr = dim // 2
        other = (d + half) % dim
        table = tables + slot.to(tl.int64) * table_stride
        angle = past.to(tl.int64) * half + d % half
        c = tl.load(cos + angle)
        s = tl.where(d < half, -1.0, 1.0) * tl.load(sin + angle)
        line = qkv + row.to(tl.int64) * qkv_stride
        t = tl.arange(0, tile)
        stop = tl.minimum(first + stretch, past)
        begin = first
        if ahead:
            k, v, seen = _read(keys, values, table, head, first + t, stop, d, kv_heads, dim, block_size)
            begin = first + tile
        await_inputs(early)
        source = line + (head * group + g)[:, None] * dim
        x = tl.load(source + d[None, :], mask=held, other=0.0).to(tl.float32)
        y = tl.load(source + other[None, :], mask=held, other=0.0).to(tl.float32)
        if scaled:
            factor = tl.load(row_factors + row)
            x *= factor
            y *= factor
        if normed:
            size = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None]
            x *= size * tl.load(q_norm + d).to(tl.float32)[None, :]
            y *= size * tl.load(q_norm + other).to(tl.float32)[None, :]
        asked = (x * c[None, :] + y * s[None, :]).to(keys.dtype.element_ty)
        best = tl.full([rows], float("-inf"), tl.float32)
        weight = tl.zeros([rows], tl.float32)
        summed = tl.zeros([rows, dim], tl.float32)
        if split == 0:
            mine = line + (kv_heads * group + head) * dim
            low = tl.load(mine + d).to(tl.float32)
            high = tl.load(mine + other).to(tl.float32)
            own_value = tl.load(mine + kv_heads * dim + d)
            if scaled:
                low *= factor
                high *= factor
                own_value = (own_value.to(tl.float32) * factor).to(values.dtype.element_ty)
            if normed:
                own_size = tl.rsqrt(tl.sum(low * low, 0) / dim + eps)
                low *= own_size * tl.load(k_norm + d).to(tl.float32)
                high *= own_size * tl.load(k_norm + other).to(tl.float32)
            own_key = (low * c + high * s).to(keys.dtype.element_ty)
            own_block = tl.load(table + past // block_size).to(tl.int64)
            own_cell = (own_block * kv_heads + head) * (block_size * dim) + (past % block_size) * dim
            tl.store(keys + own_cell + d, own_key)
            tl.store(values + own_cell + d, own_value)
            best = tl.sum(asked.to(tl.float32) * own_key.to(tl.float32)[None, :], 1) * scale
            weight = tl.full([rows], 1.0, tl.float32)
            summed = tl.zeros([rows, dim], tl.float32) + own_value.to(tl.float32)[None, :]
        if ahead:
            best, weight, summed = _look(asked, k, v, seen, best, weight, summed, scale)
        for at in range(begin, stop, tile):
            later_k, later_v, there = _read(keys, values, table, head, at + t, stop, d, kv_heads, dim, block_size)
            best, weight, summed = _look(asked, later_k, later_v, there, best, weight, summed, scale)
        used = tl.maximum(tl.cdiv(past, stretch), 1)
        if used == 1:
            tl.store(home, (summed / weight[:, None]).to(out.dtype.element_ty), mask=held)
        else:
            pile = (row * kv_heads + head) * splits
            piece = (pile + split) * few + g
            tl.store(sums + piece[:, None].to(tl.int64) * dim + d[None, :], summed, mask=held)
            tl.store(stats + piece * 2, best, mask=g < group)
            tl.store(stats + piece * 2 + 1, weight, mask=g < group)
            # Every thread's part is written before one of them says so.
            tl.debug_barrier()
            ticket = tickets + row * kv_heads + head
            if tl.atomic_add(ticket, 1, sem="acq_rel") == used - 1:
                tl.store(ticket, 0)
                merge(out, sums, stats, row, head, pile, used, out_stride, group, few, dim, together)


@triton.jit
def _read(
    keys,
    values,
    table,
    head,
    place,
    stop,
    d,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    block_size: tl.constexpr,
):
    seen = place < stop
    block = tl.load(table + place // block_size, mask=seen, other=0).to(tl.int64)
    cell = (block * kv_heads + head) * (block_size * dim) + (place % block_size) * dim
    k = tl.load(keys + cell[:, None] + d[None, :], mask=seen[:, None], other=0.0)
    v = tl.load(values + cell[:, None] + d[None, :], mask=seen[:, None], other=0.0)
    return k, v, seen


@triton.jit
def _look(asked, k, v, seen, best, weight, summed, scale):
    score = tl.where(seen[None, :], tl.dot(asked, tl.trans(k)) * scale, float("-inf"))
    peak = tl.maximum(best, tl.max(score, 1))
    p = tl.exp2(score - peak[:, None])
    faded = tl.exp2(best - peak)
    summed = summed * faded[:, None] + tl.dot(p.to(v.dtype), v)
    return peak, weight * faded + tl.sum(p, 1), summed
