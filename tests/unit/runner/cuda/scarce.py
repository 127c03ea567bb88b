"""A card on which memory runs out by chance, or at a given place: in the work that must stand it, and nowhere else."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.runner.cuda import runner, shortage

ERROR = "CUDA out of memory. Tried to allocate 20.00 MiB."
# Asked before each operation that takes memory, with its name: whether there is none.
RunsOut = Callable[[str], bool]


class _Scarcity(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, runs_out: RunsOut) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runs_out = runs_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _allocates(func._schema) and self._runs_out(func._schema.name):
            raise torch.OutOfMemoryError(ERROR)
        return func(*args, **(kwargs or {}))


def _allocates(schema: Any) -> bool:
    """Neither a view nor in place nor into memory that was given."""
    return not any(thing.alias_info for thing in (*schema.arguments, *schema.returns))


def make_scarce(monkeypatch: pytest.MonkeyPatch, runs_out: RunsOut, *, in_steps: bool = True) -> None:
    """Of what takes memory while requests run; `in_steps`: steps without a graph too."""
    fits = shortage.fits

    def scarce(work: Callable[[], object]) -> bool:
        def tried() -> None:
            with _Scarcity(runs_out):
                work()

        return fits(tried)

    for module in (shortage, runner) if in_steps else (shortage,):
        monkeypatch.setattr(module, "fits", scarce)


class Chance:
    """Every operation may find none."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate = rate
        self._luck = random.Random(seed)
        self.hits = 0

    def __call__(self, _: str) -> bool:
        hit = self._luck.random() < self._rate
        self.hits += hit
        return hit
