"""The roofline: how fast a kernel could be, from the bytes it must move and the products it must make, and how near it
comes. Pure arithmetic; whoever measures gives the times and the peaks."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from headrace.weights.shape import ModelShape

Launch = Callable[[], Any]
# Seconds of one launch, when all of them run one after the other.
Timer = Callable[[Sequence[Launch]], float]

# Sizes of models to measure kernels at; no weights are needed for it.
SHAPES = {
    "135m": ModelShape("llama", 576, 30, 9, 3, 64, 1536, 49152, 8192, 1e-5, 1e5, tied_embeddings=True),
    "0.6b": ModelShape("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e-6, 1e6, qk_norm=True),
    "8b": ModelShape("llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072, 1e-5, 5e5),
}
_ROUNDS = range(3, 31)


class Peaks(Struct, frozen=True):
    """What this machine was seen to do at its best, measured just before. Products of 8-bit integers have their own peak
    where kernels make them."""

    bytes_per_s: float
    flops_per_s: float
    integer_per_s: float | None = None


class KernelFigure(Struct, frozen=True):
    """`bound`: what would take longest if nothing else did; `share`: that time over the time it took."""

    kernel: str
    size: str
    seconds: float
    moved_bytes: int
    flops: int
    bound: str
    share: float


class KernelReport(Struct, frozen=True):
    machine: str
    shape: str
    peaks: Peaks
    figures: tuple[KernelFigure, ...]
    remarks: tuple[str, ...]


Figures = Iterator[KernelFigure]


def judge(
    kernel: str, size: str, seconds: float, moved_bytes: float, flops: float, peaks: Peaks, *, integer: bool = False
) -> KernelFigure:
    peak = peaks.integer_per_s if integer and peaks.integer_per_s else peaks.flops_per_s
    memory_s, products_s = moved_bytes / peaks.bytes_per_s, flops / peak
    bound = "memory" if memory_s >= products_s else "products"
    return KernelFigure(
        kernel, size, seconds, int(moved_bytes), int(flops), bound, max(memory_s, products_s) / max(seconds, 1e-12)
    )


def host_seconds(launches: Sequence[Launch], budget_s: float = 0.15) -> float:
    """The median of several rounds by the wall clock, after one that does not count."""
    rounds: list[float] = []
    while len(rounds) <= _ROUNDS.start or (sum(rounds) < budget_s and len(rounds) < _ROUNDS.stop):
        since_s = time.perf_counter()
        for launch in launches:
            launch()
        rounds.append(time.perf_counter() - since_s)
    return statistics.median(rounds[1:]) / len(launches)
