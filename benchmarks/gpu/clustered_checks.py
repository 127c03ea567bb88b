"""Products of many rows with gates, heads that are turned, and sums in their launch against float64, on the card. Outputs are
poisoned, what lies behind the rows is no number, and what lies behind the outputs must stay as it was."""

from collections.abc import Callable, Iterator

import torch
from kernel_rig import normal, poisoned, relative_error, worst_row_error
from torch import Tensor

from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.clustered_product import (
    GATE_WIDTHS,
    clustered_gate,
    clustered_sum,
    clustered_turn,
)
from headrace.runner.cuda.kernels.clusters import can_cluster
from headrace.runner.cuda.kernels.norms import rms_norm
from headrace.runner.cuda.ops import Turn

# bf16 in, bf16 out.
TOLERANCE = 6e-3
_BEHIND = 300
# As if the card were small, so that each cluster has many tiles, and as it is.
_CLUSTERS = (3, 66)
# Heads, those of keys, the width of rows, and whether they have norms.
_HEADS = ((16, 8, 1024, True), (32, 8, 4096, False), (4, 1, 576, True), (2, 2, 64, False))
# Times that launches which start early are made one behind the other, and layers of them.
_CHAINS, _LAYERS = 20, 8


def clustered_checks() -> Iterator[tuple[str, float, float]]:
    if not can_cluster(torch.device("cuda")):
        return
    for clusters in _CLUSTERS:
        for rows in (1, 63, 128, 129, 256, 257, 1000):
            for height, width in ((3072, 1024), (1000, 576), (104, 64), (3584, 4096)):
                for wide in GATE_WIDTHS:
                    error = gate_check(rows, height, width, wide, clusters)
                    yield (
                        f"{rows} rows clustered {height}x{width} gated by {wide}, {clusters} at once",
                        error,
                        TOLERANCE,
                    )
            for height, width in ((1024, 3072), (256, 64), (4096, 4096)):
                error = sum_check(rows, height, width, clusters)
                yield f"{rows} rows clustered {height}x{width} summed, {clusters} at once", error, TOLERANCE
            for heads, kv_heads, width, normed in _HEADS:
                error = turn_check(rows, heads, kv_heads, width, clusters, normed=normed)
                yield f"{rows} rows clustered {heads}/{kv_heads} turned {width}, {clusters} at once", error, TOLERANCE
    for rows, hidden, inner in ((300, 256, 1024), (1000, 1024, 3072), (256, 4096, 3584)):
        for wide in GATE_WIDTHS:
            yield (
                f"{rows} rows clustered {hidden}x{inner} by {wide}, chained",
                chain_check(rows, hidden, inner, wide),
                0.0,
            )


def ahead(rows: Tensor) -> Tensor:
    """The same, with what is no number behind them."""
    room = poisoned(len(rows) + _BEHIND, rows.shape[1])
    room[: len(rows)] = rows
    return room[: len(rows)]


def into(before: Tensor, fill: Callable[[Tensor], object]) -> Tensor:
    """What became of `before`; all that is no number where anything behind it has changed."""
    room = normal(len(before) + _BEHIND, before.shape[1])
    room[: len(before)] = before
    behind = room[len(before) :].clone()
    fill(room[: len(before)])
    torch.cuda.synchronize()
    return room[: len(before)] if torch.equal(room[len(before) :], behind) else torch.full_like(before, torch.nan)


def gate_check(rows: int, height: int, width: int, wide: int, clusters: int) -> float:
    x, weight = normal(rows, width), normal(2 * height, width) * 0.05
    out = into(poisoned(rows, height), lambda out: clustered_gate(ahead(x), weight, out, wide, clusters))
    return worst_row_error(out, plain.silu_mul(x.double() @ weight.double().t()))


def sum_check(rows: int, height: int, width: int, clusters: int) -> float:
    x, weight, before = normal(rows, width), normal(height, width) * 0.05, normal(rows, height)
    out = into(before, lambda out: clustered_sum(ahead(x), weight, out, clusters))
    return worst_row_error(out, before.double() + x.double() @ weight.double().t())


def turn_check(rows: int, heads: int, kv_heads: int, width: int, clusters: int, *, normed: bool) -> float:
    """Pages of 16 or 32; one row of many has no cell."""
    dim, page = 128, 16 + 16 * (rows % 2)
    positions = torch.randint(0, 3000, (rows,), device="cuda", dtype=torch.int32)
    x, weight = normal(rows, width), normal((heads + 2 * kv_heads) * dim, width) * 0.05
    blocks = rows // page + 4
    cells = torch.randperm(blocks * page, device="cuda")[:rows]
    if rows > 1:
        cells[rows // 2] = -1
    angles = torch.rand(3000, dim // 2, device="cuda") * 6
    q_norm, k_norm = (normal(dim), normal(dim)) if normed else (None, None)
    tables = (angles.cos(), angles.sin(), q_norm, k_norm, 1e-6)
    keys, values = poisoned(blocks, kv_heads, page, dim), poisoned(blocks, kv_heads, page, dim)
    asked = []

    def fill(qkv: Tensor) -> None:
        def ask(queries: Tensor) -> None:
            turn = Turn(positions, cells, *tables, queries.view(rows, heads, dim), keys, values)
            clustered_turn(ahead(x), weight, qkv, turn, clusters)

        asked.append(into(poisoned(rows, heads * dim), ask))

    qkv = into(poisoned(rows, len(weight)), fill).view(rows, -1, dim)
    q, k, v = plain.rotary(x.double() @ weight.double().t(), positions, *tables, heads, kv_heads)
    errors = [worst_row_error(asked[0].view(rows, heads, dim), q)]
    errors.append(worst_row_error(qkv[:, heads:], torch.cat((k, v), 1)))
    for got, kept in ((keys, k), (values, v)):
        want = torch.full(got.shape, torch.nan, dtype=torch.float64, device="cuda")
        plain.put(want, cells, kept)
        if not torch.equal(got.isnan(), want.isnan()):
            return torch.nan
        errors.append(relative_error(got.nan_to_num(), want.nan_to_num()))
    return max(errors)


def chain_check(rows: int, hidden: int, inner: int, wide: int) -> float:
    """Layers of norm, gate and sum, each launched while the one before ends, in a graph: the same bits as where each waits until
    nothing runs. 0, or NaN."""
    norm = normal(hidden)
    ups = [normal(2 * inner, hidden) * 0.05 for _ in range(_LAYERS)]
    downs = [normal(hidden, inner) * 0.02 for _ in range(_LAYERS)]
    residual, normed, between = normal(rows, hidden), poisoned(rows, hidden), poisoned(rows, inner)

    def run(settle: Callable[[], object]) -> None:
        for up, down in zip(ups, downs, strict=True):
            rms_norm(residual, norm, 1e-5, normed)
            settle()
            clustered_gate(normed, up, between, wide, 66)
            settle()
            clustered_sum(between, down, residual, 66)
            settle()

    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(_CHAINS):
        start = normal(rows, hidden)
        residual.copy_(start)
        run(torch.cuda.synchronize)
        want = residual.clone()
        residual.copy_(start)
        between.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(residual, want):
            return torch.nan
    return 0.0
