"""Norms, activation and rotation act on rows; keys and values land in their cells and nowhere else."""

import pytest
import torch
from torch import Tensor

from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.activation import silu_mul
from headrace.runner.cuda.kernels.norms import add_rms_norm, rms_norm, sum_rms_norm
from headrace.runner.cuda.kernels.rotary_write import rotary_write
from tests.unit.runner.cuda.kernels.paged import BLOCK_SIZE, HALF, relative_error

pytestmark = pytest.mark.unit

TOLERANCE = 1e-3


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


@pytest.mark.parametrize("width", [576, 64])
def test_a_norm_adds_what_the_last_layer_gave(width: int) -> None:
    x, residual, weight = rows(3, width), rows(3, width, seed=1), rows(width, seed=2)
    added, want = plain.add_rms_norm(x, residual, weight, 1e-5)
    out = torch.full_like(x, torch.nan)
    add_rms_norm(x, residual, weight, 1e-5, out)
    assert torch.equal(residual, added)
    assert relative_error(out, want) < TOLERANCE


@pytest.mark.parametrize("number", [1, 4])
def test_a_norm_adds_up_what_the_last_product_left_in_parts(number: int) -> None:
    parts, residual, weight = rows(number, 3, 576).float(), rows(3, 576, seed=1), rows(576, seed=2)
    # In their order, and rounded once.
    made = sum(parts[1:], parts[0]).to(HALF)
    added, want = plain.add_rms_norm(made, residual, weight, 1e-5)
    out = torch.full_like(residual, torch.nan)
    sum_rms_norm(parts, residual, weight, 1e-5, out)
    assert torch.equal(residual, added)
    assert relative_error(out, want) < TOLERANCE


def test_the_first_norm_adds_nothing() -> None:
    x, weight = rows(2, 100), rows(100, seed=2)
    before, out = x.clone(), torch.full_like(x, torch.nan)
    rms_norm(x, weight, 1e-6, out)
    assert torch.equal(x, before)
    assert relative_error(out, plain.rms_norm(x, weight, 1e-6)) < TOLERANCE


def test_gates_open_what_is_beside_them() -> None:
    gate_up = rows(2, 2 * 1500)
    out = torch.full((2, 1500), torch.nan, dtype=HALF)
    silu_mul(gate_up, out)
    assert relative_error(out, plain.silu_mul(gate_up)) < TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 2, 128)])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_turn_and_keys_and_values_land_in_their_cells(
    heads: int, kv_heads: int, dim: int, normed: bool
) -> None:
    tokens, blocks = 4, 5
    qkv = rows(tokens, (heads + 2 * kv_heads) * dim)
    positions = torch.tensor([0, 7, 99, 3], dtype=torch.int32)
    cells = torch.tensor([17, 3 * BLOCK_SIZE + 15, -1, 0])
    angles = torch.rand(100, dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    q_norm, k_norm = (rows(dim, seed=3), rows(dim, seed=4)) if normed else (None, None)
    keys = torch.full((blocks, kv_heads, BLOCK_SIZE, dim), torch.nan, dtype=HALF)
    values = keys.clone()
    q_out = torch.full((tokens, heads, dim), torch.nan, dtype=HALF)
    left = qkv.clone()
    rotary_write(left, positions, cells, angles.cos(), angles.sin(), q_norm, k_norm, 1e-6, q_out, keys, values)
    assert torch.equal(left, qkv)
    q, k, v = plain.rotary(qkv, positions, angles.cos(), angles.sin(), q_norm, k_norm, 1e-6, heads, kv_heads)
    assert relative_error(q_out, q) < TOLERANCE
    for cells_of, row_of in ((keys, k), (values, v)):
        want = torch.full(cells_of.shape, torch.nan, dtype=torch.float64)
        plain.put(want, cells, row_of)
        written = ~want.isnan()
        assert torch.equal(cells_of.isnan(), ~written)
        assert relative_error(cells_of[written], want[written]) < TOLERANCE


@pytest.mark.parametrize("scaled", [False, True])
def test_keys_and_values_are_left_in_place_where_that_is_asked_for(scaled: bool) -> None:
    tokens, heads, kv_heads, dim = 3, 4, 2, 64
    qkv = rows(tokens, (heads + 2 * kv_heads) * dim)
    positions, cells = torch.tensor([0, 9, 99], dtype=torch.int32), torch.tensor([17, -1, 0])
    angles = torch.rand(100, dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    keys = torch.full((2, kv_heads, BLOCK_SIZE, dim), torch.nan, dtype=HALF)
    left, factors = qkv.clone(), torch.tensor([0.5, 3.0, 1.5])
    tables = (angles.cos(), angles.sin(), None, None, 1e-6)
    out = torch.full((tokens, heads, dim), torch.nan, dtype=HALF)
    more = factors if scaled else None
    rotary_write(left, positions, cells, *tables, out, keys, keys.clone(), row_factors=more, in_place=True)
    whole = qkv.double() * factors[:, None].double() if scaled else qkv
    _, k, v = plain.rotary(whole, positions, *tables, heads, kv_heads)
    assert torch.equal(left[:, : heads * dim], qkv[:, : heads * dim])
    # A row without a cell too.
    assert relative_error(left.view(tokens, -1, dim)[:, heads:], torch.cat((k, v), 1)) < TOLERANCE
