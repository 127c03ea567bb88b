"""Attention over pages, in the interpreter: poisoned outputs are fully written, and free memory may hold NaN."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.runner.cuda.kernels import plain
from headrace.runner.cuda.kernels.decode_attention import DecodeConfig, DecodeScratch, decode_attention, last_config
from headrace.runner.cuda.kernels.fresh_attention import fresh_attention, fresh_rows
from headrace.runner.cuda.kernels.prefill_attention import (
    PrefillConfig,
    PrefillScratch,
    prefill_attention,
    prefill_config,
)
from tests.unit.runner.cuda.kernels.paged import HALF, Paged, paged, relative_error

pytestmark = pytest.mark.unit

TOLERANCE = 2e-3


def ask(rows: int, heads: int, dim: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(seed)).to(HALF)


def decode(held: Paged, q: Tensor, slots: list[int], config: DecodeConfig) -> Tensor:
    rows, heads, dim = q.shape
    kv_heads = held.keys.shape[1]
    out = torch.full_like(q, torch.nan)
    scratch = DecodeScratch.make(rows, heads, kv_heads, dim, config, "cpu")
    scratch.sums.fill_(torch.nan)
    scratch.stats.fill_(torch.nan)
    named = torch.tensor(slots, dtype=torch.int32)
    for _ in range(2):
        # Twice: the first launch leaves nothing behind that would disturb the second.
        decode_attention(out, q, held.keys, held.values, held.tables, named, held.lengths, dim**-0.5, scratch)
    assert not scratch.tickets.any()
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "splits"), [(4, 2, 64, 4), (3, 1, 64, 1), (3, 1, 128, 4)])
def test_decode_reads_its_own_context_and_nothing_else(heads: int, kv_heads: int, dim: int, splits: int) -> None:
    held = paged([1, 37, 70, 16], kv_heads, dim)
    slots = [2, 0, -1, 1, 3]
    q = ask(len(slots), heads, dim)
    got = decode(held, q, slots, DecodeConfig(splits=splits, shortest=32, tile=32))
    want = plain.decode_attention(q, held.keys, held.values, held.tables, torch.tensor(slots), held.lengths, dim**-0.5)
    assert relative_error(got, want) < TOLERANCE
    assert not got[2].any()


def test_the_last_token_of_a_long_prompt_is_not_left_to_few_programs() -> None:
    """Of 256 rows, of which it may be the only one."""
    for context, splits in ((512, 1), (8192, 8), (131072, 16)):
        config = last_config(context)
        assert config.splits == splits and config.least == 1
        stretch = max(-(-context // splits), config.shortest)
        assert -(-context // stretch) == splits


def tiles_of(counts: list[int], tokens: int, padding: int, parts: int) -> Tensor:
    listed = [(chunk, tile) for chunk, count in enumerate(counts) for tile in range(-(-count // tokens))]
    whole = [(*entry, part, parts) for entry in listed[::-1] for part in range(parts)]
    return torch.tensor(whole + [(-1,) * 4] * padding, dtype=torch.int32)


def prefill(
    held: Paged, q: Tensor, slots: list[int], counts: list[int], prior: list[int], rows: int, parts: int = 1
) -> Tensor:
    """Twice where tiles are cut into `parts`: the first launch leaves nothing behind that would disturb the second."""
    heads, dim = q.shape[1:]
    kv_heads = held.keys.shape[1]
    config = PrefillConfig(rows=rows, tile=32, num_warps=4)
    out = torch.full_like(q, torch.nan)
    tiles = tiles_of(counts, config.tokens(heads, kv_heads), 2, parts)
    scratch = PrefillScratch.make(len(tiles), kv_heads, dim, config, "cpu") if parts > 1 else None
    for _ in range(2 if scratch else 1):
        prefill_attention(
            out.fill_(torch.nan),
            q,
            held.keys,
            held.values,
            held.tables,
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            torch.tensor(prior, dtype=torch.int32),
            tiles,
            dim**-0.5,
            config,
            scratch,
        )
    assert scratch is None or not scratch.tickets.any()
    return out


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 64), (2, 2, 128)])
def test_prefill_continues_after_a_cached_prefix(heads: int, kv_heads: int, dim: int, parts: int) -> None:
    """In parts too, of which those at a sequence's begin are empty, and one tile's last row ends where its edge begins."""
    slots, counts, prior = [1, 0, 3, 2, 4], [45, 1, 33, 16, 1], [16, 63, 0, 83, 0]
    held = paged([64, 61, 99, 33, 1], kv_heads, dim)
    q = ask(sum(counts), heads, dim)
    got = prefill(held, q, slots, counts, prior, 32, parts)
    want = plain.prefill_attention(
        q,
        held.keys,
        held.values,
        held.tables,
        torch.tensor(slots),
        torch.tensor([0, *np.cumsum(counts)]),
        torch.tensor(prior),
        dim**-0.5,
    )
    assert relative_error(got, want) < TOLERANCE


@pytest.mark.parametrize("shared_bytes", [99 << 10, 227 << 10])
@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
def test_a_tile_is_no_larger_than_what_a_card_has_room_for(dim: int, shared_bytes: int) -> None:
    """At least the queries and a tile of keys or values for every stage. `benchmarks/gpu/compiled.py` knows exactly."""
    config = prefill_config(dim, shared_bytes)
    assert 2 * dim * (config.rows + config.tile * config.num_stages) <= shared_bytes


def test_prefill_gives_the_same_bits_however_a_sequence_is_cut() -> None:
    held = paged([70], 1, 64)
    q = ask(70, 2, 64)
    whole = prefill(held, q, [0], [70], [0], rows=32)
    cut = [
        prefill(held, q[first:stop], [0], [stop - first], [first], rows=32)
        for first, stop in ((0, 9), (9, 50), (50, 69), (69, 70))
    ]
    assert torch.equal(whole, torch.cat(cut))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 64), (1, 1, 128)])
def test_chunks_that_begin_their_sequences_read_their_own_rows_alone(heads: int, kv_heads: int, dim: int) -> None:
    """One of them is NaN throughout, and so is what follows the last: nobody else sees it, and padding is not written."""
    counts, bad, spare = [70, 5, 1, 129], 1, 3
    tokens, bounds = sum(counts) + spare, [0, *np.cumsum(counts).tolist()]
    q = ask(tokens, heads, dim)
    qkv = ask(tokens, heads + 2 * kv_heads, dim, seed=2)
    qkv[bounds[bad] : bounds[bad + 1]] = torch.nan
    qkv[bounds[-1] :] = torch.nan
    out = torch.full_like(q, torch.nan)
    tile_rows = fresh_rows(heads, kv_heads, 128, q.device)
    offsets = torch.tensor(bounds, dtype=torch.int32)
    fresh_attention(out, q, qkv.view(tokens, -1), offsets, tiles_of(counts, tile_rows, 2, 1), dim**-0.5)
    assert out[bounds[-1] :].isnan().all()
    for chunk in (0, 2, 3):
        own = slice(bounds[chunk], bounds[chunk + 1])
        keys, values = qkv[own, heads : heads + kv_heads], qkv[own, heads + kv_heads :]
        assert relative_error(out[own], plain.attend(q[own], keys, values, 0, dim**-0.5)) < TOLERANCE


def test_only_large_heads_of_cards_that_copy_tiles_are_read_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fresh_rows(32, 8, 128, torch.device("cpu")) == 16
    assert fresh_rows(9, 3, 64, torch.device("cpu")) == 0
    early = "headrace.runner.cuda.kernels.fresh_attention.starts_early"
    monkeypatch.setattr(early, lambda device: True)
    assert fresh_rows(32, 8, 128, torch.device("cuda"), 227 << 10) == 16
    assert fresh_rows(32, 8, 128, torch.device("cuda"), 99 << 10) == 0, "one program needs 104 KiB"
    monkeypatch.setattr(early, lambda device: False)
    assert fresh_rows(32, 8, 128, torch.device("cuda"), 227 << 10) == 0
