"""Products of at most 256 rows with large matrices, whose lines are a tile's rows, against float64, on the card: gates, and sums
of parts with the norm that adds them up. As in `clustered_checks`."""

from collections.abc import Callable, Iterator

import torch
from clustered_checks import TOLERANCE, ahead, into
from kernel_rig import normal, poisoned, worst_row_error
from torch import Tensor

from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.clusters import can_cluster
from headrace.runner.cuda.kernels.crossed_product import crossed_gate, crossed_sums
from headrace.runner.cuda.kernels.norms import sum_rms_norm

# One for each number that is computed together where these are used, and others.
_ROWS = (1, 65, 80, 95, 97, 127, 131, 160, 176, 192, 200, 223, 240, 255, 256)
_EPS = 1e-5
# Times that launches which start early are made one behind the other, and layers of them.
_CHAINS, _LAYERS = 20, 8


def crossed_checks() -> Iterator[tuple[str, float, float]]:
    if not can_cluster(torch.device("cuda")):
        return
    for rows in _ROWS:
        for height, width in ((14336, 4096), (1000, 576), (104, 64)):
            yield f"{rows} rows crossed {height}x{width} gated", gate_check(rows, height, width), TOLERANCE
        for height, width, parts in ((4096, 14336, 4), (1024, 3072, 16), (320, 64, 1)):
            yield (
                f"{rows} rows crossed {height}x{width} in {parts} parts",
                sum_check(rows, height, width, parts),
                TOLERANCE,
            )
    for rows in (80, 176, 256):
        yield f"{rows} rows crossed, chained", chain_check(rows), 0.0


def gate_check(rows: int, height: int, width: int) -> float:
    x, weight = normal(rows, width), normal(2 * height, width) * 0.05
    out = into(poisoned(rows, height), lambda out: crossed_gate(ahead(x), weight, out))
    return worst_row_error(out, plain.silu_mul(x.double() @ weight.double().t()))


def sum_check(rows: int, height: int, width: int, number: int) -> float:
    """The worst of the sums, what they are added to, and its norm."""
    x, weight, before, norm = normal(rows, width), normal(height, width) * 0.05, normal(rows, height), normal(height)
    parts, left = poisoned(number, rows, height, dtype=torch.float32), []

    def fill(residual: Tensor) -> None:
        crossed_sums(ahead(x), weight, parts)
        left.append(into(poisoned(rows, height), lambda out: sum_rms_norm(parts, residual, norm, _EPS, out)))

    residual, made = into(before, fill), x.double() @ weight.double().t()
    total = before.double() + made
    want = total * (total.square().mean(1, keepdim=True) + _EPS).rsqrt() * norm.double()
    # Sums are not rounded yet.
    unrounded = 100 * worst_row_error(parts.double().sum(0), made)
    return max(unrounded, worst_row_error(residual, total), worst_row_error(left[0], want))


def chain_check(rows: int) -> float:
    """Layers of gate, sums and norm, each launched while the one before ends, in a graph: the same bits as where each waits until
    nothing runs. 0, or NaN."""
    hidden, inner = 1024, 3584
    norm, parts = normal(hidden), poisoned(4, rows, hidden, dtype=torch.float32)
    ups = [normal(2 * inner, hidden) * 0.05 for _ in range(_LAYERS)]
    downs = [normal(hidden, inner) * 0.02 for _ in range(_LAYERS)]
    residual, normed, between = (poisoned(rows, width) for width in (hidden, hidden, inner))

    def run(settle: Callable[[], object]) -> None:
        for up, down in zip(ups, downs, strict=True):
            for launch in (
                lambda up=up: crossed_gate(normed, up, between),
                lambda down=down: crossed_sums(between, down, parts),
                lambda: sum_rms_norm(parts, residual, norm, _EPS, normed),
            ):
                launch()
                settle()

    def begin(start: Tensor, first: Tensor) -> None:
        residual.copy_(start)
        normed.copy_(first)

    begin(normal(rows, hidden), normal(rows, hidden))
    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(_CHAINS):
        start, first = normal(rows, hidden), normal(rows, hidden)
        begin(start, first)
        run(torch.cuda.synchronize)
        want = residual.clone()
        begin(start, first)
        between.fill_(torch.nan)
        parts.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(residual, want):
            return torch.nan
    return 0.0
