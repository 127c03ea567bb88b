# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""What streamed kernels have in common: places that one warp fetches into and others read from, by turns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

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
