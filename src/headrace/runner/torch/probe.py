"""What this processor offers: which kernels are exact here, how fast they are, and what follows.

Exactness decides what may be used and is checked against float64 with the largest numbers that can occur.
Speed decides only among kernels that agree to the last bit.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from headrace.core.errors import InvalidInput
from headrace.runner.torch.attention import CUTS, TILE, Cuts, fill_tile
from headrace.runner.torch.int4 import GROUP, Int4Linear, has_native_kernel
from headrace.runner.torch.kernels import KERNELS, LARGEST, Kernel, weight_bytes, with_margin
from headrace.runner.torch.linear import padded_product
from headrace.runner.torch.packing import Recipe
from headrace.runner.torch.planes import PEAK, RowPlanes
from headrace.weights.shape import ModelShape

DTYPES = ("auto", "fp32", "int8", "int4")
# Row counts whose speed is measured: one sequence, a few, a full table, a chunk.
ROWS = (1, 2, 4, 8, 32, 256)
_MANY_ROWS = 200
_CHECKED_ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64)
_MIN_ROWS = (2, 4, 16, 32)
# Positions whose attention is compared: around every border at which a library is known to cut its sums.
_LASTS = (0, 10, 31, 32, 63, 95, 130, 200, 255, 256, 300, 383, 400, 511, 512, 700, 1100)
# How much quicker a kernel must be that keeps more of a weight.
_CLEARLY = 1.3
# Bits of a stored weight, scales included, below which it was stored in four.
_FEW_BITS = 6.5

Run = Callable[[Tensor], Tensor]


class KernelFigure(Struct, frozen=True):
    """One kernel on one matrix of the model; microseconds by the row counts `ROWS`."""

    name: str
    exact: bool
    micros: tuple[float, ...]


class Choice(Struct, frozen=True):
    """What to run, whether its rows are exact, and why, in words."""

    recipe: Recipe
    cuts: Cuts
    row_exact: bool
    figures: tuple[KernelFigure, ...]
    reasons: tuple[str, ...]


def choose(shape: ModelShape, dtype: str = "auto", *, stored_bits: float = 32.0, brief: bool = False) -> Choice:
    """Measures for a second or two. What is computed does not depend on the clock; how fast it is may. A `brief` one tries
    only what the choice hangs on: where it will be int8, its figures are those of integer kernels, if they are exact."""
    if dtype not in DTYPES:
        raise InvalidInput(f"dtype must be one of {', '.join(DTYPES)}", param="dtype")
    with torch.inference_mode():
        return _choose(shape, dtype, stored_bits, brief)


def _choose(shape: ModelShape, dtype: str, stored_bits: float, brief: bool) -> Choice:
    torch.manual_seed(0)
    reasons: list[str] = []
    *quick, last = KERNELS
    integer = _measure_integers(quick, shape, brief)
    exact = [figure for figure in integer if figure.exact]
    # The last kernel is right everywhere, and slow: it serves where nothing else does.
    kernel = _quickest(exact, shape.hidden_size) if exact else last
    if not (brief and exact):
        integer += _measure_integers([last], shape, brief)
    figures = integer.copy()
    sums = next((figure for figure in integer if figure.exact), None)
    min_rows = fp32 = int4 = None
    if not (brief and _is_integer(shape, dtype, stored_bits, sums)):
        min_rows = _min_rows(shape)
        fp32 = _measure("fp32", min_rows is not None, _fp32_run(shape, min_rows or 2), shape.hidden_size)
        figures.append(fp32)
        int4 = _measure_int4(shape, min_rows)
        if int4 is not None:
            figures.append(int4)
    refused = ", ".join(figure.name for figure in integer if not figure.exact)
    if refused:
        reasons.append(f"not exact on this processor, hence not used for int8: {refused}")
    cuts, attends = _cuts(shape)
    if not cuts.wide:
        reasons.append("attention is computed token by token: larger products round otherwise on this processor")
    if dtype == "auto":
        dtype, reason = _pick({"fp32": fp32, "int8": sums, "int4": int4}, stored_bits)
        reasons.append(reason)
    if dtype == "int4" and (int4 is None or not int4.exact):
        reasons.append("the 4-bit kernel is missing or not row-exact here: int4 is served as int8")
        dtype = "int8"
    row_exact = attends and (dtype == "int8" or min_rows is not None)
    if not row_exact:
        reasons.append("rows may differ in their last bits with the size of a step")
    recipe = Recipe(dtype, kernel, min_rows or 2)
    return Choice(recipe, cuts, row_exact, tuple(figures), tuple(reasons))


def _is_integer(shape: ModelShape, dtype: str, stored_bits: float, sums: KernelFigure | None) -> bool:
    """Whether it will be int8, however float32 and four bits do."""
    if dtype == "auto":
        return sums is not None and (stored_bits >= _FEW_BITS or not _has_int4(shape))
    return dtype == "int8"


def _measure_integers(names: Sequence[str], shape: ModelShape, brief: bool) -> list[KernelFigure]:
    tried = {name: _try_integer(name, shape, brief) for name in names}
    runs = {name: run for name, (_, run) in tried.items() if run is not None}
    micros = _micros(runs, shape.hidden_size)
    return [KernelFigure(name, exact, micros.get(name, ())) for name, (exact, _) in tried.items()]


def _try_integer(name: str, shape: ModelShape, brief: bool) -> tuple[bool, Run | None]:
    """Whether it is exact with the model's widest sums; and its product with the largest layer matrix, to be timed."""
    try:
        widths = {shape.hidden_size, shape.num_heads * shape.head_dim, *shape.inner_sizes}
        exact = all(is_exact(name, width) for width in widths)
        if brief and not exact:
            return False, None
        kernel = KERNELS[name](
            with_margin(_integers(2 * shape.inner_sizes[0], shape.hidden_size, LARGEST).to(torch.int8))
        )
        planes = RowPlanes(max(ROWS), shape.hidden_size, 1)

        def run(rows: Tensor) -> Tensor:
            return kernel.multiply(planes.split(rows)[0])

        for count in ROWS:
            run(torch.randn(count, shape.hidden_size))
        return exact, run
    except (RuntimeError, AttributeError, NotImplementedError):
        return False, None


def is_exact(name: str, width: int) -> bool:
    """Rows and weights that are all largest, all least, and random, at every row count where kernels switch."""
    weight = _integers(48, width, LARGEST)
    weight[0], weight[1] = LARGEST, -LARGEST
    kernel: Kernel = KERNELS[name](with_margin(weight.to(torch.int8)))
    planes = RowPlanes(_MANY_ROWS, width, 1)
    for count in (*_CHECKED_ROWS, _MANY_ROWS):
        rows = _integers(count, width, PEAK)
        rows[0] = PEAK
        rows[:, 0] = -PEAK
        integers, _ = planes.split(rows.float())
        truth = (integers[:, :width].double() @ weight.double().t()).float()
        if not torch.equal(kernel.multiply(integers), truth):
            return False
    return True


def _quickest(figures: Sequence[KernelFigure], width: int) -> str:
    """On the whole: every kernel keeps weights of its own, and one set of them is enough. The one that keeps the least is left
    only for one that is clearly quicker."""
    kept = {figure.name: weight_bytes(figure.name, width) for figure in figures}
    least = min(kept.values())

    def score(figure: KernelFigure) -> float:
        mean = math.prod(figure.micros) ** (1.0 / len(figure.micros))
        return mean if kept[figure.name] == least else mean * _CLEARLY

    return min(figures, key=score).name


def _min_rows(shape: ModelShape) -> int | None:
    """The least padding under which float32 products of the model's sizes are row-exact; None if none is."""
    hidden = shape.hidden_size
    sizes = [size for inner in shape.inner_sizes for size in ((hidden, 2 * inner), (inner, hidden))]
    sizes += [(hidden, hidden), (hidden // GROUP or 1, hidden)]
    if shape.experts is not None:
        sizes.append((hidden, shape.experts.num_experts))
    for min_rows in _MIN_ROWS:
        if all(_product_is_exact(width, columns, min_rows) for width, columns in sizes):
            return min_rows
    return None


def _product_is_exact(width: int, columns: int, min_rows: int) -> bool:
    weight, rows = torch.randn(width, columns), torch.randn(300, width)
    whole = rows @ weight
    counts = (*_CHECKED_ROWS, 100, 128, 255)
    return all(torch.equal(padded_product(rows[:count], weight, min_rows), whole[:count]) for count in counts)


def _fp32_run(shape: ModelShape, min_rows: int) -> Run:
    weight = torch.randn(shape.hidden_size, 2 * shape.inner_sizes[0])
    return lambda rows: padded_product(rows, weight, min_rows)


def _measure_int4(shape: ModelShape, min_rows: int | None) -> KernelFigure | None:
    hidden = shape.hidden_size
    if not _has_int4(shape):
        return None
    try:
        linear = Int4Linear(
            torch.randn(2 * shape.inner_sizes[0], hidden),
            min_rows=min_rows or 2,
            planes_of=lambda width, planes: RowPlanes(300, width, planes),
        )
        rows = torch.randn(max(ROWS), hidden)
        whole = linear.project(rows)
        counts = (*_CHECKED_ROWS, 100)
        exact = all(torch.equal(linear.project(rows[:count]), whole[:count]) for count in counts)
        return _measure("int4", exact, linear.project, hidden)
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def _has_int4(shape: ModelShape) -> bool:
    return shape.hidden_size % GROUP == 0 and has_native_kernel()


def _cuts(shape: ModelShape) -> tuple[Cuts, bool]:
    """The cheapest way to read that is exact here, and whether there is one."""
    found = next((cuts for cuts in CUTS if _attends_alike(shape, cuts)), None)
    return found or CUTS[-1], found is not None


def _attends_alike(shape: ModelShape, cuts: Cuts) -> bool:
    """One token by itself, in tiles that begin elsewhere, and with more read behind it: always the same bits."""
    heads, dim = shape.num_kv_heads, shape.head_dim
    group = max(2, shape.num_heads // heads)
    keys, values = torch.randn(2, 1, heads, 2048, dim)
    queries = torch.randn(1200, heads, group, dim)
    for last in _LASTS:
        own = cuts.length(last + 1)
        truth = _attend(queries[last : last + 1], keys, values, last + 1, own, wide=False)
        for length in sorted({own, *(cuts.length(last + 1 + more) for more in (31, 64, 130, 300, 512))}):
            if not torch.equal(_attend(queries[last : last + 1], keys, values, last + 1, length, wide=False), truth):
                return False
            for start in (last, last - 7, last - 31):
                stop = min(start + TILE, length)
                if start < 0 or stop <= last or cuts.length(stop) > length:
                    continue
                tile = _attend(queries[start:stop], keys, values, stop, length, wide=cuts.wide)
                if not torch.equal(tile[last - start : last - start + 1], truth):
                    return False
    return True


def _attend(queries: Tensor, keys: Tensor, values: Tensor, stop: int, length: int, *, wide: bool) -> Tensor:
    """queries [t, heads, group, dim] of the tokens that end at `stop`, reading `length` positions."""
    count, heads, group, dim = queries.shape
    visible = torch.arange(length)[None] < torch.arange(stop - count + 1, stop + 1)[:, None]
    mask = torch.zeros(count, length).masked_fill_(~visible, float("-inf"))
    keys, values = keys[:, :, :length], values[:, :, :length]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if wide:
        tile = fill_tile(queries).transpose(0, 1).reshape(1, heads, -1, dim)
        mask = fill_tile(mask).repeat_interleave(group, 0)[None, None]
        out: Tensor = kernel(tile, keys, values, 0.0, False, attn_mask=mask, scale=dim**-0.5)[0]
        return out.view(heads, TILE, group, dim).transpose(0, 1)[:count]
    keys, values = keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1)
    each: Tensor = kernel(queries, keys, values, 0.0, False, attn_mask=mask[:, None, None], scale=dim**-0.5)[0]
    return each


def _pick(figures: dict[str, KernelFigure | None], stored_bits: float) -> tuple[str, str]:
    """By exactness and by what the file holds, never by the clock: the same command must give the same text.

    Weights that were stored in about four bits lose nothing in int4, and it reads the least memory.
    """
    exact = [dtype for dtype, figure in figures.items() if figure is not None and figure.exact]
    if stored_bits < _FEW_BITS and "int4" in exact:
        return "int4", f"auto: int4, since the file holds {stored_bits:.1f} bits a weight and int4 is row-exact here"
    chosen = next((dtype for dtype in ("int8", "int4", "fp32") if dtype in exact), "int8")
    return (
        chosen,
        f"auto: {chosen}, the first row-exact dtype of int8, int4 and fp32 for {stored_bits:.1f} bits a weight",
    )


def _measure(name: str, exact: bool, run: Run, width: int) -> KernelFigure:
    return KernelFigure(name, exact, _micros({name: run}, width)[name])


def _micros(runs: Mapping[str, Run], width: int) -> dict[str, tuple[float, ...]]:
    """The best time of each, by the row counts `ROWS`."""
    best_s = [_best_s(runs, torch.randn(count, width)) for count in ROWS]
    return {name: tuple(1e6 * each[name] for each in best_s) for name in runs}


def _best_s(runs: Mapping[str, Run], rows: Tensor, repeat: int = 4) -> dict[str, float]:
    """By turns: a moment in which the machine is slow is one for all of them."""
    best_s = dict.fromkeys(runs, math.inf)
    for run in runs.values():
        run(rows)
    for _ in range(repeat):
        for name, run in runs.items():
            started_s = time.perf_counter()
            run(rows)
            best_s[name] = min(best_s[name], time.perf_counter() - started_s)
    return best_s


def _integers(rows: int, columns: int, largest: int) -> Tensor:
    return torch.randint(-largest, largest + 1, (rows, columns))
