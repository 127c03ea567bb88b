# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""From the fused product of queries, keys and values to attention's inputs: norms of queries and keys where the model
has them, rotation, and keys and values written to their cells. A row without a cell (-1) writes none."""

import triton
import triton.language as tl
from torch import Tensor

from headrace.runner.cuda.kernels.early import await_inputs, let_next_start, starts_early

# Heads that one program turns.
_HEADS = 8


def rotary_write(
    qkv: Tensor,
    positions: Tensor,
    cells: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    q_out: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    row_factors: Tensor | None = None,
    in_place: bool = False,
) -> None:
    """`qkv` [tokens, (heads + 2 kv heads) dim]; `positions` [tokens]; `cells` [tokens] int64, block times block size plus
    offset; `cos`, `sin` [context, dim / 2]; `q_out` [tokens, heads, dim]; `keys`, `values` [blocks, kv heads, block size,
    dim] of one layer; `row_factors` [tokens]: what `qkv` is still to be multiplied with. `in_place`: keys and values are
    left in `qkv` too, as they are in their cells."""
    tokens, heads, dim = q_out.shape
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    normed, early = q_norm is not None, starts_early(qkv.device)
    assert normed == (k_norm is not None)
    _turn[(tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        qkv,
        positions,
        cells,
        cos,
        sin,
        q_norm if normed else cos,
        k_norm if normed else cos,
        eps,
        q_out,
        keys,
        values,
        cos if row_factors is None else row_factors,
        qkv.stride(0),
        q_out.stride(0),
        heads=heads,
        kv_heads=kv_heads,
        half=dim // 2,
        block_size=block_size,
        some=_HEADS,
        normed=normed,
        scaled=row_factors is not None,
        in_place=in_place,
        early=early,
        num_warps=2,
        launch_pdl=early,
    )


@triton.jit
def _turn(
    qkv,
    positions,
    cells,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    q_out,
    keys,
    values,
    row_factors,
    qkv_stride,
    q_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    block_size: tl.constexpr,
    some: tl.constexpr,
    normed: tl.constexpr,
    scaled: tl.constexpr,
    in_place: tl.constexpr,
    early: tl.constexpr,
):
    let_next_start(early)
    await_inputs(early)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * some + tl.arange(0, some))[:, None]
    i = tl.arange(0, half)[None, :]
    dim: tl.constexpr = 2 * half
    there = (head < heads + 2 * kv_heads) & (i < half)
    is_query = there & (head < heads)
    is_key = there & (head >= heads) & (head < heads + kv_heads)
    source = qkv + token * qkv_stride + head * dim + i
    low = tl.load(source, mask=there, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=there, other=0.0).to(tl.float32)
    if scaled:
        factor = tl.load(row_factors + token)
        low *= factor
        high *= factor
    turned = is_query | is_key
    if normed:
        size = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / dim
        rescale = tl.where(turned, tl.rsqrt(size + eps)[:, None], 1.0)
        low_weight = tl.load(q_norm + i, mask=is_query, other=1.0).to(tl.float32)
        low_weight *= tl.load(k_norm + i, mask=is_key, other=1.0).to(tl.float32)
        high_weight = tl.load(q_norm + half + i, mask=is_query, other=1.0).to(tl.float32)
        high_weight *= tl.load(k_norm + half + i, mask=is_key, other=1.0).to(tl.float32)
        low *= rescale * low_weight
        high *= rescale * high_weight
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * half + i, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + position * half + i, mask=turned, other=0.0).to(tl.float32)
    left = low * c - high * s
    right = high * c + low * s

    asked = q_out + token * q_stride + head * dim + i
    tl.store(asked, left.to(q_out.dtype.element_ty), mask=is_query)
    tl.store(asked + half, right.to(q_out.dtype.element_ty), mask=is_query)
    if in_place:
        # Values are what they were, unless they had a factor.
        changed = (there & (head >= heads)) if scaled else is_key
        tl.store(source, left.to(qkv.dtype.element_ty), mask=changed)
        tl.store(source + half, right.to(qkv.dtype.element_ty), mask=changed)
    cell = tl.load(cells + token)
    kept = cell >= 0
    place = (cell // block_size) * (kv_heads * block_size) + cell % block_size
    key = keys + (place + (head - heads) * block_size) * dim + i
    tl.store(key, left.to(keys.dtype.element_ty), mask=is_key & kept)
    tl.store(key + half, right.to(keys.dtype.element_ty), mask=is_key & kept)
    value = values + (place + (head - heads - kv_heads) * block_size) * dim + i
    is_value = there & (head >= heads + kv_heads) & kept
    tl.store(value, left.to(values.dtype.element_ty), mask=is_value)
    tl.store(value + half, right.to(values.dtype.element_ty), mask=is_value)
