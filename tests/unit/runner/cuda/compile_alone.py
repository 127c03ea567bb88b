# mypy: disable-error-code="import-not-found,import-untyped"
"""Kernels compiled ahead for a card that is not here: a program of its own, for Triton's interpreter must be off.

usage: python -m tests.unit.runner.cuda.compile_alone [killed|fails|"loses one"]
Writes what happened as JSON: what was launched inside and after, what this process compiled inside and after, and whether
the process that compiles is gone.
"""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from headrace.runner.cuda.compilers import Compilers


class Card:
    """As much of a driver as Triton asks for to launch; what is launched is noted."""

    def __init__(self, target: Any) -> None:
        self.launched: list[str] = []
        self.utils = self
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *_: self.launched.append(source.name)


def put_in(card: Card) -> list[str]:
    """As this process's only card; what the process compiles from now on comes into the list."""
    from triton import knobs
    from triton.runtime import driver

    driver.set_active(card)
    for name, value in {"set_device": None, "current_stream": None, "stream": nullcontext()}.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    compiled: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: object) -> None:
        compiled.extend([] if cache_hit else [src.name])

    knobs.compilation.listener = note
    return compiled


class _Trouble(Exception): ...


def _forked(compilers: Compilers, patience_s: float = 60.0) -> list[int]:
    """The processes that the child has divided into, as soon as one of them has computed for some hundredths of a second, and
    so has a kernel in hand: that one first. What it runs besides is another program."""
    child = _child(compilers)
    since_s = time.perf_counter()
    while time.perf_counter() - since_s < patience_s:
        found = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        busy = {int(pid): _ticks(pid) for pid in found if _program(pid) == _program(child.pid)}
        if busy and max(busy.values()) >= 3:
            return sorted(busy, key=lambda pid: -busy[pid])
        time.sleep(0.001)
    raise AssertionError("it never divided")


def _program(pid: object) -> str:
    """Nothing, of one that is gone."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _ticks(pid: object) -> int:
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    except OSError:
        return 0


def _child(compilers: Compilers) -> Any:
    assert compilers._process is not None
    return compilers._process


def _are_gone(pids: list[int]) -> bool:
    """A process that nobody waited for is gone as well."""
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    for _ in range(200):
        if not any(state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z" for state in states):
            return True
        time.sleep(0.05)
    return False


def main(trouble: str) -> dict[str, object]:
    compilers = Compilers()
    from triton.backends.compiler import GPUTarget

    from headrace.runner.cuda.kernels import ahead
    from headrace.runner.cuda.kernels.activation import silu_mul
    from headrace.runner.cuda.products import fastest_product
    from tests.unit.runner.cuda.tiny_kernels import launch_both

    card = Card(GPUTarget("cuda", 90, 32))
    compiled = put_in(card)
    rows, wide = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(4, 128, dtype=torch.bfloat16)
    product = torch.zeros(4, 64, dtype=torch.bfloat16)
    began: list[float] = []

    def work() -> None:
        silu_mul(wide, rows)
        launch_both(rows)
        fastest_product(rows, torch.eye(64, dtype=torch.bfloat16), None, product)
        began.append(float(product.sum()))

    caught, forked = "", []
    if trouble == "killed":
        _child(compilers).kill()
    since_s = time.perf_counter()
    try:
        with ahead.compiling(work, torch.device("cpu"), compilers):
            inside = [list(card.launched), list(compiled)]
            if trouble in ("fails", "loses one"):
                forked = _forked(compilers)
            if trouble == "loses one":
                os.kill(forked[0], signal.SIGKILL)
            if trouble == "fails":
                raise _Trouble("weights that are none")
    except _Trouble as error:
        caught = str(error)
    took_s, at_end = time.perf_counter() - since_s, list(compiled)
    work()
    return {
        "began": began,
        "inside": inside,
        "compiled": sorted(at_end),
        "later": compiled[len(at_end) :],
        "launched": card.launched,
        "caught": caught,
        "quick": took_s < 20,
        "gone": _child(compilers).poll() is not None and _are_gone(forked),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:] or [""])))
