# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Experts of a layer: rows choose, pairs of row and expert are sorted by expert, and each expert computes its own.

Nothing here waits for the host and no size depends on who is chosen: tiles that nobody needs end at once. A tile has one
expert. Every sum is made by one program in the order of its columns, and what experts give a row is added in the order
in which it chose them; so in one configuration a row's bits are its own.
"""

import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from headrace.runner.cuda.expert_space import HIGH_TILE, LOW_TILE, ExpertSpace, most_tiles

_ROUTED_ROWS = 16
_SCANNED = 1024
_ADDED = 1024


class ExpertConfig(Struct, frozen=True):
    """Tiles of `rows` pairs times `lines` of a matrix, `span` columns at a time."""

    rows: int = LOW_TILE
    lines: int = 64
    span: int = 64
    num_warps: int = 4
    num_stages: int = 3


def expert_config(pairs: int, num_experts: int) -> ExpertConfig:
    """Low tiles while experts have a few rows each: what is read is weights, and rows that are not there cost."""
    return ExpertConfig() if pairs <= 16 * num_experts else ExpertConfig(rows=HIGH_TILE)


def experts(
    rows: Tensor,
    cells: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_chosen: int,
    out: Tensor,
    space: ExpertSpace,
    *,
    normed: bool,
    config: ExpertConfig | None = None,
) -> None:
    """`out`, `rows` [n, width]; `cells` [n], -1 for rows that are padding and become zeros; `router` [experts, width];
    `gate_up` [experts, 2 inner, width], gates first; `down` [experts, width, inner]."""
    count, width = rows.shape
    num_experts, inner = down.shape[0], down.shape[2]
    pairs = count * num_chosen
    config = config or expert_config(pairs, num_experts)
    tiles = most_tiles(pairs, num_experts, config.rows)
    assert router.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    assert count <= len(space.chosen) and tiles <= len(space.owners) and tiles * config.rows <= len(space.order)
    padded = max(16, triton.next_power_of_2(num_experts))
    _route[(triton.cdiv(count, _ROUTED_ROWS),)](
        rows,
        cells,
        router,
        space.chosen,
        space.weights,
        count,
        rows.stride(0),
        width=width,
        num_experts=num_experts,
        padded=padded,
        num_chosen=num_chosen,
        padded_chosen=triton.next_power_of_2(num_chosen),
        tall=_ROUTED_ROWS,
        span=64 if padded <= 256 else 16,
        normed=normed,
        num_warps=4,
    )
    _count[(num_experts,)](space.chosen, space.counts, pairs, span=_SCANNED, num_warps=4)
    _sort[(num_experts,)](
        space.chosen,
        space.counts,
        space.owners,
        space.order,
        pairs,
        tiles,
        num_experts=num_experts,
        padded=padded,
        tall=config.rows,
        span=_SCANNED,
        num_warps=4,
    )
    sizes = {"tall": config.rows, "wide": config.lines, "span": config.span, "num_chosen": num_chosen}
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    _gate_up[(tiles, triton.cdiv(inner, config.lines))](
        rows,
        gate_up,
        space.inner,
        space.owners,
        space.order,
        rows.stride(0),
        width=width,
        inner=inner,
        **sizes,
        **launch,
    )
    _down[(tiles, triton.cdiv(width, config.lines))](
        space.inner, down, space.given, space.weights, space.owners, space.order, width=width, inner=inner, **sizes, **launch
    )  # fmt: skip
    _add[(count, triton.cdiv(width, _ADDED))](
        space.given,
        space.chosen,
        space.weights,
        out,
        out.stride(0),
        width=width,
        num_chosen=num_chosen,
        span=_ADDED,
        num_warps=4,
    )


def exact_experts(
    rows: Tensor,
    cells: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    num_chosen: int,
    out: Tensor,
    space: ExpertSpace,
    *,
    normed: bool,
    config: ExpertConfig | None = None,
) -> None:
    """The same in one configuration, whatever the number of rows."""
    config = config or ExpertConfig()
    experts(rows, cells, router, gate_up, down, num_chosen, out, space, normed=normed, config=config)


@triton.jit(do_not_specialize=["count"])
def _route(
    rows,
    cells,
    router,
    chosen,
    weights,
    count,
    rows_stride,
    width: tl.constexpr,
    num_experts: tl.constexpr,
    padded: tl.constexpr,
    num_chosen: tl.constexpr,
    padded_chosen: tl.constexpr,
    tall: tl.constexpr,
    span: tl.constexpr,
    normed: tl.constexpr,
):
    r = tl.program_id(0) * tall + tl.arange(0, tall)
    held = r < count
    live = held & (tl.load(cells + r, mask=held, other=-1) >= 0)
    e = tl.arange(0, padded)
    i = tl.arange(0, span)
    x_at = rows + r.to(tl.int64)[:, None] * rows_stride + i[None, :]
    w_at = router + e[None, :] * width + i[:, None]
    scores = tl.zeros([tall, padded], tl.float32)
    for at in range(0, width, span):
        x = tl.load(x_at + at, mask=live[:, None] & (at + i < width)[None, :], other=0.0)
        w = tl.load(w_at + at, mask=(e < num_experts)[None, :] & (at + i < width)[:, None], other=0.0)
        scores = tl.dot(x, w, scores)
    there = (e < num_experts)[None, :]
    scores = tl.where(there, scores, float("-inf"))
    shares = tl.exp(scores - tl.max(scores, 1)[:, None])
    shares = shares / tl.sum(shares, 1)[:, None]
    # A row that is not finite asks nobody, and its weights say so.
    broken = tl.max((shares != shares).to(tl.int32), 1) > 0
    left = tl.where(there, shares, -2.0)
    rank = tl.arange(0, padded_chosen)[None, :]
    names = tl.zeros([tall, padded_chosen], tl.int32)
    picked = tl.zeros([tall, padded_chosen], tl.float32)
    total = tl.zeros([tall], tl.float32)
    for turn in range(num_chosen):
        best = tl.max(left, 1)
        name = tl.min(tl.where(left == best[:, None], e[None, :], padded), 1)
        names = tl.where(rank == turn, name[:, None], names)
        picked = tl.where(rank == turn, best[:, None], picked)
        total += best
        left = tl.where(e[None, :] == name[:, None], -1.0, left)
    if normed:
        picked = picked / total[:, None]
    picked = tl.where(broken[:, None], float("nan"), picked)
    picked = tl.where(live[:, None], picked, 0.0)
    names = tl.where((live & (broken == 0))[:, None], names, -1)
    home = r[:, None] * num_chosen + rank
    stored = held[:, None] & (rank < num_chosen)
    tl.store(chosen + home, names, mask=stored)
    tl.store(weights + home, picked, mask=stored)


@triton.jit(do_not_specialize=["pairs"])
def _count(chosen, counts, pairs, span: tl.constexpr):
    expert = tl.program_id(0)
    i = tl.arange(0, span)
    found = tl.zeros([span], tl.int32)
    for at in range(0, pairs, span):
        found += (tl.load(chosen + at + i, mask=at + i < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _sort(
    chosen,
    counts,
    owners,
    order,
    pairs,
    tiles,
    num_experts: tl.constexpr,
    padded: tl.constexpr,
    tall: tl.constexpr,
    span: tl.constexpr,
):
    expert = tl.program_id(0)
    e = tl.arange(0, padded)
    each = (tl.load(counts + e, mask=e < num_experts, other=0) + tall - 1) // tall
    first = tl.sum(tl.where(e < expert, each, 0), 0)
    own = tl.sum(tl.where(e == expert, each, 0), 0)
    i = tl.arange(0, span)
    for at in range(0, own, span):
        tl.store(owners + first + at + i, tl.zeros([span], tl.int32) + expert, mask=at + i < own)
    home = order + first * tall
    filled = 0
    for at in range(0, pairs, span):
        mine = (tl.load(chosen + at + i, mask=at + i < pairs, other=-1) == expert).to(tl.int32)
        tl.store(home + filled + tl.cumsum(mine, 0) - 1, at + i, mask=mine == 1)
        filled += tl.sum(mine, 0)
    t = filled + tl.arange(0, tall)
    tl.store(home + t, tl.full([tall], -1, tl.int32), mask=t < own * tall)
    if expert == num_experts - 1:
        for at in range(first + own, tiles, span):
            tl.store(owners + at + i, tl.full([span], -1, tl.int32), mask=at + i < tiles)


@triton.jit
def _gate_up(
    rows,
    gate_up,
    into,
    owners,
    order,
    rows_stride,
    width: tl.constexpr,
    inner: tl.constexpr,
    num_chosen: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    span: tl.constexpr,
):
    tile = tl.program_id(0)
    owner = tl.load(owners + tile).to(tl.int64)
    if owner >= 0:
        pair = tl.load(order + tile * tall + tl.arange(0, tall)).to(tl.int64)
        c = tl.program_id(1) * wide + tl.arange(0, wide)
        i = tl.arange(0, span)
        held, c_held = (pair >= 0)[:, None], (c < inner)[None, :]
        x_at = rows + (pair // num_chosen)[:, None] * rows_stride + i[None, :]
        g_at = gate_up + owner * (2 * inner * width) + c[None, :] * width + i[:, None]
        gate = tl.zeros([tall, wide], tl.float32)
        up = tl.zeros([tall, wide], tl.float32)
        for at in range(0, width, span):
            inside = at + i < width
            x = tl.load(x_at + at, mask=held & inside[None, :], other=0.0)
            seen = c_held & inside[:, None]
            gate = tl.dot(x, tl.load(g_at + at, mask=seen, other=0.0), gate)
            up = tl.dot(x, tl.load(g_at + inner * width + at, mask=seen, other=0.0), up)
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(into + pair[:, None] * inner + c[None, :], value.to(into.dtype.element_ty), mask=held & c_held)


@triton.jit
def _down(
    rows,
    down,
    into,
    weights,
    owners,
    order,
    width: tl.constexpr,
    inner: tl.constexpr,
    num_chosen: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    span: tl.constexpr,
):
    tile = tl.program_id(0)
    owner = tl.load(owners + tile).to(tl.int64)
    if owner >= 0:
        pair = tl.load(order + tile * tall + tl.arange(0, tall)).to(tl.int64)
        c = tl.program_id(1) * wide + tl.arange(0, wide)
        i = tl.arange(0, span)
        held, c_held = (pair >= 0)[:, None], (c < width)[None, :]
        x_at = rows + pair[:, None] * inner + i[None, :]
        w_at = down + owner * (width * inner) + c[None, :] * inner + i[:, None]
        summed = tl.zeros([tall, wide], tl.float32)
        for at in range(0, inner, span):
            inside = at + i < inner
            x = tl.load(x_at + at, mask=held & inside[None, :], other=0.0)
            w = tl.load(w_at + at, mask=c_held & inside[:, None], other=0.0)
            summed = tl.dot(x, w, summed)
        summed *= tl.load(weights + pair, mask=pair >= 0, other=0.0)[:, None]
        tl.store(into + pair[:, None] * width + c[None, :], summed.to(into.dtype.element_ty), mask=held & c_held)


@triton.jit
def _add(
    given,
    chosen,
    weights,
    out,
    out_stride,
    width: tl.constexpr,
    num_chosen: tl.constexpr,
    span: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * span + tl.arange(0, span)
    held = c < width
    total = tl.zeros([span], tl.float32)
    for rank in range(num_chosen):
        pair = row * num_chosen + rank
        asked = tl.load(chosen + pair) >= 0
        part = tl.load(given + pair * width + c, mask=held & asked, other=0.0).to(tl.float32)
        # Nothing for padding, NaN for a row that is not finite.
        total += tl.where(asked, part, tl.load(weights + pair))
    tl.store(out + row * out_stride + c, total.to(out.dtype.element_ty), mask=held)
