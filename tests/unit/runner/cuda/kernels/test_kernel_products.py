"""Products with their norms, gates and sums: what a layer's launches give together is what its plain parts give."""

import pytest
import torch
from torch import Tensor

from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.fused_product import (
    FUSED_BYTES,
    MOST_ROWS,
    FusedConfig,
    FusedScratch,
    filled,
    fused_config,
    fused_product,
    is_worth_fusing,
    start_rows,
)
from headrace.runner.cuda.squares import LEAST_COLUMNS, Squares
from tests.unit.runner.cuda.kernels.paged import HALF, relative_error

pytestmark = pytest.mark.unit

EPS = 1e-5
TOLERANCE = 8e-3
HOST = torch.device("cpu")
CONFIGS = [
    FusedConfig(16, 32),
    FusedConfig(16, 16, 16, splits=2),
    FusedConfig(32, 64, 32, splits=3),
    FusedConfig(64, 16, 32),
]


def normal(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return (size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(HALF)


def scratch() -> FusedScratch:
    return FusedScratch.make(HOST)


def begun(count: int, width: int) -> tuple[Tensor, Tensor, Tensor, Squares]:
    """Rows, their norm's weights, and what the launch before leaves for the norm."""
    table, norm = normal(50, width), normal(width, seed=1)
    ids = torch.arange(count, dtype=torch.int32) * 7 % 50
    residual, scaled = (torch.full((count, width), torch.nan, dtype=HALF) for _ in range(2))
    squares = Squares.make(width, count, HOST)
    start_rows(ids, table, norm, residual, scaled, squares)
    assert torch.equal(residual, table[ids.long()])
    return residual, norm, scaled, squares


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("count", [1, 5, 33])
def test_rows_are_normed_by_what_was_left_for_them(config: FusedConfig, count: int) -> None:
    residual, norm, scaled, squares = begun(count, 96)
    weight, bias = normal(80, 96, seed=2), normal(80, seed=3)
    out = torch.full((count, 80), torch.nan, dtype=HALF)
    fused_product(scaled, weight, out, config, scratch(), squares=squares, eps=EPS, bias=bias)
    want = plain.rms_norm(residual, norm, EPS) @ weight.double().t() + bias.double()
    assert relative_error(out, want) < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS)
def test_gates_open_what_is_beside_them(config: FusedConfig) -> None:
    residual, norm, scaled, squares = begun(9, 96)
    weight = normal(2 * 72, 96, seed=2, size=0.2)
    out = torch.full((9, 72), torch.nan, dtype=HALF)
    fused_product(scaled, weight, out, config, scratch(), squares=squares, eps=EPS, gated=True)
    want = plain.silu_mul(plain.rms_norm(residual, norm, EPS) @ weight.double().t())
    assert relative_error(out, want) < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("biased", [False, True])
def test_the_residual_is_raised_and_what_the_next_norm_needs_is_left(config: FusedConfig, biased: bool) -> None:
    rows, weight, norm = normal(9, 192), normal(96, 192, seed=1), normal(96, seed=2)
    bias = normal(96, seed=5) if biased else None
    residual = normal(9, 96, seed=3)
    want = residual.double() + rows.double() @ weight.double().t() + (0 if bias is None else bias.double())
    scaled, left = torch.full((9, 96), torch.nan, dtype=HALF), Squares.make(96, 9, HOST)
    fused_product(rows, weight, residual, config, scratch(), bias=bias, norm=norm, scaled=scaled, left=left)
    assert relative_error(residual, want) < TOLERANCE
    normed = scaled.double() * (left.sums[: left.parts].double().sum(0)[:, None] / 96 + EPS).rsqrt()
    assert relative_error(normed, plain.rms_norm(residual, norm, EPS)) < TOLERANCE


def test_parts_of_a_tile_are_counted_anew_by_every_launch() -> None:
    rows, weight, used = normal(3, 64), normal(32, 64, seed=1), scratch()
    first, second = (torch.full((3, 32), torch.nan, dtype=HALF) for _ in range(2))
    for out in (first, second):
        fused_product(rows, weight, out, FusedConfig(16, 16, 32, splits=2), used)
    assert torch.equal(first, second) and not used.tickets.any()


def check_room(config: FusedConfig, rows: int, height: int, width: int, *, gated: bool) -> None:
    """Parts begin where tiles do, and what they leave has room; the card's shared memory holds the tiles in flight."""
    room = scratch()
    assert config.splits == 1 or width % (config.splits * config.span) == 0
    tiles = -(-height // config.lines) * -(-rows // config.rows)
    wide = config.lines * (2 if gated else 1)
    assert tiles <= room.tickets.numel() and config.lines >= LEAST_COLUMNS
    if config.splits > 1:
        assert tiles * config.splits * config.rows * wide <= room.pieces.numel()
    assert (config.rows + wide) * config.span * 2 * config.num_stages <= FUSED_BYTES


@pytest.mark.parametrize(
    ("height", "width"),
    [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (960, 576), (576, 1536), (1536, 512), (2047, 4096)],
)
@pytest.mark.parametrize("gated", [False, True])
def test_every_number_of_rows_finds_room(height: int, width: int, gated: bool) -> None:
    for rows in range(2, MOST_ROWS + 1):
        check_room(fused_config(rows, height, width, gated=gated), rows, height, width, gated=gated)


def test_single_rows_and_large_models_are_left_to_others() -> None:
    assert is_worth_fusing(64, 6144 * 1024)
    assert not is_worth_fusing(1, 6144 * 1024)
    assert not is_worth_fusing(MOST_ROWS + 1, 6144 * 1024)
    assert is_worth_fusing(MOST_ROWS, 3072 * 576) and not is_worth_fusing(MOST_ROWS, 6144 * 1024)
    assert not any(is_worth_fusing(rows, 28672 * 4096) for rows in range(1, MOST_ROWS + 2))


def test_what_lies_behind_the_rows_is_fetched_and_left_out() -> None:
    held = torch.full((16, 64), torch.nan, dtype=HALF)
    held[:5] = normal(5, 64)
    assert [filled(held[:5], 16), filled(held[3:5], 16), filled(held[:5].clone(), 16)] == [16, 13, 5]
    assert filled(torch.empty(16, 192)[:, 64:128], 16) == 16
    weight, out = normal(32, 64, seed=1), torch.full((5, 32), torch.nan, dtype=HALF)
    fused_product(held[:5], weight, out, FusedConfig(16, 32), scratch())
    assert relative_error(out, held[:5].double() @ weight.double().t()) < TOLERANCE


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    rows, weight = normal(4, 64), normal(32, 64, seed=1)
    rows[2, 5] = torch.nan
    out = torch.zeros(4, 32, dtype=HALF)
    fused_product(rows, weight, out, FusedConfig(16, 32), scratch())
    assert out[2].isnan().all() and out[[0, 1, 3]].isfinite().all()
