"""Rows in eight bits: every row by a factor of its own, and every reader multiplies with it."""

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from headrace.runner.cuda.fp8_space import EIGHTS
from headrace.runner.cuda.fp8_weights import LARGEST, quantise_matrix
from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.activation import silu_mul
from headrace.runner.cuda.kernels.decode_attention import DecodeConfig, DecodeScratch
from headrace.runner.cuda.kernels.eights import quantise, rescale
from headrace.runner.cuda.kernels.norms import add_rms_norm, rms_norm
from headrace.runner.cuda.kernels.rotary_write import rotary_write
from headrace.runner.cuda.kernels.row_product import RowConfig, row_product
from headrace.runner.cuda.kernels.turned_attention import turned_attention
from headrace.runner.cuda.triton_ops import TritonOps
from tests.unit.runner.cuda.cuda_rig import CudaDesk
from tests.unit.runner.cuda.kernels.paged import BLOCK_SIZE, HALF, paged, relative_error
from tests.unit.runner.torch.model_rig import ids, model

pytestmark = pytest.mark.unit

# Of what is stored in float16; products of the interpreter are as exact.
TOLERANCE = 2e-3
# Half a step of three bits behind the point.
STEP = 2**-4


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def _poisoned(count: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.full((count, width), torch.nan).to(EIGHTS), torch.full((count,), torch.nan)


def _is_stored(out: Tensor, factors: Tensor, want: Tensor) -> bool:
    """As near as eight bits can be, the largest of each row at the top; subnormal numbers have a step of their own."""
    found = out.double() * factors.double()[:, None]
    near = (found - want).abs() <= STEP * 1.01 * want.abs() + factors.double()[:, None] * 2**-10
    return bool(near.all()) and torch.allclose(factors.double() * LARGEST, want.abs().amax(-1), rtol=1e-4)


def test_norms_leave_rows_in_eight_bits() -> None:
    x, residual, weight = rows(3, 100) * 40, rows(3, 100, seed=1), rows(100, seed=2)
    factors = torch.tensor([0.01, 0.5, 2.0])
    out, left = _poisoned(3, 100)
    rms_norm(x, weight, 1e-6, out, out_factors=left)
    assert _is_stored(out, left, plain.rms_norm(x, weight, 1e-6))
    added, want = plain.add_rms_norm(x.float() * factors[:, None], residual, weight, 1e-6)
    out, left = _poisoned(3, 100)
    add_rms_norm(x, residual, weight, 1e-6, out, row_factors=factors, out_factors=left)
    assert torch.equal(residual, added)
    assert _is_stored(out, left, want)


def test_gates_leave_rows_in_eight_bits() -> None:
    gate_up, factors = rows(3, 2 * 150) * 9, torch.tensor([0.01, 0.1, 0.7])
    out, left = _poisoned(3, 150)
    silu_mul(gate_up, out, row_factors=factors, out_factors=left)
    assert _is_stored(out, left, plain.silu_mul(gate_up.double() * factors[:, None]))


def test_a_row_is_stored_alone_as_beside_others() -> None:
    x = rows(3, 70) * torch.tensor([[1e-3], [1.0], [300.0]], dtype=HALF)
    out, left = _poisoned(3, 70)
    quantise(x, out, left)
    assert _is_stored(out, left, x.double())
    alone, factor = _poisoned(1, 70)
    quantise(x[1:2], alone, factor)
    assert torch.equal(alone[0].float(), out[1].float()) and factor[0] == left[1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_alone(bad: float) -> None:
    x = rows(3, 70)
    x[1, 5], x[2] = bad, 0.0
    out, left = _poisoned(3, 70)
    quantise(x, out, left)
    assert (out.float() * left[:, None]).sum(-1).isfinite().tolist() == [True, False, True]
    assert not out[2].float().any()


def test_a_bias_is_added_to_rows_that_have_had_their_factors() -> None:
    x, bias, factors = rows(2, 70), rows(70, seed=1), torch.tensor([0.5, 3.0])
    want = x.double() * factors[:, None] + bias.double()
    rescale(x, factors, bias)
    assert relative_error(x, want) < TOLERANCE


@pytest.mark.parametrize("normed", [False, True])
def test_attention_reads_rows_times_their_factors(normed: bool) -> None:
    heads, kv_heads, dim, lengths = 4, 2, 64, [21, 1]
    pages, again = (paged(lengths, kv_heads, dim) for _ in range(2))
    qkv, factors = rows(2, (heads + 2 * kv_heads) * dim), torch.tensor([0.25, 2.0])
    angles = torch.rand(40, dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    q_norm, k_norm = (rows(dim, seed=3), rows(dim, seed=4)) if normed else (None, None)
    slots = torch.tensor([0, 1], dtype=torch.int32)
    found = []
    for cells, given, more in ((pages, qkv, factors), (again, qkv * factors[:, None].to(HALF), None)):
        out = torch.full((2, heads, dim), torch.nan, dtype=HALF)
        config = DecodeConfig(tile=16, splits=2, num_warps=1, num_stages=1)
        scratch = DecodeScratch.make(2, heads, kv_heads, dim, config, "cpu")
        turned = (out, given, angles.cos(), angles.sin(), q_norm, k_norm, 1e-6, cells.keys, cells.values, cells.tables)
        turned_attention(*turned, slots, cells.lengths, dim**-0.5, scratch, row_factors=more)
        queries, places = torch.full_like(out, torch.nan), torch.tensor([3 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
        keys, values = (torch.full((4, kv_heads, BLOCK_SIZE, dim), torch.nan, dtype=HALF) for _ in range(2))
        written = (given, torch.tensor([7, 30]), places, angles.cos(), angles.sin(), q_norm, k_norm, 1e-6, queries)
        rotary_write(*written, keys, values, row_factors=more)
        found.append((out, cells.keys, cells.values, queries, keys, values))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert relative_error(one.nan_to_num(), other.nan_to_num().double()) < TOLERANCE


@pytest.mark.parametrize(("height", "width", "normed", "tail"), [(13, 100, True, "gated"), (16, 128, False, "adds")])
def test_a_row_is_multiplied_with_a_matrix_in_eight_bits(height: int, width: int, normed: bool, tail: str) -> None:
    gated, adds = tail == "gated", tail == "adds"
    row, norm = rows(1, width), rows(width, seed=1) if normed else None
    weight, scale = quantise_matrix(rows(height * (1 + gated), width, seed=2).float() / width**0.5)
    before = rows(1, height, seed=4) if adds else torch.full((1, height), torch.nan, dtype=HALF)
    out = before.clone()
    config = RowConfig(lines=8, span=64)
    row_product(row, weight, out, norm=norm, eps=1e-5, adds=adds, gated=gated, scale=scale, config=config)
    matrix = weight.double() * scale
    want = plain.row_product(row, matrix, norm, 1e-5, None, before if adds else None, gated=gated)
    assert relative_error(out, want) < TOLERANCE


def _first_logits(make: Callable[..., TritonOps] | None, family: str) -> Tensor:
    """Of chunks, of decode rows and of one row alone; the tokens between are given, not said."""
    checkpoint = model(family)[1]
    checkpoint.shape = replace(checkpoint.shape, num_layers=1)
    desk = CudaDesk(checkpoint, slots=3, blocks=10, context_len=64, max_step_tokens=14, ops=make, fp8=True)
    desk.begin(0, ids(6))
    desk.begin(2, ids(7, seed=1))
    for chunks in ({0: 6, 2: 7}, {0: 1, 2: 1}, {0: 1}):
        assert not desk.advance(chunks).statuses.any()
    return torch.stack(desk.logits[0] + desk.logits[2])


def test_steps_in_eight_bits_say_what_the_reference_says() -> None:
    """Biases too. A number that lies between two of eight bits may fall to either side."""
    told, truth = (_first_logits(make, "qwen2") for make in (TritonOps, None))
    assert relative_error(told, truth.double()) < 5e-3
