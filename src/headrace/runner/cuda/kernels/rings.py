# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""What streamed kernels have in common: places that one warp fetches into and others read from, by turns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Names differ between Tritons.
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
meet = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def advance(stage, phase, stages: gl.constexpr):
    stage += 1
    if stage == stages:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def clear_from(v, count, tile: gl.constexpr):
    """Zeros from line `count` of a tile on, for four warps: what lies there is another's or nobody's, and may be anything."""
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    some: gl.constexpr = 16
    for at in gl.static_range(0, tile, some):
        if at + some > count:
            lines = v.slice(at, some)
            there = at + gl.arange(0, some, gl.SliceLayout(1, spread)) < count
            lines.store(gl.where(there[:, None], lines.load(spread), 0.0))
    fence_async_shared()
    meet()
