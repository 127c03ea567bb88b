# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""A matrix product whose rows do not know how many they are: one kernel in one configuration for every number of rows.

A library chooses by the number of rows, and cuts long sums differently. Here every sum is made by one program, in the
order of its columns, in tiles whose sizes the matrix alone decides. Slower, and a row's bits are its own.
"""

import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor


class ExactConfig(Struct, frozen=True):
    """Tiles of `rows` times `lines` of the matrix, `span` columns at a time; `together` row tiles share what they read."""

    rows: int = 64
    lines: int = 128
    span: int = 64
    together: int = 16
    num_warps: int = 4
    num_stages: int = 4


def exact_config(height: int) -> ExactConfig:
    """By the matrix alone: low ones are cut finer, or most of the card would have nothing to do."""
    if height >= 16384:
        return ExactConfig()
    return ExactConfig(lines=64 if height >= 6144 else 32, num_stages=6)


def exact_product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: ExactConfig | None = None
) -> None:
    """`out` [rows, height] = `rows` [rows, width] times `weight` [height, width], plus `bias` [height]."""
    count, width = rows.shape
    height = weight.shape[0]
    config = config or exact_config(height)
    _product[(triton.cdiv(count, config.rows) * triton.cdiv(height, config.lines),)](
        rows,
        weight,
        weight if bias is None else bias,
        out,
        count,
        rows.stride(0),
        out.stride(0),
        height=height,
        width=width,
        biased=bias is not None,
        tall=config.rows,
        wide=config.lines,
        span=config.span,
        together=config.together,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(do_not_specialize=["count"])
def _product(
    rows,
    weight,
    bias,
    out,
    count,
    rows_stride,
    out_stride,
    height: tl.constexpr,
    width: tl.constexpr,
    biased: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
    span: tl.constexpr,
    together: tl.constexpr,
):
    columns = tl.cdiv(height, wide)
    group = tl.program_id(0) // (together * columns)
    first = group * together
    size = tl.minimum(tl.cdiv(count, tall) - first, together)
    inside = tl.program_id(0) % (together * columns)
    r = (first + inside % size) * tall + tl.arange(0, tall)
    c = inside // size * wide + tl.arange(0, wide)
    i = tl.arange(0, span)
    r_held, c_held = (r < count)[:, None], (c < height)[None, :]
    x_at = rows + r.to(tl.int64)[:, None] * rows_stride + i[None, :]
    w_at = weight + c.to(tl.int64)[None, :] * width + i[:, None]
    summed = tl.zeros([tall, wide], tl.float32)
    for at in range(0, width, span):
        if width % span == 0:
            x = tl.load(x_at + at, mask=r_held, other=0.0)
            w = tl.load(w_at + at, mask=c_held, other=0.0)
        else:
            x = tl.load(x_at + at, mask=r_held & (at + i < width)[None, :], other=0.0)
            w = tl.load(w_at + at, mask=c_held & (at + i < width)[:, None], other=0.0)
        summed = tl.dot(x, w, summed)
    if biased:
        summed += tl.load(bias + c, mask=c < height, other=0.0).to(tl.float32)[None, :]
    home = out + r.to(tl.int64)[:, None] * out_stride + c[None, :]
    tl.store(home, summed.to(out.dtype.element_ty), mask=r_held & c_held)
