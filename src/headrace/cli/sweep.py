"""Giving back memory that nothing uses, while nobody waits for an answer. Owns when that is worth its time.

Requests leave next to no garbage: what they held is freed when they end. But the allocators keep what was freed, and
a few cycles of libraries wait for the collector, which is told to come seldom.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.proc import trim_memory

# Collections are for cycles, of which requests make few; scanning what is alive costs more than they hold. What was
# alive at one collection is looked at again after ten: a cycle that outlived one is then not kept for long.
THRESHOLDS = (50_000, 10, 100)
# So many objects that may be garbage make it worth to look.
_MIN_OBJECTS = 1000


def settle() -> None:
    """What is alive now is not looked through any more: a model and its libraries take a tenth of a second each time."""
    gc.collect()
    gc.freeze()


@contextmanager
def settled(*thresholds: int) -> Iterator[None]:
    """The same for a while, in which the collector comes as seldom as `thresholds` say. It does not nest: at its end everything
    is looked through again."""
    before = gc.get_threshold()
    settle()
    gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class Sweep:
    """To be told every now and then, by `tick`, whether nobody waits for anything."""

    def __init__(self) -> None:
        self._was_idle = False
        self._has_worked = False
        self._num_collections = _num_collections()

    def tick(self, is_idle: bool) -> bool:
        """Sweep, if it was idle twice in a row and something was done since the last time. True: it did."""
        was_idle, self._was_idle = self._was_idle, is_idle
        self._has_worked |= not is_idle or self._has_made_objects()
        if not (was_idle and is_idle and self._has_worked):
            return False
        # Not the oldest as well: streams that are kept to be resumed may be half a million objects, for a tenth of a
        # second, and whoever asks meanwhile would wait.
        gc.collect(1)
        trim_memory()
        self._num_collections = _num_collections()
        self._has_worked = False
        return True

    def _has_made_objects(self) -> bool:
        return gc.get_count()[0] >= _MIN_OBJECTS or _num_collections() != self._num_collections


def _num_collections() -> int:
    return sum(int(generation["collections"]) for generation in gc.get_stats())
