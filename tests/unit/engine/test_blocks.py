"""The block pool: who holds what, what is found again, and a check that misses nothing."""

from collections.abc import Callable

import pytest

from headrace.engine.blocks import BlockPool

KEYS = [bytes([index]) * 4 for index in range(16)]


def accounts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_used, pool.num_cached


def cached_pool(total: int, count: int) -> BlockPool:
    """Blocks 0 .. count - 1 are cached under KEYS, the last of them oldest."""
    pool = BlockPool(total)
    blocks = pool.allocate(count)
    for block in blocks:
        pool.publish(block, KEYS[block])
    pool.release(blocks)
    return pool


def test_a_new_pool_is_free_and_hands_out_each_block_once() -> None:
    pool = BlockPool(4)
    assert accounts(pool) == (4, 0, 0)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert accounts(pool) == (0, 4, 0) and pool.num_available == 0


def test_what_is_released_unpublished_is_free_and_used_again_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.release([first, second])
    assert accounts(pool) == (4, 0, 0)
    assert pool.allocate(1) == [first]


def test_more_than_is_available_cannot_be_allocated() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks asked, 1 available"):
        pool.allocate(2)


def test_a_published_block_is_cached_when_released_and_found_again() -> None:
    pool = cached_pool(4, 2)
    assert accounts(pool) == (2, 0, 2) and pool.num_available == 4
    assert pool.find(KEYS[:2]) == [0, 1]
    pool.share([0, 1])
    assert accounts(pool) == (2, 2, 0)
    pool.check([0, 1])


def test_only_the_longest_prefix_is_found() -> None:
    pool = cached_pool(4, 3)
    assert pool.find([KEYS[0], KEYS[9], KEYS[2]]) == [0]
    assert pool.find([KEYS[9], KEYS[0]]) == []
    assert pool.find([]) == []


def test_free_blocks_go_before_cached_ones() -> None:
    pool = cached_pool(4, 2)
    assert sorted(pool.allocate(2)) == [2, 3]
    assert pool.num_cached == 2


def test_the_oldest_cached_block_is_evicted_first_and_a_start_outlives_its_end() -> None:
    pool = cached_pool(3, 3)
    assert pool.allocate(1) == [2]
    assert pool.find(KEYS[:3]) == [0, 1]
    assert pool.allocate(1) == [1]
    assert pool.find(KEYS[:3]) == [0]
    pool.check([2, 1])


def test_use_makes_a_cached_block_young_again() -> None:
    pool = cached_pool(3, 3)
    pool.share([2])
    pool.release([2])
    assert pool.allocate(2) == [1, 0]
    assert pool.find([KEYS[2]]) == [2]


def test_a_shared_block_stays_until_its_last_holder_leaves() -> None:
    pool = cached_pool(2, 1)
    pool.share([0])
    pool.share([0])
    pool.release([0])
    assert accounts(pool) == (1, 1, 0)
    pool.release([0])
    assert accounts(pool) == (1, 0, 1)


def test_sharing_takes_only_idle_blocks_from_what_is_available() -> None:
    pool = cached_pool(4, 3)
    pool.share([0])
    assert pool.num_idle([0, 1, 2]) == 2
    before = pool.num_available
    pool.share([0, 1, 2])
    assert pool.num_available == before - 2


def test_an_unpublished_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="not published"):
        pool.share([block])


def test_a_key_stays_with_the_block_that_had_it_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.publish(first, KEYS[0])
    pool.publish(second, KEYS[0])
    pool.release([first, second])
    assert pool.find([KEYS[0]]) == [first]
    assert accounts(pool) == (3, 0, 1)


def test_a_block_keeps_the_key_it_was_published_under_first() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, KEYS[0])
    pool.publish(block, KEYS[1])
    assert pool.find([KEYS[0]]) == [block] and pool.find([KEYS[1]]) == []


def test_nobody_publishes_what_nobody_holds() -> None:
    with pytest.raises(AssertionError, match="nobody holds it"):
        BlockPool(2).publish(0, KEYS[0])


def test_a_block_is_released_as_often_as_it_was_taken() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(blocks)


def test_clearing_the_cache_frees_what_is_idle_and_leaves_what_is_used() -> None:
    pool = cached_pool(4, 3)
    pool.share([1])
    assert pool.clear_cache() == 3
    assert accounts(pool) == (3, 1, 0) and pool.find(KEYS[:1]) == []
    pool.check([1])
    pool.release([1])
    assert accounts(pool) == (4, 0, 0)


def test_freed_blocks_are_told_once_and_only_those_still_free() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.release(blocks)
    again = pool.allocate(1)
    assert sorted(pool.take_freed()) == sorted(set(blocks) - set(again))
    assert pool.take_freed() == []


def test_a_cached_block_is_not_told_as_freed() -> None:
    pool = cached_pool(4, 2)
    assert pool.take_freed() == []
    pool.clear_cache()
    assert sorted(pool.take_freed()) == [0, 1]


def test_a_block_freed_and_then_cached_is_not_told_as_freed() -> None:
    """Else the runner would poison a block that can be found."""
    pool = BlockPool(1)
    pool.release(pool.allocate(1))
    pool.publish(pool.allocate(1)[0], KEYS[0])
    pool.release([0])
    assert pool.num_cached == 1 and pool.take_freed() == []


def test_a_sound_pool_passes_its_check() -> None:
    pool = cached_pool(6, 2)
    blocks = pool.allocate(2)
    pool.share([0])
    pool.check([*blocks, 0])


def _lost_reference(pool: BlockPool) -> None:
    pool._references[1] += 1


def _torn_forward(pool: BlockPool) -> None:
    first = pool._next[pool.total]
    pool._next[first] = pool._next[pool._next[first]]


def _torn_backward(pool: BlockPool) -> None:
    pool._previous[pool._next[pool.total]] = 0


def _loop(pool: BlockPool) -> None:
    first = pool._next[pool.total]
    pool._next[first] = first
    pool._previous[first] = first


def _wrong_length(pool: BlockPool) -> None:
    pool.num_available += 1


def _wrong_cached(pool: BlockPool) -> None:
    pool._num_cached += 1


def _lying_index(pool: BlockPool) -> None:
    pool._block_of[KEYS[0]] = 1


def _missing_index(pool: BlockPool) -> None:
    """A published block that is used and cannot be found."""
    del pool._block_of[KEYS[0]]


@pytest.mark.parametrize(
    "corrupt",
    [
        _lost_reference,
        _torn_forward,
        _torn_backward,
        _loop,
        _wrong_length,
        _wrong_cached,
        _lying_index,
        _missing_index,
    ],
)
def test_the_check_finds_every_corruption(corrupt: Callable[[BlockPool], None]) -> None:
    pool = cached_pool(6, 2)
    pool.share([0])
    pool.check([0])
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check([0])


@pytest.mark.parametrize("held", [[], [0, 0], [0, 1], [1]])
def test_the_check_finds_who_says_to_hold_more_or_less_than_he_does(held: list[int]) -> None:
    pool = BlockPool(4)
    assert pool.allocate(1) == [0]
    with pytest.raises(AssertionError, match="references differ"):
        pool.check(held)
