"""Products of many rows with the gate, with norm and rotation of heads, or with a sum in the same launch, as
`clustered_product.cu` has them: two multiprocessors share what they fetch. Triton's languages cannot say that before 3.8, so
it is CUDA C++, for compute capability 9.0 alone. `benchmarks/gpu/kernels.py` checks it on a card.
"""

import ctypes
from functools import cache, partial

import torch
from msgspec import Struct
from torch import Tensor

from headrace.runner.cuda.kernels.clusters import ROOM, THREADS, cluster_kernel, cluster_source
from headrace.runner.cuda.kernels.fused_product import filled
from headrace.runner.cuda.native import Kernel, tile_map
from headrace.runner.cuda.ops import Turn
from headrace.runner.cuda.products import LARGE, note

# Lines of a tile: of any product, and of gated ones, whose tiles may fill a card better so.
WIDE = 256
GATE_WIDTHS = (WIDE, 224, 192)
# What a round of tiles costs beside its lines, in lines; and which part of what is computed must be asked for, to be faster
# than the library and another launch, for most products and for heads of large matrices (measured on an H200).
_ROUND = 128
_USEFUL, _LARGE_USEFUL = 0.8, 0.95
# Fewer sums are made as fast by the library.
_LEAST_SUMS = 4096
_TALL, _SPAN, _DIM = 128, 64, 128
_PAIR = 2 * _TALL
# Row tiles, by pairs, that are computed before the next ones.
_GROUP = 8
# Of shared memory, for panels, barriers and the way to a round address.
_BESIDE = 4 * 8192 + 1024 + 256


class _Turn(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "cells", "cosines", "sines", "q_norm", "k_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("eps", ctypes.c_float),
        ("heads", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
    )


class ClusteredKind(Struct, frozen=True):
    """`wide` lines of a matrix at a time, half of them gates, where it is gated. Heads are turned where they have pages."""

    wide: int
    gated: bool = False
    page: int = 0
    normed: bool = False

    @property
    def num_stages(self) -> int:
        return (ROOM - _BESIDE) // self.stage_bytes

    @property
    def stage_bytes(self) -> int:
        return (_TALL + self.wide) * _SPAN * 2

    @property
    def shared_bytes(self) -> int:
        return self.num_stages * self.stage_bytes + _BESIDE

    def make_source(self) -> str:
        defined = {
            "WIDE": self.wide,
            "STAGES": self.num_stages,
            "GROUP": _GROUP,
            "GATED": int(self.gated),
            "TURNED": int(self.page > 0),
            "NORMED": int(self.normed),
            "PAGE": self.page,
        }
        return cluster_source("clustered_product.cu", defined, multiply=self.wide)


def gate_width(rows: Tensor, weight: Tensor, clusters: int) -> int:
    """Lines of a tile for `clustered_gate`, gates and others; 0 where it is not worth it."""
    if not _fits(rows, weight, clusters) or len(weight) % 16:
        return 0
    best = min(GATE_WIDTHS, key=lambda wide: _rounds(rows, weight, wide, clusters) * (wide + _ROUND))
    return best if _useful(rows, weight, best, clusters) >= _USEFUL else 0


def is_worth_turning(rows: Tensor, weight: Tensor, queries: Tensor, clusters: int) -> bool:
    """Whether `clustered_turn` is."""
    if not _fits(rows, weight, clusters) or queries.shape[2] != _DIM or len(weight) % WIDE:
        return False
    return _useful(rows, weight, WIDE, clusters) >= (_USEFUL if weight.numel() < LARGE else _LARGE_USEFUL)


def is_worth_summing(rows: Tensor, weight: Tensor, clusters: int) -> bool:
    """Whether `clustered_sum` is."""
    if not _fits(rows, weight, clusters) or len(rows) < _LEAST_SUMS or len(weight) % WIDE:
        return False
    return _useful(rows, weight, WIDE, clusters) >= _USEFUL


def _fits(rows: Tensor, weight: Tensor, clusters: int) -> bool:
    return clusters > 0 and rows.dtype == weight.dtype == torch.bfloat16 and rows.shape[1] % _SPAN == 0


def _rounds(rows: Tensor, weight: Tensor, wide: int, clusters: int) -> int:
    return -(-(-(-len(rows) // _PAIR) * -(-len(weight) // wide)) // clusters)


def _useful(rows: Tensor, weight: Tensor, wide: int, clusters: int) -> float:
    return len(rows) * len(weight) / (_rounds(rows, weight, wide, clusters) * clusters * _PAIR * wide)


def clustered_gate(rows: Tensor, weight: Tensor, out: Tensor, wide: int, clusters: int) -> None:
    """`silu_mul` of the product of `rows` [n, width] and `weight` [2 height, width], gates first: `out` [n, height]."""
    height = out.shape[1]
    assert weight.shape == (2 * height, rows.shape[1]) and out.is_contiguous() and height % 8 == 0
    kind = ClusteredKind(wide, gated=True)
    if not note(
        (kind, rows.shape, weight.shape), partial(clustered_gate, rows, weight, out, wide, clusters), kind.make_source
    ):
        _launch(kind, rows, weight, out, -(-height // (wide // 2)), clusters)


def clustered_sum(rows: Tensor, weight: Tensor, residual: Tensor, clusters: int) -> None:
    """`residual` [n, height] += the product of `rows` [n, width] and `weight` [height, width], once it is rounded."""
    assert weight.shape == (residual.shape[1], rows.shape[1]) and not len(weight) % WIDE
    assert len(residual) == len(rows)
    kind = ClusteredKind(WIDE)
    if not note(
        (kind, rows.shape, weight.shape), partial(clustered_sum, rows, weight, residual, clusters), kind.make_source
    ):
        _launch(kind, rows, weight, residual, len(weight) // WIDE, clusters)


def clustered_turn(rows: Tensor, weight: Tensor, qkv: Tensor, turn: Turn, clusters: int) -> None:
    """The product of `rows` and `weight`, and `rotary_write` of it: keys and values are left in `qkv`, queries are not."""
    count, heads, _ = turn.queries.shape
    kv_heads, page = turn.keys.shape[1:3]
    assert len(weight) == (heads + 2 * kv_heads) * _DIM and not len(weight) % WIDE
    assert turn.keys.is_contiguous() and turn.values.is_contiguous() and (turn.q_norm is None) == (turn.k_norm is None)
    kind = ClusteredKind(WIDE, page=page, normed=turn.q_norm is not None)
    if note(
        (kind, rows.shape, weight.shape), partial(clustered_turn, rows, weight, qkv, turn, clusters), kind.make_source
    ):
        return
    read = (turn.positions, turn.cells, turn.cosines, turn.sines, turn.q_norm, turn.k_norm, turn.keys, turn.values)
    places = (None if part is None else part.data_ptr() for part in read)
    told = _Turn(*places, turn.eps, heads, kv_heads)
    _launch(kind, rows, weight, qkv, len(weight) // WIDE, clusters, turn.queries.view(count, -1), told)


def _launch(
    kind: ClusteredKind,
    rows: Tensor,
    weight: Tensor,
    out: Tensor,
    tiles: int,
    clusters: int,
    queries: Tensor | None = None,
    turn: _Turn | None = None,
) -> None:
    count, width = rows.shape
    assert width % _SPAN == 0 and weight.is_contiguous()
    pairs = -(-count // _PAIR)
    written = tile_map(out, _SPAN, _SPAN)
    maps = (tile_map(rows, _TALL, _SPAN, filled(rows, _PAIR)), tile_map(weight, kind.wide // 2, _SPAN), written)
    turned = (written if queries is None else tile_map(queries, _SPAN, _SPAN), turn or _Turn())
    numbers = (count, pairs, tiles, out.shape[1], width // _SPAN)
    arguments = (*maps, *turned, ctypes.c_void_p(out.data_ptr()), *map(ctypes.c_int, numbers))
    _compiled(kind, torch.cuda.current_device()).launch(2 * min(clusters, pairs * tiles), THREADS, arguments)


@cache
def _compiled(kind: ClusteredKind, _device: int) -> Kernel:
    return cluster_kernel(kind.make_source(), "clustered", kind.shared_bytes)
