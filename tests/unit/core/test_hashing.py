"""The prefix chain: equal hash, equal KV; everything the KV depends on is in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.hashing import chain_blocks, chain_root

ROOT = chain_root(salt=b"s", version="m@1")
IDS = tuple(range(12))


def test_the_root_covers_everything_kv_depends_on() -> None:
    roots = [
        ROOT,
        chain_root(salt=b"t", version="m@1"),
        chain_root(salt=b"s", version="m@2"),
        chain_root(salt=b"s", version="m@1", adapter="x"),
        chain_root(salt=b"s", version="m@1", kv_dtype="x"),
        chain_root(salt=b"s", version="m@1", images=[b"x"]),
        chain_root(salt=b"s", version="m@1", images=[b"x", b"y"]),
        chain_root(salt=b"s", version="m@1", images=[b"y", b"x"]),
    ]
    assert len(set(roots)) == len(roots)


def test_where_one_part_of_the_root_ends_matters() -> None:
    assert chain_root(salt=b"ab", version="c") != chain_root(salt=b"a", version="bc")
    assert chain_root(salt=b"s", version="v", images=[b"ab"]) != chain_root(salt=b"s", version="v", images=[b"a", b"b"])


def test_the_chain_covers_order_and_everything_before() -> None:
    whole = chain_blocks(ROOT, IDS, 4)
    assert chain_blocks(ROOT, (1, 0, *IDS[2:]), 4)[2] != whole[2]
    assert chain_blocks(ROOT, (99, *IDS[1:]), 4)[1:] != whole[1:]
    assert chain_blocks(chain_root(salt=b"t", version="m@1"), IDS, 4)[0] != whole[0]
    assert chain_blocks(ROOT, (*IDS[:8], *IDS[:4]), 4)[0] != chain_blocks(ROOT, (*IDS[:8], *IDS[:4]), 4)[2]


@pytest.mark.parametrize(("length", "full"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_only_full_blocks_have_a_hash(length: int, full: int) -> None:
    assert chain_blocks(ROOT, IDS[:length], 4) == chain_blocks(ROOT, IDS, 4)[:full]


def test_where_blocks_end_matters() -> None:
    assert not set(chain_blocks(ROOT, IDS, 4)) & set(chain_blocks(ROOT, IDS, 2))
    assert not set(chain_blocks(ROOT, IDS, 4)) & set(chain_blocks(ROOT, IDS[1:], 4))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 8))
def test_one_block_at_a_time_gives_the_same_chain(ids: list[int], size: int) -> None:
    hashes: list[bytes] = []
    for start in range(0, len(ids) - size + 1, size):
        hashes += chain_blocks(hashes[-1] if hashes else ROOT, ids[start : start + size], size)
    assert chain_blocks(ROOT, ids, size) == tuple(hashes)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_hashes_agree_exactly_as_far_as_whole_blocks_do(left: list[int], right: list[int]) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    pairs = list(zip(chain_blocks(ROOT, left, 3), chain_blocks(ROOT, right, 3), strict=False))
    assert [a == b for a, b in pairs] == [3 * (index + 1) <= common for index in range(len(pairs))]
