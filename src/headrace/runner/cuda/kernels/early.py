# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""Kernels that start while the one before them ends, where the card can: what does not depend on it is read meanwhile.

A program of a kernel launched with `launch_pdl` must call `await_inputs` before it reads or writes anything that another
kernel of the same step writes or reads, and at least one program of every launch must call it: the next kernel waits
for this one alone. What `begin` wrote may be read before: between it and the first such kernel of a step lies a launch that
is not early (`start_rows`, or the choice of embeddings).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def starts_early(device: torch.device) -> bool:
    """Programmatic dependent launch came with compute capability 9.0."""
    return device.type == "cuda" and capability(device) >= (9, 0)


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def let_next_start(early: tl.constexpr):
    """The kernel after this one may start as soon as all programs of this one have said so."""
    if early:
        gdc_launch_dependents()


@triton.jit
def await_inputs(early: tl.constexpr):
    """Until the kernel before has ended and all that it wrote can be read."""
    if early:
        gdc_wait()
