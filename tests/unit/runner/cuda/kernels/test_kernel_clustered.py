"""Products of which two multiprocessors share what they fetch: which there are, what they take of a card, and that they
compile for one. What they give is checked on a card."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.core.errors import RunnerFailed
from headrace.runner.cuda import triton_ops
from headrace.runner.cuda.exact_ops import ExactOps
from headrace.runner.cuda.kernels import clustered_product
from headrace.runner.cuda.kernels.clustered_product import (
    ClusteredKind,
    clustered_gate,
    clustered_sum,
    clustered_turn,
    gate_width,
    is_worth_summing,
    is_worth_turning,
)
from headrace.runner.cuda.kernels.clusters import can_cluster
from headrace.runner.cuda.native import compile_source
from headrace.runner.cuda.ops import Turn
from headrace.runner.cuda.products import products_noted
from headrace.runner.cuda.triton_ops import TritonOps
from headrace.weights.shape import ModelShape

pytestmark = pytest.mark.unit

# Of a card of compute capability 9.0: for one block, and of clusters at once.
SHARED_BYTES = 227 << 10
CLUSTERS = 66
SHAPE = ModelShape("qwen3", 1024, 2, 16, 8, 128, 3072, 512, 512, 1e-6, 1e6, qk_norm=True, tied_embeddings=True)
KINDS = [
    *(ClusteredKind(wide, gated=True) for wide in (256, 224, 192)),
    ClusteredKind(256),
    ClusteredKind(256, page=16),
    ClusteredKind(256, page=16, normed=True),
    ClusteredKind(256, page=32, normed=True),
]


def zeros(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


def shown(*sizes: int) -> Tensor:
    """Of a size alone."""
    return torch.empty(sizes, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_they_compile_and_fit_a_multiprocessor(kind: ClusteredKind) -> None:
    assert compile_source(kind.make_source(), "sm_90a")[:4] == b"\x7fELF"
    assert kind.num_stages >= 4 and kind.shared_bytes <= SHARED_BYTES
    # Tiles of 8 lines are swizzled together, and each of the two fetches half of them.
    assert kind.wide // 2 % 8 == 0


def test_a_source_that_is_wrong_is_told_with_the_compilers_words() -> None:
    with pytest.raises(RunnerFailed, match=r"identifier .nonsense. is undefined"):
        compile_source('extern "C" __global__ void k() { nonsense(); }', "sm_90a")


@pytest.mark.parametrize(
    ("rows", "lines", "wide"),
    [
        # Gates and others of 0.6B: rounds of tiles that fill the card.
        *((512, 6144, 192), (1024, 6144, 192), (2048, 6144, 256), (4096, 6144, 256), (7168, 6144, 256)),
        # Of 8B.
        *((256, 28672, 224), (512, 28672, 224), (768, 28672, 224), (1024, 28672, 256), (8192, 28672, 256)),
        # Most of what would be computed is padding, or stands still.
        *((1, 28672, 0), (64, 6144, 0), (128, 28672, 0), (160, 28672, 0), (192, 28672, 0), (300, 16368, 0)),
    ],
)
def test_gates_are_cut_so_that_they_fill_the_card(rows: int, lines: int, wide: int) -> None:
    assert gate_width(shown(rows, 1024), shown(lines, 1024), CLUSTERS) == wide


def test_heads_are_turned_in_the_product_where_that_is_faster() -> None:
    small, large = shown(4096, 1024), shown(6144, 4096)

    def asked(rows: int, weight: Tensor, dim: int = 128) -> bool:
        return is_worth_turning(shown(rows, weight.shape[1]), weight, shown(rows, 16, dim), CLUSTERS)

    assert [asked(rows, small) for rows in (256, 512, 1024, 2048, 4096, 7168)] == [False, False, True, True, True, True]
    assert [asked(rows, large) for rows in (256, 1024, 2048, 7168)] == [False, False, True, False]
    assert not asked(4096, small, dim=64) and not asked(4096, shown(4224, 1024))


def test_sums_are_made_in_the_product_of_many_rows() -> None:
    def asked(rows: int, height: int, width: int) -> bool:
        return is_worth_summing(shown(rows, width), shown(height, width), CLUSTERS)

    assert asked(7168, 1024, 3072) and asked(4096, 1024, 2048) and asked(8192, 4096, 14336)
    assert not asked(2048, 4096, 4096) and not asked(8192, 576, 1536)


def test_nothing_is_clustered_that_the_card_or_the_numbers_do_not_allow() -> None:
    rows, weight = shown(4096, 1024), shown(6144, 1024)
    assert not can_cluster(torch.device("cpu"))
    assert gate_width(rows, weight, 0) == 0
    assert gate_width(rows.float(), weight.float(), CLUSTERS) == 0
    assert gate_width(shown(4096, 1000), shown(6144, 1000), CLUSTERS) == 0
    assert gate_width(shown(4096, 1024), shown(6152, 1024), CLUSTERS) == 0


def test_while_products_are_noted_none_is_launched_and_one_of_each_kind_is_kept() -> None:
    rows, out, keys = zeros(512, 128), zeros(512, 64), zeros(4, 1, 16, 128)
    positions, cells, angles = zeros(512, dtype=torch.int32), zeros(512, dtype=torch.int64), zeros(8, 64)
    turn = Turn(positions, cells, angles, angles, None, None, 1e-6, zeros(512, 2, 128), keys, keys)
    with products_noted() as noted:
        for _ in range(3):
            clustered_gate(rows, zeros(128, 128), out, 256, CLUSTERS)
            clustered_sum(rows, zeros(256, 128), zeros(512, 256), CLUSTERS)
            clustered_turn(rows, zeros(512, 128), zeros(512, 512), turn, CLUSTERS)
    assert len(noted) == 3


@pytest.mark.parametrize("normed", [True, False])
def test_a_kernel_that_turns_is_told_where_everything_lies(normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(clustered_product, "_launch", lambda *given: told.extend(given))
    q_norm, k_norm = (zeros(128), zeros(128)) if normed else (None, None)
    positions, cells = zeros(512, dtype=torch.int32), zeros(512, dtype=torch.int64)
    queries, keys, values = zeros(512, 4, 128), zeros(4, 2, 16, 128), zeros(4, 2, 16, 128)
    turn = Turn(positions, cells, zeros(8, 64), zeros(8, 64), q_norm, k_norm, 1e-6, queries, keys, values)
    clustered_turn(zeros(512, 128), zeros(1024, 128), zeros(512, 1024), turn, CLUSTERS)
    kind, made = told[0], told[-1]
    assert kind == ClusteredKind(256, page=16, normed=normed)
    for name in ("positions", "cells", "cosines", "sines", "q_norm", "k_norm", "keys", "values"):
        part = getattr(turn, name)
        assert getattr(made, name) == (None if part is None else part.data_ptr())
    assert (made.heads, made.kv_heads, made.eps) == (4, 2, pytest.approx(1e-6))


class Seen(list[str]):
    """Stands in for the kernels, which no processor has."""

    def note(self, name: str) -> Callable[..., None]:
        return lambda *_: self.append(name)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    made = Seen()
    monkeypatch.setattr(triton_ops, "can_cluster", lambda _: True)
    for name in ("clustered_gate", "clustered_sum", "clustered_turn"):
        monkeypatch.setattr(triton_ops, name, made.note(name))
    monkeypatch.setattr(TritonOps, "rms_norm", staticmethod(made.note("norm")))
    return made


def turn_of(rows: int) -> Turn:
    some = shown(1)
    return Turn(some, some, some, some, None, None, 1e-6, shown(rows, 16, 128), some, some)


def test_operations_of_many_rows_go_to_clusters(seen: Seen) -> None:
    ops, rows = TritonOps(SHAPE, 4, torch.device("cpu")), shown(4096, 1024)
    ops.gate_rows(rows, shown(6144, 1024), shown(4096, 6144), shown(4096, 3072))
    ops.sum_rows(shown(4096, 3072), shown(1024, 3072), None, rows, rows, shown(1024), 1e-6, rows)
    ops.turn_rows(rows, shown(4096, 1024), None, shown(4096, 4096), turn_of(4096), in_place=True)
    assert seen == ["clustered_gate", "clustered_sum", "norm", "clustered_turn"]


@pytest.mark.parametrize("ops", [TritonOps, ExactOps])
def test_few_rows_biases_and_exact_rows_do_not(
    ops: type[TritonOps], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 16 if ops is TritonOps else 4096
    for name in ("product", "silu_mul", "add_rms_norm", "rotary_write"):
        monkeypatch.setattr(ops, name, lambda *_, name=name, **__: seen.append(name))
    made, rows = ops(SHAPE, 4, torch.device("cpu")), shown(many, 1024)
    assert ("NVRTC" in made.name) == (ops is TritonOps)
    made.gate_rows(rows, shown(6144, 1024), shown(many, 6144), shown(many, 3072))
    made.sum_rows(shown(many, 3072), shown(1024, 3072), None, rows, rows, shown(1024), 1e-6, rows)
    made.turn_rows(rows, shown(4096, 1024), None, shown(many, 4096), turn_of(many), in_place=True)
    parts = ["product", "silu_mul", "product", "add_rms_norm", "product", "rotary_write"]
    assert seen == parts
    wide, bias = shown(4096, 1024), shown(1)
    made.sum_rows(shown(4096, 3072), shown(1024, 3072), bias, wide, wide, shown(1024), 1e-6, wide)
    made.turn_rows(wide, shown(4096, 1024), bias, shown(4096, 4096), turn_of(4096), in_place=True)
    assert seen == [*parts, *parts[2:]]
