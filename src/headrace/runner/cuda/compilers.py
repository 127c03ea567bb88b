"""Processes that compile kernels: with cores enough, all of them in the time of the longest.

In threads they wait for each other, for much of a compilation holds Python's lock. One process is started before its
parent imports torch, so that it has all kernels at hand when it is asked, and divides into as many as there are cores; it
touches no card. Nobody depends on it: what it did not compile its parent does. Knows neither torch nor Triton.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from msgspec import Struct


class Order(Struct, frozen=True):
    """`target` is the card's backend, architecture and warp size. A kernel is its module, its name, and how it is to be
    compiled in Triton's words."""

    target: tuple[str, int, int]
    kernels: list[tuple[str, str, str]]


class Compilers:
    """For one order."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "headrace.runner.cuda.compile_child", str(os.getpid())]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._num_asked = 0

    def ask(self, order: Order) -> None:
        """Does not wait."""
        assert self._process.stdin is not None
        self._num_asked = len(order.kernels)
        with suppress(OSError):  # it is gone, and `compiled` will say so
            self._process.stdin.write(msgspec.json.encode(order))
            self._process.stdin.close()

    def compiled(self) -> Iterator[int]:
        """The places of kernels in the order, each as soon as it is in Triton's cache. Fewer than all where a kernel could
        not be compiled or the process ended."""
        assert self._process.stdout is not None
        for _, line in zip(range(self._num_asked), self._process.stdout, strict=False):
            yield int(line)

    def close(self) -> None:
        """End it, whatever it does. May be called again."""
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # it did not hear all of its order
                    pipe.close()
