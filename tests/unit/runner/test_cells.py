"""The cell store and its arithmetic."""

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.core.errors import InvalidInput, MemoryCorrupted
from headrace.runner.cells import FACTOR, MASK_64, ROOT, CellArray, CellStore, Chain, IndexArray, mix, mix_int


def blocks(*numbers: int) -> IndexArray:
    return np.array(numbers, np.int64)


def terms(ids: NDArray[np.int32]) -> CellArray:
    return mix(ids.astype(np.uint64) + np.uint64(1))


def filled_store() -> CellStore:
    store = CellStore(4, 4)
    store.give(blocks(1, 2), number=9)
    store.values[4:12] = np.arange(100, 108)
    store.states[4:10] = 2
    return store


def test_mix_of_an_array_equals_mix_of_its_numbers() -> None:
    values = [0, 1, 2**63, MASK_64, ROOT]
    assert mix(np.array(values, np.uint64)).tolist() == [mix_int(value) for value in values]


def test_mix_int_takes_numbers_of_any_size() -> None:
    assert mix_int(-1) == mix_int(MASK_64) == mix_int(2**65 - 1)


@pytest.mark.parametrize("count", [1, 2, 3, 100, 5000])
def test_a_chunk_equals_the_recurrence(count: int) -> None:
    ids = np.arange(count, dtype=np.int32) * 7 % 501
    expected, prev = [], ROOT
    for token in ids.tolist():
        prev = (prev * FACTOR + mix_int(token + 1)) & MASK_64
        expected.append(prev)
    assert Chain().extend(ROOT, terms(ids)).tolist() == expected


def test_a_chain_may_be_cut_anywhere() -> None:
    chain, mixed = Chain(), terms(np.arange(50, dtype=np.int32))
    whole = chain.extend(ROOT, mixed)
    assert chain.extend(int(whole[19]), mixed[20:]).tolist() == whole[20:].tolist()


def test_a_block_is_poison_until_given_and_after_it_is_freed() -> None:
    store = CellStore(4, 4)
    assert store.state_name(4) == "poison"
    store.give(blocks(1), number=0)
    assert store.state_name(4) == "unwritten"
    store.poison(blocks(1))
    assert store.state_name(4) == "poison"


def test_a_block_is_written_only_when_all_its_cells_are() -> None:
    store = filled_store()
    assert store.first_unwritten(blocks(1)) is None
    assert store.first_unwritten(blocks(1, 2)) == 1


@pytest.mark.parametrize("bad", [-1, 4, 5, 100])
def test_a_block_that_does_not_exist_is_refused(bad: int) -> None:
    store = CellStore(4, 4)
    with pytest.raises(MemoryCorrupted, match=f"block {bad} does not exist"):
        store.give(blocks(0, bad), number=0)
    with pytest.raises(MemoryCorrupted, match=f"block {bad} does not exist"):
        store.poison(blocks(bad))


def test_exported_blocks_come_back_elsewhere() -> None:
    payload = filled_store().export([1, 2])
    other = CellStore(8, 4)
    other.load([6, 3], payload)
    assert other.block_cells(blocks(6, 3)).tolist() == list(range(100, 108))
    assert [other.state_name(cell) for cell in (24, 12, 14)] == ["written", "written", "unwritten"]


def test_nobody_exports_a_block_that_belongs_to_nobody() -> None:
    with pytest.raises(MemoryCorrupted, match="block 3"):
        filled_store().export([1, 3])


def test_an_import_over_written_cells_is_refused() -> None:
    store = filled_store()
    with pytest.raises(MemoryCorrupted, match="over cells that are written"):
        store.load([1, 3], store.export([1, 2]))


@pytest.mark.parametrize(
    ("chosen", "spoil"),
    [
        ([3], lambda payload: payload),
        ([0, 3], lambda payload: payload[:-1]),
        ([0, 3], lambda payload: payload + b"\0"),
        ([0, 3], lambda payload: b"x" + payload[1:]),
        ([0, 3], lambda payload: b""),
    ],
)
def test_a_payload_of_the_wrong_size_is_refused(chosen: list[int], spoil: object) -> None:
    payload = filled_store().export([1, 2])
    assert callable(spoil)
    with pytest.raises(InvalidInput) as caught:
        CellStore(4, 4).load(chosen, spoil(payload))
    assert caught.value.param == "payload"


def test_a_payload_of_another_block_size_is_refused() -> None:
    with pytest.raises(InvalidInput, match="2 blocks of 4 cells, expected 2 of 8"):
        CellStore(4, 8).load([0, 1], filled_store().export([1, 2]))
