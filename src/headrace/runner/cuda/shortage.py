"""When the card has no memory left: which errors say so, and work that is done in smaller pieces then.

Knows neither plans nor rows. A piece must be able to be done again: whatever failed is taken to have changed nothing.
"""

from collections.abc import Callable

import torch

# Of other errors than the allocator's own: a kernel, a graph or a library found no memory for itself.
_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

Reclaim = Callable[[], object]


def is_shortage(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)


def fits(work: Callable[[], object]) -> bool:
    """Do it; False where there was no memory for it. What the failed work held is free when this returns: the error,
    whose frames hold it, is gone by then."""
    try:
        work()
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        return False
    return True


def fits_at_last(work: Callable[[], object], reclaim: Reclaim) -> bool:
    """Likewise, with a second try once the memory that nobody uses was given back."""
    if fits(work):
        return True
    reclaim()
    return fits(work)


def in_pieces(count: int, most: int, work: Callable[[slice], object], reclaim: Reclaim) -> list[int]:
    """Do `count` things, at most so many at a time, and half as many where these find no memory. Returns those that found
    none even alone."""
    lost: list[int] = []
    first, size = 0, most
    while first < count:
        piece = slice(first, min(first + size, count))
        if fits(lambda piece=piece: work(piece)):  # type: ignore[misc]
            first = piece.stop
            continue
        reclaim()
        size = max(1, (piece.stop - first) // 2)
        if piece.stop - first == 1:
            if not fits(lambda piece=piece: work(piece)):  # type: ignore[misc]
                lost.append(first)
            first = piece.stop
    return lost
