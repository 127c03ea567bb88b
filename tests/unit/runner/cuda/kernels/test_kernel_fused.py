"""Kernels that do several things at once, in the interpreter: each says what the plain functions say one after another."""

import pytest
import torch
from torch import Tensor

from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.decode_attention import DecodeConfig, DecodeScratch, decode_config
from headrace.runner.cuda.kernels.row_product import RowConfig, row_product
from headrace.runner.cuda.kernels.turned_attention import turned_attention
from tests.unit.runner.cuda.kernels.paged import BLOCK_SIZE, HALF, paged, relative_error

pytestmark = pytest.mark.unit

TOLERANCE = 2e-3


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


# Whole and odd numbers of lines and spans, one span and several; every tail with and without a norm.
@pytest.mark.parametrize(
    ("height", "width", "span", "normed", "tail"),
    [
        (16, 64, 64, False, ""),
        (13, 100, 64, True, ""),
        (13, 100, 64, False, "bias"),
        (8, 72, 128, True, "bias"),
        (16, 128, 64, True, "adds"),
        (8, 72, 128, False, "adds"),
        (13, 100, 64, True, "gated"),
        (16, 128, 64, False, "gated"),
    ],
)
def test_a_row_is_normed_multiplied_and_finished(height: int, width: int, span: int, normed: bool, tail: str) -> None:
    row, norm = rows(1, width), rows(width, seed=1) if normed else None
    weight = rows(height * (2 if tail == "gated" else 1), width, seed=2) / width**0.5
    bias = rows(height, seed=3) if tail == "bias" else None
    before = rows(1, height, seed=4) if tail == "adds" else torch.full((1, height), torch.nan, dtype=HALF)
    out = before.clone()
    row_product(
        row,
        weight,
        out,
        norm=norm,
        eps=1e-5,
        bias=bias,
        adds=tail == "adds",
        gated=tail == "gated",
        config=RowConfig(lines=8, span=span),
    )
    want = plain.row_product(row, weight, norm, 1e-5, bias, before if tail == "adds" else None, gated=tail == "gated")
    assert relative_error(out, want) < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "splits", "normed"),
    [(4, 2, 64, 4, False), (3, 1, 64, 1, True), (3, 1, 128, 4, True), (2, 2, 64, 1, False)],
)
def test_a_token_is_turned_kept_and_attends(heads: int, kv_heads: int, dim: int, splits: int, normed: bool) -> None:
    slots = [2, 0, -1, 1, 3]
    held = paged([1, 37, 70, 17], kv_heads, dim)
    named, places = torch.tensor(slots, dtype=torch.int32), held.lengths.long() - 1
    cells = torch.tensor([-1 if slot < 0 else _cell(held.tables, slot, int(places[slot])) for slot in slots])
    # A token's own cell holds nothing yet.
    for cell in cells[cells >= 0].tolist():
        held.keys[cell // BLOCK_SIZE, :, cell % BLOCK_SIZE] = torch.nan
        held.values[cell // BLOCK_SIZE, :, cell % BLOCK_SIZE] = torch.nan
    qkv = rows(len(slots), (heads + 2 * kv_heads) * dim)
    angles = torch.rand(70, dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = (rows(dim, seed=3), rows(dim, seed=4)) if normed else (None, None)
    positions = torch.tensor([0 if slot < 0 else int(places[slot]) for slot in slots])
    q, k, v = plain.rotary(qkv, positions, cos, sin, q_norm, k_norm, 1e-6, heads, kv_heads)
    keys, values = held.keys.clone(), held.values.clone()
    plain.put(keys, cells, k)
    plain.put(values, cells, v)
    want = plain.decode_attention(q, keys, values, held.tables, named, held.lengths, dim**-0.5)

    config = DecodeConfig(splits=splits, shortest=32, tile=32, ahead=splits > 1)
    scratch = DecodeScratch.make(len(slots), heads, kv_heads, dim, config, "cpu")
    scratch.sums.fill_(torch.nan)
    scratch.stats.fill_(torch.nan)
    out = torch.full((len(slots), heads, dim), torch.nan, dtype=HALF)
    for _ in range(2):
        # Twice: the first launch leaves nothing behind that would disturb the second.
        turned_attention(
            out, qkv, cos, sin, q_norm, k_norm, 1e-6, held.keys, held.values, held.tables, named, held.lengths,
            dim**-0.5, scratch,
        )  # fmt: skip
    assert not scratch.tickets.any()
    assert relative_error(out, want) < TOLERANCE
    assert not out[2].any()
    for got, truth in ((held.keys, keys), (held.values, values)):
        assert torch.equal(got.isnan(), truth.isnan())
        assert relative_error(got.nan_to_num(), truth.nan_to_num().double()) < TOLERANCE


@pytest.mark.parametrize(
    ("rows", "whole"), [(80, 1024), (96, 1024), (112, 2048), (192, 2048), (208, 4096), (256, 4096)]
)
def test_the_more_rows_there_are_the_longer_ones_stay_whole(rows: int, whole: int) -> None:
    config = decode_config(rows, 8, 131072)
    assert (config.shortest, config.least) == (whole, 1)


@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 112, 256])
def test_a_context_is_cut_into_no_more_stretches_than_it_may_need(rows: int) -> None:
    short, long = decode_config(rows, 8, 8192), decode_config(rows, 8, 131072)
    assert short.splits <= 16 and 8 <= long.splits <= 64
    assert short.least <= short.splits
    if rows >= 64:
        assert short.splits * short.shortest == 8192


def _cell(tables: Tensor, slot: int, position: int) -> int:
    return int(tables[slot, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
