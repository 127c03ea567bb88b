"""The order of things on a device: a stream that work is put on, marks in it, memory it can be sent from, graphs.

The host's own lane does everything at once and in place; tests run on it. Knows neither plans nor models.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in the lane."""

    def put(self) -> None:
        """Here: after everything that was put on the lane so far."""

    def wait(self) -> None:
        """Until the device has come to it."""

    def seconds_since(self, earlier: Any) -> float:
        """Between two marks that the device has passed."""


class Lane(Protocol):
    device: torch.device

    def scope(self) -> AbstractContextManager[Any]:
        """What is computed inside is put on the lane."""

    def mark(self) -> Mark: ...

    def letter(self, words: int) -> Tensor:
        """Host memory of so many int32 words that the device can copy from and to by itself."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work as one thing to launch; it must have run before."""

    def free_bytes(self) -> int: ...

    def settle(self) -> None:
        """Wait for everything that was put on the lane."""


class _HostMark:
    def __init__(self) -> None:
        self._at_s = 0.0

    def put(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None: ...

    def seconds_since(self, earlier: "_HostMark") -> float:
        return max(self._at_s - earlier._at_s, 1e-9)


class HostLane:
    """No stream: work is done when its call returns."""

    def __init__(self, free_bytes: int = 1 << 30) -> None:
        self.device = torch.device("cpu")
        self._free_bytes = free_bytes

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Mark:
        return _HostMark()

    def letter(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def free_bytes(self) -> int:
        return self._free_bytes

    def settle(self) -> None: ...


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def put(self) -> None:
        self._event.record(self._stream)

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: "_CudaMark") -> float:
        return max(float(earlier._event.elapsed_time(self._event)) / 1e3, 1e-9)


class CudaLane:
    """One stream of one card. Graphs share one pool: only one of them runs at a time."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._graphs = torch.cuda.graph_pool_handle()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What `torch.cuda.stream` does, which takes 16 us for it: a step of a small model has 400, and enters twice."""
        before = torch._C._cuda_getCurrentStream(self.device.index)
        _go_to(self._stream.stream_id, self._stream.device_index, self._stream.device_type)
        try:
            yield
        finally:
            _go_to(*before)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)

    def letter(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graphs, stream=self._stream):
            work()
        return graph.replay

    def free_bytes(self) -> int:
        self.settle()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)

    def settle(self) -> None:
        self._stream.synchronize()


def _go_to(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)
