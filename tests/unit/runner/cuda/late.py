"""A lane whose device is late: what is put on it is done when somebody waits for it, and reads memory as it is then."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.runner.cuda.lane import HostLane, Mark
from headrace.runner.cuda.layout import Layout
from headrace.runner.cuda.machine import Machine
from headrace.runner.cuda.odd_space import OddSpace
from headrace.runner.cuda.runner import CudaRunner


class _LateMark:
    def __init__(self, lane: "LateLane") -> None:
        self._lane = lane
        self._passed = True

    def put(self) -> None:
        self._passed = False
        self._lane.put(self._pass)

    def wait(self) -> None:
        while not self._passed:
            self._lane.do_next()

    def seconds_since(self, earlier: "_LateMark") -> float:
        assert self._passed and earlier._passed
        return 1e-3

    def _pass(self) -> None:
        self._passed = True


class LateLane(HostLane):
    def __init__(self) -> None:
        super().__init__()
        self._work: deque[Callable[[], None]] = deque()
        # Most pieces of work that were ever put off at once.
        self.latest = 0

    @property
    def waiting(self) -> int:
        """How many pieces of work are put off."""
        return len(self._work)

    def put(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self.latest = max(self.latest, len(self._work))

    def do_next(self) -> None:
        with torch.inference_mode():
            self._work.popleft()()

    def mark(self) -> Mark:
        return _LateMark(self)

    def settle(self) -> None:
        while self._work:
            self.do_next()


class _LateMachine:
    """A machine's calls put off; whoever looks at what it holds waits for them."""

    def __init__(self, machine: Machine, lane: LateLane) -> None:
        self._machine = machine
        self._lane = lane

    def send(self, letter: Tensor, words: int) -> None:
        self._lane.put(lambda: self._machine.send(letter, words))

    def fetch(self, letter: Tensor, words: int) -> None:
        self._lane.put(lambda: self._machine.fetch(letter, words))

    def run(self, layout: Layout) -> None:
        self._lane.put(lambda: self._machine.run(layout))

    def amend(self, letter: Tensor, layout: Layout, num_ruled: int, num_scored: int) -> None:
        self._lane.put(lambda: self._machine.amend(letter, layout, num_ruled, num_scored))

    def __getattr__(self, name: str) -> Any:
        if name in ("states", "logits", "change"):
            self._lane.settle()
        return getattr(self._machine, name)


class _LateSpace:
    """Whoever enters something into lines waits for what is put off: it may be about who had them before."""

    def __init__(self, space: OddSpace, lane: LateLane) -> None:
        self._space = space
        self._lane = lane

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            self._lane.settle()
        return getattr(self._space, name)


def delay(runner: CudaRunner, lane: LateLane) -> None:
    """From here on the runner's device is late; the runner was made on this lane."""
    runner._machine = _LateMachine(runner._machine, lane)  # type: ignore[assignment]
    runner._odd._space = _LateSpace(runner._odd._space, lane)  # type: ignore[assignment]
