# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Attention of chunks of tokens over paged keys and values: what lies before a chunk is read from its blocks, and so is
the chunk itself, which was written before.

Many chunks share a launch: the host lists tiles, a few tokens of one chunk each. A tile's rows are tokens times the
query heads that share a key head. Keys are cut at fixed absolute positions and every row runs through the same
arithmetic, so a row's bits depend on its own sequence alone, unless few tiles with much before them are cut into parts
to fill the card; the last part of a tile to finish merges them. Knows slots, not plans.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

_LOG2_E = 1.4426950408889634
# Shared memory of a program, at most, on cards for computing (A100, H200); those for graphics have 99 KiB.
ROOMY = 160 << 10


class PrefillConfig(Struct, frozen=True):
    """`rows` of a tile, `tile` positions read at a time."""

    rows: int = 128
    tile: int = 128
    num_warps: int = 8
    num_stages: int = 5

    def tokens(self, heads: int, kv_heads: int) -> int:
        """Tokens of a tile."""
        return self.rows // (heads // kv_heads)


def prefill_config(dim: int, shared_bytes: int = ROOMY) -> PrefillConfig:
    """Measured on an H200 for heads of 64 and 128. The others are what every card has room for: compiled, the largest
    takes 96 KiB of shared memory."""
    if dim > 128:
        return PrefillConfig(rows=64, tile=32, num_stages=2)
    if dim > 64 and shared_bytes >= ROOMY:
        return PrefillConfig()
    return PrefillConfig(tile=64, num_stages=3)


def spread_over(kv_heads: int, multiprocessors: int = 132) -> int:
    """Entries of the tile list that fill a card, each with all its heads."""
    return max(1, multiprocessors // kv_heads)


@dataclass(slots=True, frozen=True)
class PrefillScratch:
    """What parts of the first `entries` of the tile list leave for the merge: sums [entries, kv heads, rows, dim], and
    maximum and weight of each row. `tickets` count finished parts; zero between launches."""

    sums: Tensor
    stats: Tensor
    tickets: Tensor

    @classmethod
    def make(
        cls, entries: int, kv_heads: int, dim: int, config: PrefillConfig, device: torch.device | str
    ) -> "PrefillScratch":
        rows = entries * kv_heads * config.rows
        return cls(
            sums=torch.empty(rows * dim, dtype=torch.float32, device=device),
            stats=torch.empty(rows * 2, dtype=torch.float32, device=device),
            tickets=torch.zeros(entries * kv_heads, dtype=torch.int32, device=device),
        )


def prefill_attention(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    offsets: Tensor,
    prior: Tensor,
    tiles: Tensor,
    scale: float,
    config: PrefillConfig,
    scratch: PrefillScratch | None = None,
) -> None:
    """`out`, `q` [tokens, heads, dim]; `keys`, `values` [blocks, kv heads, block size, dim] of one layer; `tables`
    [slots, max blocks]; for each chunk its slot, where its tokens lie (`offsets` [chunks + 1]) and how many positions are
    `prior` to it; `tiles` [m, 4] name a chunk (-1: none), which tile of it, and which part of how many of what lies before
    that tile, best those that read most first. Parts follow each other, and need `scratch`."""
    heads, dim = q.shape[1:]
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    _prefill[(kv_heads, tiles.shape[0])](
        out,
        q,
        keys,
        values,
        tables,
        slots,
        offsets,
        prior,
        tiles,
        scale * _LOG2_E,
        None if scratch is None else scratch.sums,
        None if scratch is None else scratch.stats,
        None if scratch is None else scratch.tickets,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        kv_heads=kv_heads,
        group=heads // kv_heads,
        dim=dim,
        block_size=block_size,
        rows=config.rows,
        tokens=config.tokens(heads, kv_heads),
        tile=config.tile,
        cut=scratch is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def _prefill(
    out,
    q,
    keys,
    values,
    tables,
    slots,
    offsets,
    prior,
    tiles,
    scale,
    sums,
    stats,
    tickets,
    q_stride,
    out_stride,
    table_stride,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    block_size: tl.constexpr,
    rows: tl.constexpr,
    tokens: tl.constexpr,
    tile: tl.constexpr,
    cut: tl.constexpr,
):
    head, place = tl.program_id(0), tl.program_id(1)
    chunk = tl.load(tiles + 4 * place)
    if chunk >= 0:
        before = tl.load(prior + chunk)
        table = tables + tl.load(slots + chunk).to(tl.int64) * table_stride
        first, begin, count = lie(tiles + 4 * place, offsets + chunk, tokens)
        token, held, column, line = queries(head, first, begin, count, group, dim, rows, tokens)
        asked = tl.load(q + line * q_stride + column, mask=held, other=0.0)
        position = before + token

        best = tl.full([rows], float("-inf"), tl.float32)
        weight = tl.zeros([rows], tl.float32)
        summed = tl.zeros([rows, dim], tl.float32)
        stop = before + tl.minimum(first + tokens, count)
        # Up to here every row sees all that is read.
        clear = (before + first + 1) // tile * tile
        begin_at, end_at, edge_at = 0, clear, clear
        parts = 1
        if cut:
            parts = tl.load(tiles + 4 * place + 3)
            later = parts - 1 - tl.load(tiles + 4 * place + 2)
            stretch = tl.cdiv(clear // tile, parts) * tile
            end_at = tl.maximum(clear - later * stretch, 0)
            begin_at = tl.maximum(end_at - stretch, 0)
            # The edge belongs to the last part, in which every row sees something: the first may be empty.
            edge_at = tl.where(later == 0, clear, stop)
        best, weight, summed = _attend(
            best, weight, summed, asked, keys, values, table, head, position, begin_at, end_at, stop, scale,
            kv_heads, dim, block_size, tile, False,
        )  # fmt: skip
        best, weight, summed = _attend(
            best, weight, summed, asked, keys, values, table, head, position, edge_at, stop, stop, scale,
            kv_heads, dim, block_size, tile, True,
        )  # fmt: skip
        if cut:
            if parts > 1:
                r = tl.arange(0, rows)
                piece = (place * kv_heads + head) * rows + r
                tl.store(sums + piece[:, None].to(tl.int64) * dim + tl.arange(0, dim)[None, :], summed)
                tl.store(stats + piece * 2, best)
                tl.store(stats + piece * 2 + 1, weight)
                last = place + later
                # Every thread's part is written before one of them says so.
                tl.debug_barrier()
                ticket = tickets + last * kv_heads + head
                if tl.atomic_add(ticket, 1, sem="acq_rel") == parts - 1:
                    tl.store(ticket, 0)
                    weight, summed = _merge(
                        sums, stats, (last * kv_heads + head) * rows + r, parts, kv_heads, rows, dim
                    )
                    put(out, line * out_stride + column, summed, weight, held)
            else:
                put(out, line * out_stride + column, summed, weight, held)
        else:
            put(out, line * out_stride + column, summed, weight, held)


@triton.jit
def lie(entry, offset, tokens: tl.constexpr):
    """Of the tile that an entry names: its first token in the chunk, the chunk's line in the step and its tokens."""
    begin = tl.load(offset)
    return tl.load(entry + 1) * tokens, begin, tl.load(offset + 1) - begin


@triton.jit
def queries(
    head, first, begin, count, group: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, tokens: tl.constexpr
):
    """A program's rows are the heads of a group for each of a tile's tokens: whose each is, whether there is such a token,
    and the column and line where it lies."""
    r = tl.arange(0, rows)
    token = first + r // group
    held = ((r < tokens * group) & (token < count))[:, None]
    column = (head * group + r % group)[:, None] * dim + tl.arange(0, dim)[None, :]
    return token, held, column, (begin + token)[:, None].to(tl.int64)


@triton.jit
def put(out, places, summed, weight, held):
    tl.store(out + places, (summed / weight[:, None]).to(out.dtype.element_ty), mask=held)


@triton.jit
def _merge(sums, stats, piece, parts, kv_heads: tl.constexpr, rows: tl.constexpr, dim: tl.constexpr):
    """Weight and sum of all parts, from `piece`, the last one, back to the first, which may hold nothing."""
    d = tl.arange(0, dim)
    best = tl.full([rows], float("-inf"), tl.float32)
    weight = tl.zeros([rows], tl.float32)
    summed = tl.zeros([rows, dim], tl.float32)
    for _ in range(parts):
        peak = tl.load(stats + piece * 2, cache_modifier=".cg")
        part = tl.load(stats + piece * 2 + 1, cache_modifier=".cg")
        among = tl.load(sums + piece[:, None].to(tl.int64) * dim + d[None, :], cache_modifier=".cg")
        higher = tl.maximum(best, peak)
        faded, kept = tl.exp2(best - higher), tl.exp2(peak - higher)
        weight = weight * faded + part * kept
        summed = summed * faded[:, None] + among * kept[:, None]
        best = higher
        piece -= kv_heads * rows
    return weight, summed


@triton.jit
def _attend(
    best,
    weight,
    summed,
    asked,
    keys,
    values,
    table,
    head,
    position,
    begin,
    end,
    stop,
    scale,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    edge: tl.constexpr,
):
    """Positions begin .. end, of which there are `stop` to read; at the `edge` some rows do not see all of them."""
    t = tl.arange(0, tile)
    d = tl.arange(0, dim)
    for at in range(begin, end, tile):
        place = at + t
        if edge:
            there = place < stop
            block = tl.load(table + place // block_size, mask=there, other=0).to(tl.int64)
        else:
            block = tl.load(table + place // block_size).to(tl.int64)
        cell = (block * kv_heads + head) * (block_size * dim) + (place % block_size) * dim
        if edge:
            k = tl.load(keys + cell[:, None] + d[None, :], mask=there[:, None], other=0.0)
        else:
            k = tl.load(keys + cell[:, None] + d[None, :])
        score = tl.dot(asked, tl.trans(k))
        if edge:
            score = tl.where(there[None, :] & (place[None, :] <= position[:, None]), score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - peak[:, None])
        faded = tl.exp2(best - peak)
        if edge:
            v = tl.load(values + cell[:, None] + d[None, :], mask=there[:, None], other=0.0)
        else:
            v = tl.load(values + cell[:, None] + d[None, :])
        weight = weight * faded + tl.sum(p, 1)
        summed = summed * faded[:, None]
        summed = tl.dot(p.to(v.dtype), v, summed)
        best = peak
    return best, weight, summed
