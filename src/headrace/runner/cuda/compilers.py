"""Processes that compile kernels: with cores enough, all of them in the time of the longest.

In threads they wait for each other, for much of a compilation holds Python's lock. One process is started before its
parent imports torch, so that it has all kernels at hand when it is asked, and divides into as many as there are cores; it
touches no card. Nobody depends on it: what it did not compile its parent does. Imports neither torch nor Triton.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec

import msgspec
from msgspec import Struct


class Order(Struct, frozen=True):
    """`target` is the card's backend, architecture and warp size. A kernel is its module, its name, and how it is to be
    compiled in Triton's words."""

    target: tuple[str, int, int]
    kernels: list[tuple[str, str, str]]


class Compilers:
    """For one order. Where no process can be started nothing is compiled."""

    def __init__(self) -> None:
        self._num_asked = 0
        self._process: subprocess.Popen[bytes] | None = None
        argv = [sys.executable, "-P", "-m", "headrace.runner.cuda.compile_child", str(os.getpid())]
        if find_spec("triton") is not None:
            with suppress(OSError):
                self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, order: Order) -> None:
        """Waits at most until the process has imported what it needs."""
        self._num_asked = len(order.kernels)
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it is gone, and `compiled` will say so
                self._process.stdin.write(msgspec.json.encode(order))
                self._process.stdin.close()

    def compiled(self) -> Iterator[int]:
        """The places of kernels in the order, each as soon as it is in Triton's cache. Fewer than all where a kernel could
        not be compiled or the process ended."""
        if self._process is not None and self._process.stdout is not None:
            for _, line in zip(range(self._num_asked), self._process.stdout, strict=False):
                yield int(line)

    def close(self) -> None:
        """End it, whatever it does. May be called again."""
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # it did not hear all of its order
                    pipe.close()
