"""Token ids as arrays, made quickly: a long prompt waits for it."""

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# From here on to pack them takes less time than to look at each.
_LONG = 64


_Packed = tuple[Sequence[int], NDArray[np.int64]]
_NOTHING: _Packed = ((), np.zeros(0, np.int64))
# What was packed last, until it is asked for again: a prompt is looked at when it comes in, and when it starts.
_last = _NOTHING


def packed(ids: Sequence[int]) -> NDArray[np.int64]:
    """What `np.array` makes of them, in less than half of its time; not to be written to. `struct.error` where one is no
    integer of 64 bits."""
    global _last
    known, array = _last
    if ids is known:
        _last = _NOTHING
        return array
    array = np.frombuffer(struct.pack(f"{len(ids)}q", *ids), np.int64)
    if isinstance(ids, tuple):  # others may change
        _last = ids, array
    return array


def are_below(ids: Sequence[int], size: int) -> bool:
    """Whether all of them are from 0 to `size` - 1."""
    if len(ids) < _LONG:
        return not ids or (min(ids) >= 0 and max(ids) < size)
    try:
        return largest(packed(ids)) < size
    except struct.error:
        return False


def largest(ids: NDArray[np.int64]) -> int:
    """As if they had no sign: those below zero are larger than all others."""
    return int(ids.view(np.uint64).max())
