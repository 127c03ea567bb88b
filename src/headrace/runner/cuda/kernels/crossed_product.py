"""Products of at most 256 rows with large matrices, as `crossed_product.cu` has them: gates, and sums of parts of the columns
for the norm that comes next. CUDA C++ for compute capability 9.0 alone; `benchmarks/gpu/kernels.py` checks it on a card.
"""

import ctypes
from functools import cache, partial

import torch
from msgspec import Struct
from torch import Tensor

from headrace.runner.cuda.kernels.clusters import ROOM, THREADS, cluster_kernel, cluster_source
from headrace.runner.cuda.kernels.fused_product import filled
from headrace.runner.cuda.native import Kernel, Map, pair_map, tile_map
from headrace.runner.cuda.products import LARGE, note

# Rows that are computed together, and of which all sums of a multiprocessor's gates have room at once.
_STEP = 16
_ONE_PASS, _MOST_ROWS = 192, 256
_SPAN = 64
# Gates of a cluster, eight at a time; and lines of one where there are no gates.
_EIGHTS, _PAIR = 28, 256
_GATES = 8 * _EIGHTS
# Of shared memory, for barriers and the way to a round address.
_BESIDE = 1024 + 256
_MOST_STAGES = 8
# Where they are faster than the library and another launch, measured on an H200 with an 8B's matrices: by rows, by how many clusters
# have something to do, and by elements. Each part of a sum is written and read once more.
_GATE_ROWS, _SUM_ROWS = range(65, 241), range(97, 209)
_USEFUL = 0.8
_MOST_PARTS = 4
# What these leave of one column.
MOST_SUMS = _MOST_PARTS * _SUM_ROWS[-1]


class _Work(ctypes.Structure):
    _fields_ = (("parts", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("rows", "height", "pairs", "steps")))


class CrossedKind(Struct, frozen=True):
    """For up to `count` rows: gates or sums."""

    count: int
    gated: bool

    @property
    def passes(self) -> int:
        return 2 if self.gated and self.count > _ONE_PASS else 1

    @property
    def num_stages(self) -> int:
        return min(_MOST_STAGES, (ROOM - _BESIDE - self._apart_bytes) // self.stage_bytes)

    @property
    def stage_bytes(self) -> int:
        """Blocks of 64 lines, and the rows."""
        return ((4 if self.gated and self.passes == 1 else 2) * 64 + self.count) * _SPAN * 2

    @property
    def _apart_bytes(self) -> int:
        """For what is written while other stages are filled."""
        return 2 * 64 * self.count if self.passes == 2 else 0

    @property
    def shared_bytes(self) -> int:
        return self.num_stages * self.stage_bytes + self._apart_bytes + _BESIDE

    def make_source(self) -> str:
        defined = {"COUNT": self.count, "STAGES": self.num_stages, "GATED": int(self.gated), "PASSES": self.passes}
        return cluster_source("crossed_product.cu", defined, multiply=self.count, multiply_half=self.count // 2)


def is_worth_crossing(rows: Tensor, weight: Tensor, clusters: int) -> bool:
    """Whether `crossed_gate` is."""
    asked = -(-len(weight) // (2 * _GATES))
    return len(rows) in _GATE_ROWS and _fits(rows, weight) and len(weight) % 16 == 0 and _fills(asked, clusters)


def crossed_parts(rows: Tensor, weight: Tensor, clusters: int) -> int:
    """How many parts of the columns `crossed_sums` is for; 0 where it is not worth it."""
    height, width = weight.shape
    if len(rows) not in _SUM_ROWS or not _fits(rows, weight) or height % 64 or width < 2 * height:
        return 0
    pairs = -(-height // _PAIR)
    number = min(_MOST_PARTS, clusters // pairs)
    return number if number and width % (number * _SPAN) == 0 and _fills(number * pairs, clusters) else 0


def _fits(rows: Tensor, weight: Tensor) -> bool:
    is_large = weight.numel() >= 2 * LARGE and rows.shape[1] % _SPAN == 0
    return is_large and rows.dtype == weight.dtype == torch.bfloat16


def _fills(asked: int, clusters: int) -> bool:
    """All are there at once, and few are idle."""
    return _USEFUL * clusters <= asked <= clusters


def crossed_gate(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """`silu_mul` of the product of `rows` [n, width] and `weight` [2 height, width], gates first: `out` [n, height]."""
    height = out.shape[1]
    assert weight.shape == (2 * height, rows.shape[1]) and height % 8 == 0 and len(out) == len(rows)
    kind = _kind(rows, gated=True)
    if note((kind, weight.shape), partial(crossed_gate, rows, weight, out), kind.make_source):
        return
    work = _Work(None, len(rows), height, 1, rows.shape[1] // _SPAN)
    written = tile_map(out, kind.count // 2, 32)
    maps = (pair_map(weight, 4, _SPAN), pair_map(weight, 2, _SPAN), _rows_map(rows, kind), written)
    _launch(kind, -(-height // _GATES), maps, work)


def crossed_sums(rows: Tensor, weight: Tensor, parts: Tensor) -> None:
    """`parts` [number, n, height], float32: each the product of one part of the columns of `rows` [n, width] and `weight`
    [height, width]."""
    number, count, height = parts.shape
    assert weight.shape == (height, rows.shape[1]) and count == len(rows) and height % 64 == 0
    assert parts.is_contiguous() and parts.dtype == torch.float32
    steps, rest = divmod(rows.shape[1], number * _SPAN)
    assert rest == 0 and weight.is_contiguous()
    kind = _kind(rows, gated=False)
    if note((kind, weight.shape), partial(crossed_sums, rows, weight, parts), kind.make_source):
        return
    pairs = -(-height // _PAIR)
    lines = tile_map(weight, _PAIR // 2, _SPAN)
    _launch(
        kind,
        pairs * number,
        (lines, lines, _rows_map(rows, kind), lines),
        _Work(parts.data_ptr(), count, height, pairs, steps),
    )


def _kind(rows: Tensor, *, gated: bool) -> CrossedKind:
    assert rows.shape[1] % _SPAN == 0 and len(rows) <= _MOST_ROWS
    return CrossedKind(-(-len(rows) // _STEP) * _STEP, gated)


def _rows_map(rows: Tensor, kind: CrossedKind) -> Map:
    return tile_map(rows, kind.count // 2, _SPAN, filled(rows, kind.count))


def _launch(kind: CrossedKind, clusters: int, maps: tuple[Map, ...], work: _Work) -> None:
    _compiled(kind, torch.cuda.current_device()).launch(2 * clusters, THREADS, (*maps, work))


@cache
def _compiled(kind: CrossedKind, _device: int) -> Kernel:
    return cluster_kernel(kind.make_source(), "crossed", kind.shared_bytes)
