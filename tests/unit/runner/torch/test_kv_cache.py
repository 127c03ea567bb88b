"""Blocks of keys and values on the processor: whose they are not any more, and who may have them elsewhere."""

import pytest
import torch

from headrace.core.errors import InvalidInput
from headrace.runner.cuda.kv_pool import KvPool
from headrace.runner.torch.kv_cache import KvCache
from headrace.weights.shape import ModelShape
from tests.pages import mapping_flags

pytestmark = pytest.mark.unit

SHAPE = ModelShape("llama", 64, 3, 4, 2, 16, 96, 100, 512, 1e-5, 1e4, tied_embeddings=True)


def test_under_poison_what_is_released_may_not_be_read_and_the_padding_may() -> None:
    cache = KvCache(SHAPE, 5, 8, poison=True)
    assert cache.cells[:5].isnan().all() and not cache.cells[5].any()
    cache.cells[:5] = 1.0
    cache.release([1, 3])
    assert [bool(cache.cells[block].isnan().all()) for block in range(6)] == [False, True, False, True, False, False]
    assert (cache.cells[[0, 2, 4]] == 1.0).all()
    cache.clear([3])
    assert not cache.cells[3].any() and cache.cells[1].isnan().all()


def test_all_layers_of_a_block_lie_together() -> None:
    """A few tokens need a few of the system's pages, which may be large."""
    cache = KvCache(SHAPE, 5, 8)
    cache.write(torch.arange(cache.lines_per_block * 8), torch.ones(8 * SHAPE.num_layers, 4, 16))
    assert (cache.cells[0] == 1.0).all() and not cache.cells[1:].any()


def test_large_pages_are_not_asked_for() -> None:
    cache = KvCache(SHAPE, 1_500, 16)
    assert cache.cells.numel() * 4 > 8 << 20
    assert "hg" not in mapping_flags(cache.cells.data_ptr() + (4 << 20))


def test_a_card_and_a_processor_refuse_each_others_blocks() -> None:
    """Of one size and dtype, in another order."""
    ours, theirs = KvCache(SHAPE, 5, 8), KvPool(SHAPE, 5, 8, torch.device("cpu"), torch.float32)
    payload = ours.export([2, 4])
    assert len(payload) == len(theirs.export([2, 4]))
    with pytest.raises(InvalidInput, match="kind of device"):
        theirs.load([0, 1], payload)
    with pytest.raises(InvalidInput, match="kind of device"):
        ours.load([0, 1], theirs.export([2, 4]))
