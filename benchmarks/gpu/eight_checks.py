"""Kernels of rows and matrices in eight bits against float64, on the card, outputs poisoned: rows as they are stored, their
factors, products by the library, and those who read them."""

from collections.abc import Iterator

import torch
from kernel_rig import BLOCK_SIZE, Pages, relative_error
from torch import Tensor

from headrace.runner.cuda.fp8_space import EIGHTS
from headrace.runner.cuda.fp8_weights import LARGEST, quantise_matrix
from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.activation import silu_mul
from headrace.runner.cuda.kernels.decode_attention import DecodeScratch, decode_config
from headrace.runner.cuda.kernels.eights import quantise, rescale
from headrace.runner.cuda.kernels.norms import add_rms_norm, rms_norm
from headrace.runner.cuda.kernels.rotary_write import rotary_write
from headrace.runner.cuda.kernels.row_product import row_product
from headrace.runner.cuda.kernels.streamed_attention import TileQueue
from headrace.runner.cuda.kernels.streamed_decode import StretchScratch, streamed_decode
from headrace.runner.cuda.kernels.streamed_product import can_stream, streamed_config, streamed_product
from headrace.runner.cuda.kernels.turned_attention import turned_attention
from headrace.runner.cuda.products import scaled_product

# bf16 in, bf16 out; a number stored in three bits behind the point is off by half a step at most, on average by less.
TOLERANCE = 6e-3
STORED = 0.03


def eight_checks() -> Iterator[tuple[str, float, float]]:
    for rows, width in ((1, 576), (33, 1024), (300, 4096), (7, 14336)):
        x, residual, weight = _normal(rows, width), _normal(rows, width), _normal(width)
        factors = torch.rand(rows, device="cuda") + 0.5
        out, left = _poisoned(rows, width)
        rms_norm(x, weight, 1e-5, out, out_factors=left)
        yield f"norm in eights {rows}x{width}", _stored_error(out, left, plain.rms_norm(x, weight, 1e-5)), STORED
        added, want = plain.add_rms_norm(x.float() * factors[:, None], residual, weight, 1e-5)
        out, left = _poisoned(rows, width)
        add_rms_norm(x, residual, weight, 1e-5, out, row_factors=factors, out_factors=left)
        error = _stored_error(out, left, want) if relative_error(residual, added) < 2e-3 else torch.nan
        yield f"add+norm in eights {rows}x{width}", error, STORED
        gate_up = _normal(rows, 2 * width)
        out, left = _poisoned(rows, width)
        silu_mul(gate_up, out, row_factors=factors, out_factors=left)
        want = plain.silu_mul(gate_up.double() * factors.double()[:, None])
        yield f"silu*mul in eights {rows}x{width}", _stored_error(out, left, want), STORED
        out, left = _poisoned(rows, width)
        quantise(x, out, left)
        yield f"quantise {rows}x{width}", _stored_error(out, left, x.double()), STORED
        want = x.double() * factors.double()[:, None] + weight.double()
        rescale(x, factors, weight)
        yield f"rescale {rows}x{width}", relative_error(x, want), TOLERANCE
    yield "a row that is not finite", _not_finite(), 0.0
    for rows, height, width in ((16, 6144, 4096), (64, 28672, 4096), (32, 960, 576), (2048, 4096, 14336)):
        yield f"scaled product {rows}x{height}x{width}", _product_error(rows, height, width), TOLERANCE
    streamed = ((16, 6144, 4096), (64, 28672, 4096), (48, 4096, 14336))
    for rows, height, width in streamed if can_stream(torch.device("cuda")) else ():
        error = _product_error(rows, height, width, streamed=True)
        yield f"streamed product in eights {rows}x{height}x{width}", error, TOLERANCE
    for height, width in ((6144, 4096), (4096, 14336), (14336, 4096), (960, 576)):
        for tail in ("", "adds", "gated"):
            yield f"row product in eights {height}x{width} {tail}", _row_error(height, width, tail), TOLERANCE
    for heads, kv_heads, dim, normed in ((32, 8, 128, False), (16, 8, 128, True), (9, 3, 64, False)):
        for streamed in (False, True) if dim == 128 and can_stream(torch.device("cuda")) else (False,):
            error = _attention_error(heads, kv_heads, dim, normed, streamed=streamed)
            yield f"{'streamed ' if streamed else ''}attention with factors {heads}/{kv_heads}x{dim}", error, 0.02


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _poisoned(rows: int, width: int) -> tuple[Tensor, Tensor]:
    out = torch.full((rows, width), torch.nan, device="cuda").to(EIGHTS)
    return out, torch.full((rows,), torch.nan, device="cuda")


def _stored_error(out: Tensor, factors: Tensor, want: Tensor) -> float:
    """NaN where a factor is not that of its row's largest."""
    if not torch.allclose(factors.double() * LARGEST, want.abs().amax(-1), rtol=5e-3):
        return torch.nan
    return relative_error(out.float() * factors[:, None], want)


def _not_finite() -> float:
    """How many rows are what they should not be."""
    x = _normal(5, 4096)
    x[1, 7], x[2, 9], x[3] = torch.nan, torch.inf, 0.0
    out, left = _poisoned(5, 4096)
    quantise(x, out, left)
    found = (out.float() * left[:, None]).sum(-1).isfinite()
    return float((found != torch.tensor([True, False, False, True, True], device="cuda")).sum())


def _product_error(rows: int, height: int, width: int, *, streamed: bool = False) -> float:
    weight, scale = quantise_matrix(_normal(height, width) * 0.02)
    given, left = _poisoned(rows, width)
    quantise(_normal(rows, width), given, left)
    out = torch.full((rows, height), torch.nan, device="cuda", dtype=torch.bfloat16)
    if streamed:
        config = streamed_config(rows, height, width, gated=False, itemsize=1)
        streamed_product(given, weight, out, config, scale=scale)
    else:
        scaled_product(given, weight, torch.ones(1, device="cuda"), scale, out)
    return relative_error(out, given.float().double() @ weight.float().double().t() * scale.double())


def _row_error(height: int, width: int, tail: str) -> float:
    gated, adds = tail == "gated", tail == "adds"
    row, norm = _normal(1, width), _normal(width)
    weight, scale = quantise_matrix(_normal(height * (1 + gated), width) * 0.05)
    before = _normal(1, height) if adds else torch.full((1, height), torch.nan, device="cuda", dtype=torch.bfloat16)
    out = before.clone()
    row_product(row, weight, out, norm=norm, eps=1e-5, adds=adds, gated=gated, scale=scale)
    matrix = weight.float().double() * scale.double()
    return relative_error(out, plain.row_product(row, matrix, norm, 1e-5, None, before if adds else None, gated=gated))


def _attention_error(heads: int, kv_heads: int, dim: int, normed: bool, *, streamed: bool) -> float:
    """Rows with factors against the same kernels over rows that have had them, rounded once more."""
    lengths = [1, 17, 300, 900, 5000]
    rows = len(lengths)
    pages = Pages.make(lengths, kv_heads, dim)
    qkv, factors = _normal(rows, (heads + 2 * kv_heads) * dim), torch.rand(rows, device="cuda") + 0.2
    angles = torch.rand(5001, dim // 2, device="cuda") * 6
    norms = (_normal(dim), _normal(dim)) if normed else (None, None)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    positions, places = pages.lengths - 1, torch.randperm(40 * BLOCK_SIZE, device="cuda")[:rows]
    found = []
    for given, more in ((qkv, factors), ((qkv.float() * factors[:, None]).bfloat16(), None)):
        keys, values = pages.keys[0].clone(), pages.values[0].clone()
        out = torch.full((rows, heads, dim), torch.nan, device="cuda", dtype=torch.bfloat16)
        turns = (given, angles.cos(), angles.sin(), *norms, 1e-6)
        context = (keys, values, pages.tables, slots, pages.lengths, dim**-0.5)
        if streamed:
            stretches = StretchScratch.make(heads, kv_heads, dim, TileQueue.make(132, "cuda"))
            streamed_decode(out, *turns, *context, stretches, row_factors=more)
        else:
            scratch = DecodeScratch.make(rows, heads, kv_heads, dim, decode_config(rows, kv_heads, 8192), "cuda")
            turned_attention(out, *turns, *context, scratch, row_factors=more)
        queries, fresh = torch.full_like(out, torch.nan), [torch.zeros_like(keys) for _ in range(2)]
        rotary_write(
            given, positions, places, angles.cos(), angles.sin(), *norms, 1e-6, queries, *fresh,
            row_factors=more,
        )  # fmt: skip
        found.append((out, keys.nan_to_num(), values.nan_to_num(), queries, *fresh))
    return max(relative_error(one, other) for one, other in zip(*found, strict=True))
