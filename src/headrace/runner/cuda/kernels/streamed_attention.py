# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Attention of chunks that begin their sequences, as `fresh_attention`, near what the tensor cores can do.

The warps of a program divide the work: one fetches tiles, two groups of four multiply, each its half of the rows, so that
one makes weights of its scores while the other multiplies; and each asks for its next scores before it multiplies the
last ones with values. A program stays and takes tile after tile, so that the first keys of the next are there when the
last values of one are read. Written in Gluon for the tensor cores of compute capability 9.0 alone, and unknown to the
interpreter: `benchmarks/gpu/kernels.py` checks it.
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
from headrace.runner.cuda.kernels.fused_product import filled
from headrace.runner.cuda.kernels.rings import advance, barriers, clear_from, fetch, meet

# Of a group of warps, and of both.
_HALF, _ROWS = 64, 128
# Positions read at a time, of which so many tiles are fetched or waited for.
_TILE, _STAGES = 128, 2
_DIM = 128
# Of a thread that multiplies, of one that fetches, and of one as the program starts: three groups of four warps have 65,536.
_BUSY, _IDLE, _FIRST = 240, 24, 168


def streamed_rows(heads: int, kv_heads: int, dim: int) -> int:
    """Tokens of a tile; 0 for heads that it does not know."""
    group = heads // kv_heads
    return _ROWS // group if dim == _DIM and _HALF % group == 0 else 0


@dataclass(slots=True, frozen=True)
class TileQueue:
    """How many programs there are, best one for each multiprocessor, and the tickets that they draw: the next tile's, and
    one as they leave. Zero between launches."""

    programs: int
    tickets: Tensor

    @classmethod
    def make(cls, programs: int, device: torch.device | str) -> "TileQueue":
        return cls(programs, torch.zeros(2, dtype=torch.int32, device=device))


def streamed_attention(
    out: Tensor, q: Tensor, qkv: Tensor, offsets: Tensor, tiles: Tensor, scale: float, queue: TileQueue
) -> None:
    """As `fresh_attention`, with tiles of `streamed_rows`; none that names a chunk is behind one that does not. Who takes
    which is left to chance, for multiprocessors differ in how fast they are fed: by turns it takes a seventh longer."""
    (_, heads, dim), kv_heads = q.shape, (qkv.shape[1] // q.shape[2] - q.shape[1]) // 2
    assert q.dtype == qkv.dtype == torch.bfloat16 and streamed_rows(heads, kv_heads, dim)
    group, entries = heads // kv_heads, tiles.shape[0] * kv_heads
    k, v = qkv[:, heads * dim : -kv_heads * dim], qkv[:, -kv_heads * dim :]
    asked = [_HALF // group, group, dim]
    _attend_streamed[(min(queue.programs, entries),)](
        out,
        TensorDescriptor(q, list(q.shape), list(q.stride()), asked, _laid(asked)),
        _tiled(k),
        _tiled(v),
        offsets,
        tiles,
        scale * LOG2_E,
        out.stride(0),
        entries,
        queue.tickets,
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        half=_HALF,
        tile=_TILE,
        stages=_STAGES,
        busy=_BUSY,
        idle=_IDLE,
        num_warps=4,
        maxnreg=_FIRST,
        launch_pdl=True,
    )


def _tiled(rows: Tensor) -> TensorDescriptor:
    block = [_TILE, _DIM]
    return TensorDescriptor(rows, [filled(rows, _TILE), rows.shape[1]], list(rows.stride()), block, _laid(block))


def _laid(block: list[int]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)


@gluon.jit(do_not_specialize=["entries"])
def _attend_streamed(
    out,
    q,
    keys,
    values,
    offsets,
    tiles,
    scale,
    out_stride,
    entries,
    tickets,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    half: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
    busy: gl.constexpr,
    idle: gl.constexpr,
):
    gdc_launch_dependents()
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([half, dim], gl.bfloat16)
    # The queries of two tiles, each in two halves.
    qs = gl.allocate_shared_memory(gl.bfloat16, [4, half, dim], flat)
    ks = gl.allocate_shared_memory(gl.bfloat16, [stages, tile, dim], keys.layout)
    vs = gl.allocate_shared_memory(gl.bfloat16, [stages, tile, dim], values.layout)
    notes = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_free = barriers(2, 1), barriers(2, 2)
    k_full, k_free = barriers(stages, 1), barriers(stages, 2)
    v_full, v_free = barriers(stages, 1), barriers(stages, 2)
    fence_async_shared()
    where = (offsets, tiles, entries, tickets)
    rings = (qs, ks, vs, notes, q_full, q_free, k_full, k_free, v_full, v_free)
    gl.warp_specialize(
        [
            (_multiply, (out, rings, scale, out_stride, 0, kv_heads, group, dim, half, tile, stages)),
            (_multiply, (out, rings, scale, out_stride, 1, kv_heads, group, dim, half, tile, stages)),
            (_provide, (q, keys, values, where, rings, kv_heads, group, dim, half, tile, stages)),
        ],
        [4, 1],
        [busy, idle],
    )


@gluon.jit
def _entry(tiles, entries, ticket, kv_heads: gl.constexpr):
    """A chunk, -1 where there is none, which tile of it, and a key head."""
    entry, there = tiles + 4 * (ticket // kv_heads), ticket < entries
    return gl.load(entry, mask=there, other=-1), gl.load(entry + 1, mask=there, other=0), ticket % kv_heads


@gluon.jit
def _provide(
    q,
    keys,
    values,
    where,
    rings,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    half: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
):
    tokens: gl.constexpr = 2 * half // group
    offsets, tiles, entries, tickets = where
    qs, ks, vs, notes, q_full, q_free, k_full, k_free, v_full, v_free = rings
    stage, phase, place, side = 0, 1, 0, 1
    ticket = gl.program_id(0)
    chunk, which, head = _entry(tiles, entries, ticket, kv_heads)
    # All before this is no other launch's; the others read and write nothing before they are told to.
    gdc_wait()
    while chunk >= 0:
        begin = gl.load(offsets + chunk)
        count = gl.load(offsets + chunk + 1) - begin
        first = which * tokens
        mbarrier.wait(q_free.index(place), side)
        _note(notes.index(place), begin, count, first, head)
        mbarrier.expect(q_full.index(place), 4 * half * dim)
        for part in gl.static_range(2):
            mine = qs.index(2 * place + part).reshape((half // group, group, dim))
            line = begin + first + part * (tokens // 2)
            fetch(q, [line, head * group, 0], q_full.index(place), mine)
        place, side = advance(place, side, 2)
        # Asked for now, needed after these.
        ticket = gl.num_programs(0) + gl.atomic_add(tickets, 1)
        chunk, which, later = _entry(tiles, entries, ticket, kv_heads)
        blocks = (gl.minimum(first + tokens, count) + tile - 1) // tile
        for block in range(blocks):
            line = begin + (blocks - 1 - block) * tile
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), 2 * tile * dim)
            fetch(keys, [line, head * dim], k_full.index(stage), ks.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), 2 * tile * dim)
            fetch(values, [line, head * dim], v_full.index(stage), vs.index(stage))
            stage, phase = advance(stage, phase, stages)
        head = later
    mbarrier.wait(q_free.index(place), side)
    _note(notes.index(place), 0, 0, 0, 0)
    mbarrier.arrive(q_full.index(place))
    if gl.atomic_add(tickets + 1, 1) == gl.num_programs(0) - 1:
        gl.store(tickets, 0)
        gl.store(tickets + 1, 0)


@gluon.jit
def _note(notes, begin, count, first, head):
    """For those who multiply: whose tile comes next. No tokens: none does."""
    i = gl.arange(0, 4, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    notes.store(gl.where(i == 0, begin, gl.where(i == 1, count, gl.where(i == 2, first, head))))
    meet()


@gluon.jit
def _noted(notes):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = gl.arange(0, 4, layout)
    told = notes.load(layout)
    begin, count = gl.sum(gl.where(i == 0, told, 0), 0), gl.sum(gl.where(i == 1, told, 0), 0)
    return begin, count, gl.sum(gl.where(i == 2, told, 0), 0), gl.sum(gl.where(i == 3, told, 0), 0)


@gluon.jit
def _multiply(
    out,
    rings,
    scale,
    out_stride,
    part: gl.constexpr,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    half: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
):
    """Half of a tile's rows: the last positions that they see first, of which no row sees all, then all before them."""
    tokens: gl.constexpr = 2 * half // group
    over: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile, 16])
    into: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])
    chosen: gl.constexpr = gl.DotOperandLayout(0, into, 2)
    qs, ks, vs, notes, q_full, q_free, k_full, k_free, v_full, v_free = rings
    none = gl.zeros([half, tile], gl.float32, over)
    row = part * half + gl.arange(0, half, gl.SliceLayout(1, over))
    seen = gl.arange(0, tile, gl.SliceLayout(0, over))
    r = part * half + gl.arange(0, half, gl.SliceLayout(1, into))
    d = gl.arange(0, dim, gl.SliceLayout(0, into))
    stage, phase, place, side = 0, 0, 0, 0
    mbarrier.wait(q_full.index(place), side)
    begin, count, first, head = _noted(notes.index(place))
    while count > 0:
        blocks = (gl.minimum(first + tokens, count) + tile - 1) // tile
        mine = qs.index(2 * place + part)
        mbarrier.wait(k_full.index(stage), phase)
        asked = warpgroup_mma(mine, ks.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(asked,))
        mbarrier.arrive(k_free.index(stage))
        at = (blocks - 1) * tile
        score = gl.where((at + seen)[None, :] <= (first + row // group)[:, None], score, float("-inf"))
        best = gl.max(score, 1) * scale
        p = gl.exp2(score * scale - best[:, None])
        weight = gl.sum(p, 1)
        held = gl.convert_layout(p.to(gl.bfloat16), chosen)
        summed = gl.zeros([half, dim], gl.float32, into)
        mbarrier.wait(v_full.index(stage), phase)
        if at + tile > count:
            # Both groups clear them: the second writes what is there.
            clear_from(vs.index(stage), count - at, tile)
        last = stage
        last_phase = phase
        stage, phase = advance(stage, phase, stages)
        for _ in range(1, blocks):
            mbarrier.wait(k_full.index(stage), phase)
            asked = warpgroup_mma(mine, ks.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(last), last_phase)
            total = warpgroup_mma(held, vs.index(last), summed, is_async=True)
            score = warpgroup_mma_wait(1, deps=(asked,))
            mbarrier.arrive(k_free.index(stage))
            peak = gl.maximum(best, gl.max(score, 1) * scale)
            p = gl.exp2(score * scale - peak[:, None])
            faded = gl.exp2(best - peak)
            weight = weight * faded + gl.sum(p, 1)
            summed, held = warpgroup_mma_wait(0, deps=(total, held))
            mbarrier.arrive(v_free.index(last))
            summed *= gl.convert_layout(faded, gl.SliceLayout(1, into))[:, None]
            held = gl.convert_layout(p.to(gl.bfloat16), chosen)
            best = peak
            last = stage
            last_phase = phase
            stage, phase = advance(stage, phase, stages)
        mbarrier.arrive(q_free.index(place))
        place, side = advance(place, side, 2)
        mbarrier.wait(v_full.index(last), last_phase)
        total = warpgroup_mma(held, vs.index(last), summed, is_async=True)
        token = first + r // group
        lines = (begin + token).to(gl.int64) * out_stride + (head * group + r % group) * dim
        kept = (token < count)[:, None]
        summed, held = warpgroup_mma_wait(0, deps=(total, held))
        mbarrier.arrive(v_free.index(last))
        summed /= gl.convert_layout(weight, gl.SliceLayout(1, into))[:, None]
        gl.store(out + lines[:, None] + d[None, :], summed.to(gl.bfloat16), mask=kept)
        mbarrier.wait(q_full.index(place), side)
        begin, count, first, head = _noted(notes.index(place))
