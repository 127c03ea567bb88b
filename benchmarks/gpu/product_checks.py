"""Products with norms, gates and sums in their launch against float64, on the card: one row, some rows by either kernel,
one matrix alone. Outputs are poisoned, and so is what lies behind the rows."""

from collections.abc import Iterator
from typing import Any

import torch
from kernel_rig import normal, poisoned, relative_error
from torch import Tensor

from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.fused_product import (
    MOST_ROWS,
    FusedScratch,
    fused_config,
    fused_product,
    start_rows,
)
from headrace.runner.cuda.kernels.row_product import row_product
from headrace.runner.cuda.kernels.streamed_product import can_stream, streamed_config, streamed_product
from headrace.runner.cuda.squares import Squares

# bf16 in, bf16 out.
TOLERANCE = 6e-3
# Height, width, and whether by tiles that are fetched before the rows are there.
JOINED = (
    (4096, 1024, False),
    (1024, 3072, False),
    (960, 576, False),
    (1024, 3072, True),
    (6144, 4096, True),
    (4096, 14336, True),
    (1000, 2112, True),
)


def product_checks() -> Iterator[tuple[str, float, float]]:
    for height, width in ((4096, 1024), (1024, 3072), (960, 576), (577, 1530), (4096, 14336)):
        for tail in ("", "bias", "adds", "gated"):
            yield f"row product {height}x{width} {tail}", row_product_check(height, width, tail), TOLERANCE
    may_stream = can_stream(torch.device("cuda"))
    for height, width, streamed in JOINED:
        if streamed and not may_stream:
            continue
        for rows in (2, 33, 64, 113, 256):
            for tail in ("bias", "adds", "gated"):
                error = joined_product_check(rows, height, width, tail, streamed=streamed)
                name = "streamed" if streamed else "joined"
                yield f"{rows} rows {name} {height}x{width} {tail}", error, TOLERANCE
    if may_stream:
        yield "50 rows streamed 128256x4096", streamed_alone_check(50, 128256, 4096), TOLERANCE
        for rows, hidden, inner in ((2, 1024, 3072), (64, 2560, 9728), (64, 4096, 14336), (128, 4096, 14336)):
            error = chain_check(rows, hidden, inner)
            yield f"{rows} rows streamed down and up {hidden}x{inner}", error, TOLERANCE


def row_product_check(height: int, width: int, tail: str) -> float:
    row, norm, bias = normal(1, width), normal(width), normal(height) if tail == "bias" else None
    gated, adds = tail == "gated", tail == "adds"
    weight = (normal(height * (1 + gated), width) * 0.05).contiguous()
    before = normal(1, height) if adds else poisoned(1, height)
    out = before.clone()
    row_product(row, weight, out, norm=norm, eps=1e-5, bias=bias, adds=adds, gated=gated)
    return relative_error(out, plain.row_product(row, weight, norm, 1e-5, bias, before if adds else None, gated=gated))


def joined_product_check(rows: int, height: int, width: int, tail: str, *, streamed: bool) -> float:
    """What lies behind the rows is no number."""
    gated, adds, device = tail == "gated", tail == "adds", torch.device("cuda")
    x, norm, bias = normal(rows, width), normal(height if adds else width), normal(height) if tail == "bias" else None
    weight = (normal(height * (1 + gated), width) * 0.05).contiguous()
    before = normal(rows, height) if adds else poisoned(rows, height)
    out, left = before.clone(), Squares.make(height if adds else width, rows, device)
    scratch = FusedScratch.make(device)

    def multiply(read: Tensor, **joined: Any) -> None:
        behind = poisoned(2 * MOST_ROWS, width)
        behind[:rows] = read
        if streamed:
            config = streamed_config(rows, height, width, gated=gated)
            streamed_product(behind[:rows], weight, out, config, gated=gated, **joined)
        else:
            chosen = fused_config(rows, height, width, gated=gated)
            fused_product(behind[:rows], weight, out, chosen, scratch, gated=gated, **joined)

    if adds:
        scaled = poisoned(rows, height)
        multiply(x, norm=norm, scaled=scaled, left=left)
        factors = (left.sums[: left.parts].double().sum(0)[:, None] / height + 1e-5).rsqrt()
        errors = [relative_error(out, before.double() + x.double() @ weight.double().t())]
        errors.append(relative_error(scaled.double() * factors, plain.rms_norm(out, norm, 1e-5)))
    else:
        residual, scaled, ids = poisoned(rows, width), poisoned(rows, width), torch.arange(rows, device=device)
        start_rows(ids.int(), x, norm, residual, scaled, left)
        multiply(scaled, squares=left, eps=1e-5, bias=bias)
        want = plain.rms_norm(x, norm, 1e-5) @ weight.double().t() + (0 if bias is None else bias.double())
        errors = [relative_error(out, plain.silu_mul(want) if gated else want)]
    return torch.nan if scratch.tickets.any() else max(errors)


def chain_check(rows: int, hidden: int, inner: int) -> float:
    """A layer's end and the next one's beginning: what one product leaves of squares, in many parts, another reads."""
    x, residual, norm = normal(rows, inner), normal(rows, hidden), normal(hidden)
    down, up = normal(hidden, inner) * 0.02, normal(2 * inner, hidden) * 0.02
    before, scaled, out = residual.clone(), poisoned(rows, hidden), poisoned(rows, inner)
    left = Squares.make(hidden, rows, torch.device("cuda"))
    config = streamed_config(rows, hidden, inner, gated=False)
    streamed_product(x, down, residual, config, norm=norm, scaled=scaled, left=left)
    config = streamed_config(rows, inner, hidden, gated=True)
    streamed_product(scaled, up, out, config, squares=left, eps=1e-5, gated=True)
    errors = [relative_error(residual, before.double() + x.double() @ down.double().t())]
    errors.append(relative_error(out, plain.silu_mul(plain.rms_norm(residual, norm, 1e-5) @ up.double().t())))
    return max(errors)


def streamed_alone_check(rows: int, height: int, width: int) -> float:
    x, weight, out = normal(rows, width), normal(height, width), poisoned(rows, height)
    streamed_product(x, weight, out, streamed_config(rows, height, width, gated=False))
    return relative_error(out, x.double() @ weight.double().t())
