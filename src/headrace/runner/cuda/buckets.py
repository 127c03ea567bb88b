"""Sizes that graphs are captured for: a step runs in the smallest one that holds it. Pure arithmetic."""

from bisect import bisect_left
from functools import lru_cache

# (up to, in steps of): padding stays below a quarter from 32 rows on. Up to 256 each row takes its time in products of large
# matrices.
_ROW_LADDER = ((64, 8), (256, 16), (512, 64), (1 << 30, 128))
_TOKEN_LADDER = ((256, 64), (512, 128), (1024, 256), (3072, 512), (1 << 30, 1024))
# A small part of a prompt among decode rows should cost them little: no more places than it needs.
_SHARED_LADDER = ((256, 32), (512, 64), *_TOKEN_LADDER)
# A chunk is seldom shorter; a step of more and shorter ones takes a larger bucket.
_CHUNK_TOKENS = 16
_LEAST_CHUNKS = 8


@lru_cache
def row_buckets(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24 and so on up to `most`, which is always one of them."""
    sizes = {size for size in (1, 2, 4) if size < most}
    return tuple(sorted(sizes | set(_climb(8, most, _ROW_LADDER))))


@lru_cache
def token_buckets(most: int, *, shared: bool) -> tuple[int, ...]:
    """64, 128, 192, 256, 384 and so on up to `most`, which is always one of them; some more for steps with decode rows."""
    return _climb(64, most, _SHARED_LADDER if shared else _TOKEN_LADDER)


def chunk_bucket(tokens: int, slots: int) -> int:
    """How many chunks a step of so many tokens has room for."""
    return min(slots, max(_LEAST_CHUNKS, tokens // _CHUNK_TOKENS))


def bucket_for(count: int, buckets: tuple[int, ...]) -> int:
    """The smallest that holds `count`."""
    return buckets[bisect_left(buckets, count)]


def _climb(size: int, most: int, ladder: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    sizes = []
    while size < most:
        sizes.append(size)
        size += next(step for limit, step in ladder if size < limit)
    return (*sizes, most)
