# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,import-not-found,import-untyped,untyped-decorator"
"""The child's side of `Compilers`: `python -m headrace.runner.cuda.compile_child PARENT`.

Reads one order, and writes a line for each kernel that is compiled. A kernel that is not is left to its asker, who will
hear why. Must not touch a card: it is forked.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from types import ModuleType
from typing import Any

import msgspec
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from headrace.core.parent import die_with_parent
from headrace.core.proc import usable_cores
from headrace.runner.cuda.compilers import Order


def _some_type(_: object, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Types(name, (), {})


class _Types(type):
    """Whatever is asked of one is another."""

    __getattr__ = _some_type


class _NoTorch(ModuleType):
    """In torch's place. To import it takes seconds, and modules of kernels ask it for names alone before they are called."""

    __getattr__ = _some_type


class _NoCard:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@triton.jit
def _store(to, number: tl.constexpr):
    tl.store(to, number)


def _prepare() -> None:
    """Import every kernel, build what Triton asks cards with, and learn what the first compilation in a process learns: those
    forked know it."""
    sys.modules["torch"] = _NoTorch("torch")
    importlib.import_module("headrace.runner.cuda.exact_ops")
    source = ASTSource(_store, {"to": "*i32", "number": "constexpr"}, {"number": 1})
    with suppress(OSError):  # a cache that cannot be written has them all, or its asker will complain
        triton.compile(source, target=GPUTarget("cuda", 80, 32))
    with suppress(Exception):
        _cards().CudaUtils()
    build_plainly()


def build_plainly() -> None:
    """What launches a kernel is C, a page that runs once a launch, and some Tritons build it for every kernel: here without
    the passes that take most of the time for it."""
    module: Any = importlib.import_module("triton.runtime.build")
    build = getattr(module, "_build", None)

    def plain_build(*given, **named):
        # The seventh are flags; of several for one thing the last counts.
        return build(*given[:6], *([*flags, "-O0"] for flags in given[6:7]), *given[7:], **named)

    if build is not None:
        module._build = plain_build


def _cards() -> Any:
    """Where Triton builds, with a compiler for C, what it asks cards and launches kernels with. That takes a while, too;
    without a card, or in another Triton, all of it may fail, and is built by who needs it."""
    return importlib.import_module("triton.backends.nvidia.driver")


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _compile(asked: tuple[int, str, str, str]) -> int | None:
    place, module, name, told = asked
    try:
        compiled = _kernel(module, name).preload(told)
    except Exception:  # noqa: BLE001 - whatever a compiler raises, its asker will see
        return None
    with suppress(Exception):
        _cards().CudaLauncher(compiled.src, compiled.metadata)
    return place


def _compile_all(order: Order) -> Iterator[int]:
    """The place of each as soon as it is there. None after a process of ours ended, whatever ended it."""
    driver.set_active(_NoCard(GPUTarget(*order.target)))
    for module, name, _ in order.kernels:
        # Triton's name for it in its cache hangs on what was named before: here as there, in the order of asking.
        hash(_kernel(module, name))
    asked = [(place, *each) for place, each in enumerate(order.kernels)]
    # So that no long one is begun last.
    asked.sort(key=lambda each: -len(_kernel(*each[1:3]).src))
    processes = max(1, min(len(asked), usable_cores()))
    with ProcessPoolExecutor(processes, get_context("fork"), die_with_parent, (os.getpid(),)) as pool:
        for done in as_completed([pool.submit(_compile, each) for each in asked]):
            if done.exception() is not None:
                return
            place = done.result()
            if place is not None:
                yield place


def main() -> None:
    # What compilers say is not for the asker.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with suppress(ImportError):  # benchmarks carry no more than they need
        importlib.import_module("setproctitle").setproctitle("headrace: compilers")
    die_with_parent(int(sys.argv[1]))
    _prepare()
    words = sys.stdin.buffer.read()
    if words:
        for place in _compile_all(msgspec.json.decode(words, type=Order)):
            answers.write(f"{place}\n")
            answers.flush()


if __name__ == "__main__":
    main()
