# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Attention of single tokens over paged keys and values, split along the context.

A program reads one stretch of one row's context for one key head and all query heads that share it; the last
program of a row to finish merges the stretches. The grid depends on the batch and the number of stretches alone,
lengths are read on the device: a launch can be captured once. Programs start row by row, all heads of one after
another: rows come longest first, so that the last to start are short. Knows slots, not plans.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from headrace.runner.cuda.kernels.early import await_inputs, let_next_start, starts_early

LOG2_E = 1.4426950408889634


class DecodeConfig(Struct, frozen=True):
    """`tile` positions are read at a time. A context is read in at most `splits` stretches, and in at least `least` while
    they are shorter than `shortest`: more of them finish sooner, but then all are merged. `ahead`: the first tile is asked
    for before the row's query is there."""

    splits: int
    least: int = 1
    shortest: int = 256
    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3
    ahead: bool = False


def decode_config(rows: int, kv_heads: int, context: int = 131072, multiprocessors: int = 132) -> DecodeConfig:
    """Rows that fill the card many times over are not split unless they are long; fewer are split so that no program runs
    on alone for long. Stretches that the longest `context` cannot need are programs that cost their start. Measured on an
    H200 between products, over contexts of 150 to 380 tokens and of 200 to 1,900."""
    programs = rows * kv_heads
    if programs >= 12 * multiprocessors:
        return DecodeConfig(min(8, -(-context // 4096)), shortest=4096, num_warps=2, num_stages=2)
    if programs >= 6 * multiprocessors:
        return DecodeConfig(min(8, -(-context // 2048)), shortest=2048, num_warps=2, num_stages=2)
    if 3 * multiprocessors < programs <= 4 * multiprocessors:
        # Of these, programs that ask ahead fit the card best.
        return DecodeConfig(min(16, -(-context // 4096)), shortest=4096, num_warps=2, ahead=True)
    if programs >= 2 * multiprocessors:
        return DecodeConfig(min(16, -(-context // 1024)), shortest=1024, num_warps=2, num_stages=2)
    splits = 64
    while splits > 8 and (programs * splits > 64 * multiprocessors or splits * 512 > context):
        splits //= 2
    if programs > multiprocessors:
        return DecodeConfig(splits, shortest=512, num_warps=2, num_stages=2)
    least = 1
    while least < 16 and programs * least * 2 <= 4 * multiprocessors:
        least *= 2
    return DecodeConfig(splits, least, num_warps=2, num_stages=3 if 2 * programs > multiprocessors else 2, ahead=True)


def last_config(context: int) -> DecodeConfig:
    """For the rows that sample of a step of chunks alone: most are padding, and a prompt of any length must not wait for a
    few programs."""
    return DecodeConfig(min(16, -(-context // 1024)), shortest=512, num_warps=2, num_stages=2)


@dataclass(slots=True, frozen=True)
class DecodeScratch:
    """What stretches leave for the merge: sums [rows, kv heads, splits, group, dim], and maximum and weight of each.

    `tickets` count finished stretches; zero between launches. `config` is the way of cutting that it has room for.
    """

    config: DecodeConfig
    sums: Tensor
    stats: Tensor
    tickets: Tensor

    @classmethod
    def make(
        cls, rows: int, heads: int, kv_heads: int, dim: int, config: DecodeConfig, device: torch.device | str
    ) -> "DecodeScratch":
        group = triton.next_power_of_2(heads // kv_heads)
        pieces = rows * kv_heads * config.splits * group
        return cls(
            config=config,
            sums=torch.empty(pieces * dim, dtype=torch.float32, device=device),
            stats=torch.empty(pieces * 2, dtype=torch.float32, device=device),
            tickets=torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        )


def decode_attention(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    scratch: DecodeScratch,
) -> None:
    """`out`, `q` [rows, heads, dim]; `keys`, `values` [blocks, kv heads, block size, dim] of one layer; `tables`
    [slots, max blocks]; `slots` [rows], -1 for rows that are padding and become zeros; `lengths` [slots]."""
    config, (rows, heads, dim) = scratch.config, q.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    group, early = heads // kv_heads, starts_early(q.device)
    few = triton.next_power_of_2(group)
    pieces = rows * kv_heads * config.splits * few
    assert scratch.stats.numel() >= 2 * pieces and scratch.tickets.numel() >= rows * kv_heads
    _decode[(kv_heads, rows, config.splits)](
        out,
        q,
        keys,
        values,
        tables,
        slots,
        lengths,
        scale * LOG2_E,
        scratch.sums,
        scratch.stats,
        scratch.tickets,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        config.shortest,
        config.splits,
        config.least,
        kv_heads=kv_heads,
        group=group,
        few=few,
        rows=max(16, few),
        dim=dim,
        block_size=block_size,
        tile=config.tile,
        together=max(1, 4096 // (few * dim)),
        early=early,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=early,
    )


@triton.jit(do_not_specialize=["table_stride", "shortest", "splits", "least"])
def _decode(
    out,
    q,
    keys,
    values,
    tables,
    slots,
    lengths,
    scale,
    sums,
    stats,
    tickets,
    q_stride,
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
    early: tl.constexpr,
):
    let_next_start(early)
    head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row)
    length = tl.load(lengths + slot, mask=slot >= 0, other=0)
    await_inputs(early)
    stretch = tl.maximum(tl.cdiv(length, splits), tl.minimum(shortest, tl.cdiv(length, least)))
    stretch = tl.cdiv(stretch, tile) * tile
    first = split * stretch
    g = tl.arange(0, rows)
    d = tl.arange(0, dim)
    home = out + row.to(tl.int64) * out_stride + (head * group + g)[:, None] * dim + d[None, :]
    if first < length:
        stop = tl.minimum(first + stretch, length)
        held = (g < group)[:, None]
        asked = tl.load(
            q + row.to(tl.int64) * q_stride + (head * group + g)[:, None] * dim + d[None, :], mask=held, other=0.0
        )
        best = tl.full([rows], float("-inf"), tl.float32)
        weight = tl.zeros([rows], tl.float32)
        summed = tl.zeros([rows, dim], tl.float32)
        table = tables + slot.to(tl.int64) * table_stride
        t = tl.arange(0, tile)
        for at in range(first, stop, tile):
            place = at + t
            seen = place < stop
            block = tl.load(table + place // block_size, mask=seen, other=0).to(tl.int64)
            cell = (block * kv_heads + head) * (block_size * dim) + (place % block_size) * dim
            k = tl.load(keys + cell[:, None] + d[None, :], mask=seen[:, None], other=0.0)
            score = tl.where(seen[None, :], tl.dot(asked, tl.trans(k)) * scale, float("-inf"))
            peak = tl.maximum(best, tl.max(score, 1))
            p = tl.exp2(score - peak[:, None])
            faded = tl.exp2(best - peak)
            v = tl.load(values + cell[:, None] + d[None, :], mask=seen[:, None], other=0.0)
            summed = summed * faded[:, None] + tl.dot(p.to(v.dtype), v)
            weight = weight * faded + tl.sum(p, 1)
            best = peak
        used = tl.cdiv(length, stretch)
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
    elif (split == 0) & (length <= 0):
        tl.store(home, tl.zeros([rows, dim], out.dtype.element_ty), mask=(g < group)[:, None])


@triton.jit
def merge(
    out,
    sums,
    stats,
    row,
    head,
    pile,
    used,
    out_stride,
    group: tl.constexpr,
    few: tl.constexpr,
    dim: tl.constexpr,
    together: tl.constexpr,
):
    """`together` stretches at a time, always in the order of positions: first their weights, which are few, then what
    they are weights of, so that no reading waits for another."""
    g = tl.arange(0, few)
    d = tl.arange(0, dim)
    s = tl.arange(0, together)
    best = tl.full([few], float("-inf"), tl.float32)
    weight = tl.zeros([few], tl.float32)
    for at in range(0, used, together):
        piece = (pile + at + s)[:, None] * few + g[None, :]
        there = ((at + s) < used)[:, None] & (g < group)[None, :]
        peaks = tl.load(stats + piece * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(stats + piece * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        peak = tl.maximum(best, tl.max(peaks, 0))
        # A head that is padding has no peak at all.
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        weight = weight * tl.exp2(best - anchor) + tl.sum(weights * tl.exp2(peaks - anchor[None, :]), 0)
        best = peak
    anchor = tl.where(best == float("-inf"), 0.0, best)
    summed = tl.zeros([few, dim], tl.float32)
    for at in tl.range(0, used, together, num_stages=3):
        piece = (pile + at + s)[:, None] * few + g[None, :]
        there = ((at + s) < used)[:, None] & (g < group)[None, :]
        peaks = tl.load(stats + piece * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(
            sums + piece[:, :, None].to(tl.int64) * dim + d[None, None, :],
            mask=there[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        summed += tl.sum(parts * tl.exp2(peaks - anchor[None, :])[:, :, None], 0)
    home = out + row.to(tl.int64) * out_stride + (head * group + g)[:, None] * dim + d[None, :]
    tl.store(home, (summed / weight[:, None]).to(out.dtype.element_ty), mask=(g < group)[:, None])
