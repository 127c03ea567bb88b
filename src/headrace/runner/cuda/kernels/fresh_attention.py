# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Attention of chunks that begin their sequences: all that their tokens see lies in the step's own rows, one behind the
other, where the card's copy engine fetches whole tiles of it.

Programs are half as large as those of `prefill_attention`, so that two share a multiprocessor: one multiplies while the
other makes weights of its scores. Knows neither pages nor slots.
"""

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.runner.cuda.kernels.decode_attention import LOG2_E
from headrace.runner.cuda.kernels.early import starts_early
from headrace.runner.cuda.kernels.prefill_attention import lie, put, queries


class FreshConfig(Struct, frozen=True):
    """`rows` of a program, `tile` positions read at a time. Measured on an H200."""

    rows: int = 64
    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3


_CONFIG = FreshConfig()
# Of a multiprocessor, for two programs: later cards of other kinds have half as much.
_SHARED_BYTES = 214 << 10


def fresh_rows(heads: int, kv_heads: int, dim: int, device: torch.device, shared_bytes: int = _SHARED_BYTES) -> int:
    """Tokens of a tile; 0 for heads that were not found to be faster so, and for cards that have too little shared memory or
    no copy engine, which came with compute capability 9.0."""
    is_able = device.type == "cpu" or (starts_early(device) and shared_bytes >= _SHARED_BYTES)
    return _CONFIG.rows // (heads // kv_heads) if dim == 128 and is_able else 0


def fresh_attention(out: Tensor, q: Tensor, qkv: Tensor, offsets: Tensor, tiles: Tensor, scale: float) -> None:
    """`out`, `q` [tokens, heads, dim]; `qkv` [tokens, (heads + 2 kv heads) dim], whose keys are turned; `offsets`
    [chunks + 1]: where each chunk's tokens lie; `tiles` [m, 4] name a chunk (-1: none) and which `fresh_rows` of its tokens,
    best those that read most first."""
    heads, dim = q.shape[1:]
    kv_heads = (qkv.shape[1] // dim - heads) // 2
    k, v = qkv[:, heads * dim : -kv_heads * dim], qkv[:, -kv_heads * dim :]
    keys, values = (TensorDescriptor(x, list(x.shape), list(x.stride()), [_CONFIG.tile, dim]) for x in (k, v))
    group = heads // kv_heads
    _fresh[(kv_heads, tiles.shape[0])](
        out,
        q,
        keys,
        values,
        offsets,
        tiles,
        scale * LOG2_E,
        q.stride(0),
        out.stride(0),
        group=group,
        dim=dim,
        rows=_CONFIG.rows,
        tokens=_CONFIG.rows // group,
        tile=_CONFIG.tile,
        num_warps=_CONFIG.num_warps,
        num_stages=_CONFIG.num_stages,
    )


@triton.jit
def _fresh(
    out,
    q,
    keys,
    values,
    offsets,
    tiles,
    scale,
    q_stride,
    out_stride,
    group: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    tokens: tl.constexpr,
    tile: tl.constexpr,
):
    head, place = tl.program_id(0), tl.program_id(1)
    chunk = tl.load(tiles + 4 * place)
    if chunk >= 0:
        first, begin, count = lie(tiles + 4 * place, offsets + chunk, tokens)
        token, held, column, line = queries(head, first, begin, count, group, dim, rows, tokens)
        asked = tl.load(q + line * q_stride + column, mask=held, other=0.0)
        best = tl.full([rows], float("-inf"), tl.float32)
        weight = tl.zeros([rows], tl.float32)
        summed = tl.zeros([rows, dim], tl.float32)
        stop = tl.minimum(first + tokens, count)
        # Up to here every row sees all that is read.
        clear = (first + 1) // tile * tile
        best, weight, summed = _attend(
            best, weight, summed, asked, keys, values, begin, head * dim, token, 0, clear, stop, scale, tile, False
        )
        best, weight, summed = _attend(
            best, weight, summed, asked, keys, values, begin, head * dim, token, clear, stop, stop, scale, tile, True
        )
        put(out, line * out_stride + column, summed, weight, held)


@triton.jit
def _attend(
    best,
    weight,
    summed,
    asked,
    keys,
    values,
    begin,
    column,
    token,
    start,
    end,
    stop,
    scale,
    tile: tl.constexpr,
    edge: tl.constexpr,
):
    """Positions start .. end of a chunk that begins in line `begin`; at the `edge` some rows do not see all of them, and
    what lies from `stop` on is another chunk's or padding, and may be anything."""
    for at in range(start, end, tile):
        place = at + tl.arange(0, tile)
        score = tl.dot(asked, keys.load([begin + at, column]).T)
        if edge:
            score = tl.where(place[None, :] <= token[:, None], score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - peak[:, None])
        faded = tl.exp2(best - peak)
        weight = weight * faded + tl.sum(p, 1)
        summed = summed * faded[:, None]
        # Only now: nothing before this needs to wait for the values.
        v = values.load([begin + at, column])
        if edge:
            v = tl.where((place < stop)[:, None], v, 0.0)
        summed = tl.dot(p.to(v.dtype), v, summed)
        best = peak
    return best, weight, summed
