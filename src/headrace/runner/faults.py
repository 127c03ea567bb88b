"""What goes wrong on purpose: slow steps, bad rows, too little memory, hangs and deaths, by name or by seeded chance.

Decides only; the fake runner acts on it. Given the same seed and the same plans, the same faults.
"""

import math
import random
from collections.abc import Callable, Iterable

from msgspec import Struct

from headrace.core.plan import IntArray, SlotStart
from headrace.runner.cells import IndexArray

# Kinds of row fault.
FAIL = "fail"
NAN = "nan"
RANGE = "range"


class FaultRates(Struct, frozen=True):
    """Chances per row (fail, nan, range), per step (slow, hang, death) and per launch of more than one token (room)."""

    fail: float = 0.0
    nan: float = 0.0
    range: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.1
    hang: float = 0.0
    death: float = 0.0
    room: float = 0.0


class Faults:
    """Hooks may be set at any time. Row faults name a sequence number, not a slot."""

    def __init__(self, rates: FaultRates | None = None, *, seed: int = 0, lethal_id: int | None = None) -> None:
        self.rates = rates if rates is not None else FaultRates()
        self._random = random.Random(seed)
        self._slow: list[tuple[Callable[[int], bool], float]] = []
        self._deaths: dict[int, str] = {}
        self._rows: dict[int, list[tuple[str, int | None]]] = {}
        self._most_tokens: list[tuple[Callable[[int], bool], int]] = []
        self._huge: set[int] = set()
        # A prompt with this id is the device's death.
        self._lethal_id = lethal_id

    def slow(self, steps: int | Callable[[int], bool], extra_s: float) -> None:
        """A step, or every step that satisfies a predicate, takes `extra_s` longer."""
        matches = (lambda step: step == steps) if isinstance(steps, int) else steps
        self._slow.append((matches, extra_s))

    def hang(self, step: int) -> None:
        """The step never ends."""
        self.slow(step, math.inf)

    def die(self, step: int, *, at: str = "launch") -> None:
        """The device is gone `at` the launch or the collection of `step`."""
        assert at in ("launch", "collect"), at
        self._deaths[step] = at

    def run_out(self, steps: int | Callable[[int], bool], most_tokens: int) -> None:
        """A step, or every step that satisfies a predicate, has memory for `most_tokens` tokens only."""
        matches = (lambda step: step == steps) if isinstance(steps, int) else steps
        self._most_tokens.append((matches, most_tokens))

    def outgrow(self, number: int) -> None:
        """No step that has a row of this sequence finds memory."""
        self._huge.add(number)

    def fail_row(self, number: int, *, at: int | None = None) -> None:
        """`at`: output index of the token that fails; None: the sequence's next row, of any kind."""
        self._rows.setdefault(number, []).append((FAIL, at))

    def nan_row(self, number: int, *, at: int | None = None) -> None:
        self._rows.setdefault(number, []).append((NAN, at))

    def bad_id(self, number: int, *, at: int | None = None) -> None:
        """The row claims success with an id outside the vocabulary."""
        self._rows.setdefault(number, []).append((RANGE, at))

    def dies(self, step: int, at: str) -> bool:
        if self._deaths.get(step) == at:
            return True
        return at == "launch" and self._chance(self.rates.death)

    def kills(self, begun: Iterable[SlotStart]) -> bool:
        """Whether the device dies of one of these."""
        lethal = self._lethal_id
        return lethal is not None and any(lethal in start.ids[: start.num_prompt] for start in begun)

    def lacks_room(self, step: int, tokens: int, numbers: IndexArray) -> bool:
        """Whether a launch of so many tokens of these sequences finds no memory."""
        if any(tokens > most for matches, most in self._most_tokens if matches(step)):
            return True
        return not self._huge.isdisjoint(numbers.tolist()) or (tokens > 1 and self._chance(self.rates.room))

    def extra_s(self, step: int) -> float:
        extra = sum(extra for matches, extra in self._slow if matches(step))
        if self._chance(self.rates.slow):
            extra += self.rates.slow_s
        return math.inf if self._chance(self.rates.hang) else extra

    def rows(self, numbers: IntArray | IndexArray, indices: IndexArray) -> list[tuple[int, str]]:
        """(row, kind) of every row that goes wrong; `indices` are output indices, negative in prefill."""
        found = []
        if self._rows:
            for row, number in enumerate(numbers.tolist()):
                for kind, at in self._rows.get(number, ()):
                    if at is None or at == indices[row]:
                        found.append((row, kind))
        rates = self.rates
        total = rates.fail + rates.nan + rates.range
        if total > 0.0:
            for row in range(len(numbers)):
                luck = self._random.random()
                if luck < total:
                    kind = FAIL if luck < rates.fail else NAN if luck < rates.fail + rates.nan else RANGE
                    found.append((row, kind))
        return found

    def _chance(self, rate: float) -> bool:
        return rate > 0.0 and self._random.random() < rate
