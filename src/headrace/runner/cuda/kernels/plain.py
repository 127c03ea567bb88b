"""What the kernels compute, in plain torch: the truth they are tested against, and how to read them.

Nothing here is fast. Works on any device and in the dtype of its inputs' arithmetic partner: float64 unless
said otherwise. Knows nothing that a kernel's signature does not say.
"""

import torch
from torch import Tensor


def gather_context(cells: Tensor, table: Tensor, length: int) -> Tensor:
    """[length, kv heads, dim] of `cells` [blocks, kv heads, block size, dim]."""
    block_size = cells.shape[2]
    blocks = table[: -(-length // block_size)].long()
    lines = cells[blocks].transpose(1, 2).reshape(-1, cells.shape[1], cells.shape[3])
    return lines[:length]


def attend(q: Tensor, keys: Tensor, values: Tensor, prior: int, scale: float) -> Tensor:
    """Tokens `q` [t, heads, dim] at positions `prior` and after, over keys and values [positions, kv heads, dim]."""
    tokens, heads, _ = q.shape
    group = heads // keys.shape[1]
    k = keys.double().repeat_interleave(group, 1)
    v = values.double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,phd->htp", q.double(), k) * scale
    places = torch.arange(keys.shape[0], device=q.device)
    hidden = places[None, :] > prior + torch.arange(tokens, device=q.device)[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return torch.einsum("htp,phd->thd", weights, v)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, slots: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, slot in enumerate(slots.tolist()):
        length = int(lengths[slot]) if slot >= 0 else 0
        if length > 0:
            seen, held = (gather_context(cells, tables[slot], length) for cells in (keys, values))
            out[row] = attend(q[row : row + 1], seen, held, length - 1, scale)[0]
    return out


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    slots: Tensor,
    offsets: Tensor,
    prior: Tensor,
    scale: float,
) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    bounds = offsets.tolist()
    for chunk, (slot, before) in enumerate(zip(slots.tolist(), prior.tolist(), strict=True)):
        tokens = slice(bounds[chunk], bounds[chunk + 1])
        length = before + bounds[chunk + 1] - bounds[chunk]
        seen, held = (gather_context(cells, tables[slot], length) for cells in (keys, values))
        out[tokens] = attend(q[tokens], seen, held, before, scale)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the new residual in its own dtype, its norm)."""
    added = (x.float() + residual.float()).to(residual.dtype)
    return added, rms_norm(added, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def row_product(
    row: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    bias: Tensor | None,
    before: Tensor | None,
    *,
    gated: bool,
) -> Tensor:
    """RMSNorm, where there is one, then the product; then the gate, or bias and what was there before."""
    found = (row.double() if norm is None else rms_norm(row, norm, eps)) @ weight.double().t()
    if gated:
        return silu_mul(found)
    return found + sum((part.double() for part in (bias, before) if part is not None), torch.zeros_like(found))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [tokens, heads, dim] by angles [tokens, dim / 2]."""
    low, high = x.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((low * c - high * s, high * c + low * s), -1)


def rotary(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turned queries and keys, and values, each [tokens, heads, dim]."""
    rows = qkv.double().view(len(positions), heads + 2 * kv_heads, -1)
    q, k, v = torch.split(rows, [heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    places = positions.long()
    return turn(q, cos[places], sin[places]), turn(k, cos[places], sin[places]), v


def put(cells: Tensor, places: Tensor, rows: Tensor) -> None:
    """`rows` [tokens, kv heads, dim] into the cells numbered `places`, where that is not -1."""
    held = places >= 0
    block_size = cells.shape[2]
    cells[places[held] // block_size, :, places[held] % block_size] = rows[held].to(cells.dtype)


def kept(values: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The chances [vocabulary] that min-p, top-k and top-p leave, each over what the one before left; they sum to 1.
    Of equal logits the lower id is the better."""
    order = torch.argsort(values.double(), descending=True, stable=True)
    scaled = (values.double()[order] - values.double()[order[0]]) / temperature
    weights = torch.exp(scaled)
    if min_p > 0:
        weights = torch.where(weights >= min_p, weights, 0.0)
    if top_k > 0:
        weights[top_k:] = 0.0
    weights /= weights.sum()
    before = weights.cumsum(0) - weights
    if top_p < 1:
        weights = torch.where(before < top_p, weights, 0.0)
    chances = torch.zeros_like(weights)
    chances[order] = weights / weights.sum()
    return chances
