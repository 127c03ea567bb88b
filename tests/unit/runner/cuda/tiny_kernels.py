# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Two kernels with a function in common that reads a number of its module: Triton's name for the second in its cache hangs
on whether the first was named before."""

import triton
import triton.language as tl

_BASE = tl.constexpr(3)


@triton.jit
def _add_base(number):
    return number + _BASE


@triton.jit
def _first(to):
    tl.store(to, _add_base(tl.load(to)))


@triton.jit
def _second(to):
    tl.store(to, _add_base(2 * tl.load(to)))


def launch_both(to) -> None:
    _first[(1,)](to)
    _second[(1,)](to)
