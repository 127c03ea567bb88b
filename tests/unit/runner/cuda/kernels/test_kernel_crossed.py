"""Products whose lines are a tile's rows: which there are, what they take of a card, where they are used, and that they compile
for one. What they give is checked on a card."""

import pytest
import torch
from torch import Tensor

from headrace.runner.cuda import triton_ops
from headrace.runner.cuda.kernels import norms
from headrace.runner.cuda.kernels.crossed_product import (
    CrossedKind,
    crossed_gate,
    crossed_parts,
    crossed_sums,
    is_worth_crossing,
)
from headrace.runner.cuda.native import compile_source
from headrace.runner.cuda.products import products_noted
from headrace.runner.cuda.triton_ops import TritonOps
from headrace.weights.shape import ModelShape

pytestmark = pytest.mark.unit

SHARED_BYTES = 227 << 10
CLUSTERS = 66
SHAPE = ModelShape("llama", 4096, 2, 32, 8, 128, 14336, 512, 512, 1e-5, 5e5)


def shown(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Of a size alone."""
    return torch.empty(sizes, dtype=dtype, device="meta")


@pytest.mark.parametrize("kind", [CrossedKind(80, True), CrossedKind(208, True), CrossedKind(16, False)], ids=str)
def test_they_compile(kind: CrossedKind) -> None:
    assert compile_source(kind.make_source(), "sm_90a")[:4] == b"\x7fELF"


@pytest.mark.parametrize("gated", [True, False])
def test_they_fit_a_multiprocessor_for_any_number_of_rows(gated: bool) -> None:
    for count in range(16, 257, 16):
        kind = CrossedKind(count, gated)
        assert 4 <= kind.num_stages <= 8 and kind.shared_bytes <= SHARED_BYTES
        # What gates leave takes the place of stages, or has its own.
        assert kind.passes == 2 or 224 * count <= kind.num_stages * kind.stage_bytes
        # Stages begin where their swizzle does.
        assert kind.stage_bytes % 1024 == 0


def test_gates_are_crossed_where_they_fill_the_card() -> None:
    def asked(rows: int, lines: int = 28672, clusters: int = CLUSTERS) -> bool:
        return is_worth_crossing(shown(rows, 4096), shown(lines, 4096), clusters)

    assert [rows for rows in range(1, 300) if asked(rows)] == list(range(65, 241))
    # Nobody can, clusters would be idle, or would have to make way.
    assert not asked(144, clusters=0) and not asked(144, 22016) and not asked(144, 34816)
    assert not is_worth_crossing(shown(144, 4096, dtype=torch.float32), shown(28672, 4096), CLUSTERS)


@pytest.mark.parametrize(
    ("rows", "height", "width", "number"),
    [
        *((96, 4096, 14336, 0), (97, 4096, 14336, 4), (208, 4096, 14336, 4), (209, 4096, 14336, 0)),
        # Small ones, and ones as high as wide, are the library's; columns must divide.
        *(
            (144, 1024, 3072, 0),
            (144, 4096, 4096, 0),
            (144, 4096, 14400, 0),
            (144, 5120, 17408, 0),
            (144, 8192, 28672, 2),
        ),
    ],
)
def test_sums_are_left_in_parts_where_they_fill_the_card(rows: int, height: int, width: int, number: int) -> None:
    assert crossed_parts(shown(rows, width), shown(height, width), CLUSTERS) == number
    assert crossed_parts(shown(rows, width), shown(height, width), 0) == 0


def test_while_products_are_noted_none_is_launched_and_one_of_each_kind_is_kept() -> None:
    with products_noted() as noted:
        for rows in (65, 80, 81):
            read, inner, parts = shown(rows, 4096), shown(rows, 14336), shown(4, rows, 4096, dtype=torch.float32)
            crossed_gate(read, shown(28672, 4096), inner)
            crossed_sums(inner, shown(4096, 14336), parts)
    assert len(noted) == 4 and all(product.source for product in noted)


def test_operations_of_some_rows_are_crossed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(triton_ops, "can_cluster", lambda _: True)
    for name in ("crossed_gate", "crossed_sums", "clustered_gate"):
        monkeypatch.setattr(triton_ops, name, lambda *_, name=name: seen.append(name))
    monkeypatch.setattr(norms, "sum_rms_norm", lambda parts, *_: seen.append(f"norm of {len(parts)}"))
    for name in ("product", "add_rms_norm"):
        monkeypatch.setattr(TritonOps, name, lambda *_, name=name: seen.append(name))
    ops = TritonOps(SHAPE, 4, torch.device("cpu"))
    for rows in (144, 256):
        residual, inner = shown(rows, 4096), shown(rows, 14336)
        norm = (residual, residual, shown(4096), 1e-5, residual)
        ops.gate_rows(residual, shown(28672, 4096), shown(rows, 28672), inner)
        ops.sum_rows(inner, shown(4096, 14336), None, *norm)
    ops.sum_rows(shown(144, 14336), shown(4096, 14336), shown(4096), *norm)
    first = ["crossed_gate", "crossed_sums", "norm of 4"]
    assert seen == [*first, "clustered_gate", "product", "add_rms_norm", "product", "add_rms_norm"]
