"""What a plan becomes before it is sent: buckets, changed words, rows, tokens and tiles."""

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.config import EngineConfig
from headrace.core.errors import MemoryCorrupted
from headrace.core.plan import IntArray, Plan
from headrace.core.request import SamplingParams
from headrace.runner.cuda.buckets import bucket_for, row_buckets, token_buckets
from headrace.runner.cuda.host_slots import HostSlots
from headrace.runner.cuda.layout import HEADER, Layout, LayoutChoice
from headrace.runner.cuda.packet import (
    Laid,
    chunk_packet,
    decode_packet,
    list_tiles,
    mixed_packet,
    padding_packet,
    put_changes,
)
from headrace.runner.cuda.slot_words import SlotWords, is_special, settings
from tests.unit.runner.plans import begin, ints, plan

CONFIG = EngineConfig(slots=6, blocks=64, block_size=4, context_len=64, vocab_size=500)


@pytest.fixture
def slots() -> HostSlots:
    return HostSlots(CONFIG)


def test_buckets_hold_every_row_count_and_pad_little() -> None:
    for most in (1, 2, 5, 8, 32, 33, 256, 1024):
        buckets = row_buckets(most)
        assert buckets[-1] == most and buckets[0] == 1
        for rows in range(1, most + 1):
            held = bucket_for(rows, buckets)
            assert rows <= held
            assert held <= max(8 * -(-rows // 8), 1.25 * rows)
    assert row_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    for shared in (True, False):
        sizes = token_buckets(8192, shared=shared)
        assert sizes[-1] == 8192 and all(bucket_for(size + 1, sizes) <= 1.5 * size + 64 for size in sizes[:-1])
    assert token_buckets(512, shared=True) == (64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def test_every_step_has_a_layout_that_holds_it() -> None:
    choice = LayoutChoice(slots=32, max_tokens=1000, tile_rows=42)
    captured = set(choice.all())
    for decodes, chunks, tokens in ((0, 1, 1000), (31, 1, 40), (0, 8, 64), (5, 27, 64), (0, 32, 32), (0, 1, 1)):
        layout = choice.mixed(decodes, chunks, tokens)
        assert layout.tokens >= tokens and layout.decodes >= decodes and layout.chunks >= chunks
        assert layout.samples >= min(32, decodes + chunks)
        assert layout.tiles >= chunks + tokens // 42
        assert layout in captured
    assert choice.decode(9) == Layout(16, 16) and choice.decode(0) == Layout(1, 1)
    assert {choice.decode(rows) for rows in range(33)} <= captured


def test_steps_of_prompts_that_begin_have_layouts_of_their_own() -> None:
    choice = LayoutChoice(slots=32, max_tokens=1000, tile_rows=42, spread=5, fresh_rows=21, fresh_tokens=256)
    captured = choice.all()
    assert len(set(captured)) == len(captured)
    for chunks, tokens in ((1, 1000), (20, 400), (3, 256), (32, 300)):
        layout = choice.mixed(0, chunks, tokens, fresh=True)
        assert layout.fresh and layout in captured
        assert layout.tokens >= tokens and layout.chunks == layout.rows >= chunks
        assert layout.samples >= chunks and layout.fresh == layout.chunks + -(-layout.tokens // 21) and not layout.tiles
    # With decode rows, or where somebody goes on, there may be tiles of both kinds; short steps have the others alone.
    for layout in (choice.mixed(1, 20, 500, fresh=True), choice.mixed(0, 20, 500)):
        assert layout.fresh >= 20 + 500 // 21 and layout.tiles >= 20 + 500 // 42 and layout in captured
    assert not choice.mixed(0, 1, 190, fresh=True).fresh
    assert not replace(choice, fresh_rows=0).mixed(0, 1, 1000, fresh=True).fresh


def test_sections_begin_at_sixteen_bytes_and_do_not_overlap() -> None:
    layout = Layout(5, 2, 14, 7, 3)
    spans = sorted(layout.sections.values())
    assert all(at % 4 == 0 for at, _ in spans)
    assert all(at + size <= following for (at, size), (following, _) in pairwise(spans))
    assert layout.changes_at == spans[-1][0]
    words = np.full(200, 99, np.int32)
    padding_packet(layout, words)
    slots_at, owners_at = layout.sections["slots"][0], layout.sections["owners"][0]
    assert (
        words[0] == 0
        and (words[slots_at : slots_at + 5] == -1).all()
        and (words[owners_at : owners_at + 14] == -1).all()
    )


def test_a_start_changes_its_slots_words_and_no_others() -> None:
    words = SlotWords(slots=3, width=5)
    state = np.zeros(words.size, np.int32)
    start = begin(1, (4, 5, 6), (40, 41))
    pairs = words.begin(start, vocab_size=500)
    state[pairs[:, 0]] = pairs[:, 1]
    assert len(set(pairs[:, 0].tolist())) == len(pairs)
    assert state[words.tables_at :].reshape(3, 5).tolist() == [[0] * 5, [40, 41, 0, 0, 0], [0] * 5]
    assert state[words.at("last") : words.at("last") + 3].tolist() == [0, 6, 0]
    assert state[words.at("temperature") : words.at("temperature") + 3].view(np.float32).tolist() == [0, 1, 0]
    seeds = state[:6].view(np.int64)
    assert seeds[1] != 0 and seeds[0] == seeds[2] == 0


def test_settings_that_leave_nothing_to_chance_are_greedy() -> None:
    for sampling in (SamplingParams(top_k=1), SamplingParams(top_p=0.0), SamplingParams(temperature=1e-7)):
        assert settings(sampling, 0, 500)[2] == 0
    words = settings(SamplingParams(temperature=0.5, top_k=500, top_p=0.25, min_p=0.125), 0, 500)
    assert words[2:].view(np.float32)[[0, 2, 3]].tolist() == [0.5, 0.25, 0.125]
    assert words[3] == 0


def test_what_the_graph_cannot_sample_is_special() -> None:
    assert not is_special(SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop_ids=(3,)))
    for sampling in (
        SamplingParams(masked=True),
        SamplingParams(logprobs=0),
        SamplingParams(allowed_ids=(1,)),
        SamplingParams(logit_bias=((1, 2.0),)),
        SamplingParams(repetition_penalty=1.1),
    ):
        assert is_special(sampling)


def test_forbidden_stops_make_the_first_tokens_special_alone(slots: HostSlots) -> None:
    """Later ones cost no second look: the graph samples them."""
    patient = replace(begin(1, range(8), (1, 2, 3)), sampling=SamplingParams(min_tokens=3))
    ruled = replace(begin(2, range(8), (4, 5, 6)), sampling=SamplingParams(logprobs=0))
    slots.update(plan(0, begun=[begin(0, range(8), (7, 8)), patient, ruled]))
    for place, special in ((8, [False, True, True]), (10, [False, True, True]), (11, [False, False, True])):
        assert slots.is_special(ints([0, 1, 2]), ints([place] * 3)).tolist() == special


def test_growth_follows_the_blocks_a_slot_has(slots: HostSlots) -> None:
    slots.update(plan(0, begun=[begin(2, range(8), (7, 8)), begin(4, range(3), (9,))]))
    pairs = slots.update(plan(1, grown=[(2, 20), (4, 21), (2, 22)]))
    width, at = slots.words.width, slots.words.tables_at
    assert pairs.tolist() == [[at + 2 * width + 2, 20], [at + 4 * width + 1, 21], [at + 2 * width + 3, 22]]
    assert slots.num_blocks.tolist() == [0, 0, 4, 0, 2, 0]


def test_no_address_is_changed_twice(slots: HostSlots) -> None:
    """A slot that was given away twice in one plan belongs to the second."""
    made = plan(0, begun=[begin(1, (1, 2), (5,), number=1), begin(1, (3, 4, 5), (6,), number=2)], grown=[(1, 7)])
    pairs = slots.update(made)
    assert len(set(pairs[:, 0].tolist())) == len(pairs)
    assert slots.known[1] == 3


def test_more_blocks_than_the_context_holds_are_refused(slots: HostSlots) -> None:
    with pytest.raises(MemoryCorrupted, match="more than the context"):
        slots.update(plan(0, begun=[begin(0, (1,), range(40))]))
    slots.update(plan(1, begun=[begin(0, (1,), range(18))]))
    with pytest.raises(MemoryCorrupted, match="more than the context"):
        slots.update(plan(2, grown=[(0, 60)]))


def test_a_decode_packet_has_the_longest_rows_first_and_is_padded_to_its_bucket() -> None:
    words = np.full(64, 99, np.int32)
    layout = Layout(4, 4)
    laid = decode_packet(plan(0, [(5, 9, 1, True), (0, 1, 1, True), (2, 30, 1, True)]), layout, words)
    assert words[HEADER : layout.changes_at].tolist() == [2, 5, 0, -1, 31, 10, 2, 1]
    assert laid.layout is layout and laid.sampling.tolist() == [2, 0, 1]
    assert laid.firsts.tolist() == [1, 2, 0] and not len(laid.chunks)
    end = put_changes(words, layout.changes_at, np.array([[3, 4], [5, 6]], np.int32))
    assert words[0] == 2 and words[layout.changes_at : end].tolist() == [3, 4, 5, 6]


def _sections(made: Plan, slots: HostSlots) -> tuple[Laid, dict[str, list[int]]]:
    """With a layout of 16 tokens, which has room for all rows of both kinds."""
    words: IntArray = np.full(400, 99, np.int32)
    laid = mixed_packet(made, slots, LayoutChoice(slots=6, max_tokens=16, tile_rows=4), words)
    assert laid.layout.tokens == 16
    return laid, {name: words[at : at + size].tolist() for name, (at, size) in laid.layout.sections.items()}


def test_decode_rows_come_first_and_chunks_bring_their_ids(slots: HostSlots) -> None:
    """Decode rows, and samples of both, longest first."""
    begun = [begin(slot, range(10 * slot, 10 * slot + 9), (1, 2, 3)) for slot in range(1, 5)]
    slots.update(plan(0, begun=[begin(0, range(5), (1, 2, 3)), *begun]))
    made = plan(1, [(1, 2, 5, False), (0, 4, 1, True), (2, 3, 6, True), (4, 4, 1, False), (3, 20, 1, True)])
    laid, part = _sections(made, slots)
    assert part["slots"] == [3, 0, -1, -1, -1, -1, 1, 2, 4, -1, -1, -1]
    assert part["ends"] == [21, 5, 1, 1, 1, 1, 7, 9, 5, 1, 1, 1]
    assert part["ids"] == [-1, -1, 12, 13, 14, 15, 16, 23, 24, 25, 26, 27, 28, 44, 0, 0]
    assert part["positions"] == [20, 4, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8, 4, 0, 0]
    assert part["owners"] == [0, 1, *[6] * 5, *[7] * 6, 8, -1, -1]
    assert part["offsets"] == [2, 7, 13, 14, 14, 14, 14]
    assert part["prior"] == [2, 3, 4, 0, 0, 0]
    entries = [tuple(part["tiles"][at : at + 4]) for at in range(0, len(part["tiles"]), 4)]
    tiles = [entry[:2] for entry in entries]
    assert {entry[2:] for entry in entries[:5]} == {(0, 1)}
    assert sorted(tiles[:5]) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)] and set(tiles[5:]) == {(-1, -1)}
    assert tiles[0] == (1, 1)
    assert part["places"][:3] == [0, 12, 1]
    assert part["sampled"] == [3, 2, 0, -1, -1, -1]
    assert laid.sampling.tolist() == [4, 2, 1]
    assert laid.chunks.tolist() == [0, 2, 3]
    assert laid.firsts.tolist() == [2, 1, 7, 13, 0]


@pytest.mark.parametrize("fresh_tokens", [16, 512])
def test_a_chunk_alone_is_laid_out_as_among_others(fresh_tokens: int) -> None:
    config = EngineConfig(slots=6, blocks=600, block_size=4, context_len=2048, vocab_size=5000, max_step_tokens=1024)
    slots, chance = HostSlots(config), np.random.default_rng(fresh_tokens)
    choice = LayoutChoice(6, 1024, tile_rows=32, spread=4, fresh_rows=16, fresh_tokens=fresh_tokens)
    for step in range(60):
        slot, length = int(chance.integers(6)), int(chance.integers(2, 1500))
        start = begin(slot, range(length), range(-(-length // 4)))
        if step % 5 == 0:
            start = replace(start, sampling=replace(start.sampling, prompt_logprobs=1))
        slots.update(plan(2 * step, begun=[start]))
        at = 0 if step % 3 == 0 else int(chance.integers(length - 1))
        count = min(int(chance.integers(1, 1025)), length - at)
        made = plan(2 * step + 1, [(slot, at, count, at + count == length)])
        words = [np.full(9000, 99, np.int32) for _ in range(2)]
        one, other = chunk_packet(made, slots, choice, words[0]), mixed_packet(made, slots, choice, words[1])
        assert one.layout == other.layout
        for name in ("sampling", "chunks", "firsts"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
        assert (words[0] == words[1]).all()


def test_chunks_that_begin_have_tiles_of_their_own(slots: HostSlots) -> None:
    slots.update(plan(0, begun=[begin(slot, range(9), (1, 2, 3)) for slot in range(4)]))
    made = plan(1, [(0, 0, 7, False), (1, 8, 1, True), (2, 2, 3, False), (3, 0, 2, False)])
    choice = LayoutChoice(slots=6, max_tokens=16, tile_rows=2, fresh_rows=4, fresh_tokens=16)
    words = np.full(400, 99, np.int32)
    layout = mixed_packet(made, slots, choice, words).layout
    part = {
        name: words[at : at + size].reshape(-1, 4).tolist()
        for name, (at, size) in layout.sections.items()
        if name in ("tiles", "fresh")
    }
    assert [tile for tile in part["fresh"] if tile[0] >= 0] == [[0, 1, 0, 1], [0, 0, 0, 1], [2, 0, 0, 1]]
    assert [tile for tile in part["tiles"] if tile[0] >= 0] == [[1, 1, 0, 1], [1, 0, 0, 1]]
    assert part["fresh"][3:] == [[-1] * 4] * (layout.fresh - 3) and part["tiles"][2:] == [[-1] * 4] * (layout.tiles - 2)


def test_few_tiles_with_much_before_them_are_cut_to_fill_the_card() -> None:
    """Longest first, the parts of a tile one after the other; room for them is in every layout."""
    entries = list_tiles(ints([64, 20]), ints([60_000, 500]), tile_rows=32, spread=16)
    assert entries[:, :2].tolist() == [[0, 1]] * 8 + [[0, 0]] * 8 + [[1, 0]]
    assert entries[:8, 2:].tolist() == [[part, 8] for part in range(8)]
    assert entries[-1].tolist() == [1, 0, 0, 1]
    for counts, prior, spread in (([64], [60_000], 0), ([2048], [60_000], 16), ([64], [1500], 16), ([9], [0], 16)):
        assert set(list_tiles(ints(counts), ints(prior), 32, spread)[:, 3].tolist()) == {1}
    # Parts of one length: the tile that is half as far along is cut as well.
    deep = list_tiles(ints([64, 20]), ints([60_000, 29_900]), 32, 16)
    assert [int(count) for count in deep[:, 3]] == [6] * 12 + [3] * 3
    # Nine tiles fill half a card: cut into five each, they fill it three times.
    assert set(list_tiles(ints([9 * 32]), ints([60_000]), 32, 16)[:, 3].tolist()) == {5}
    choice = LayoutChoice(slots=32, max_tokens=2048, tile_rows=32, spread=16)
    chance = np.random.default_rng(5)
    for _ in range(300):
        chunks = int(chance.integers(1, 9))
        tokens, before = chance.integers(1, 200, chunks).tolist(), chance.integers(0, 130_000, chunks).tolist()
        entries = list_tiles(ints(tokens), ints(before), 32, 16)
        assert len(entries) <= choice.mixed(0, chunks, sum(tokens)).tiles
        # What is cut comes first, where scratch has room for it.
        parts = entries[:, 3]
        assert (parts[3 * 16 :] == 1).all() and (np.diff((parts > 1).astype(int)) <= 0).all()


def test_chunks_alone_have_no_room_for_decode_rows(slots: HostSlots) -> None:
    slots.update(plan(0, begun=[begin(slot, range(9), (1, 2, 3)) for slot in range(3)]))
    laid, part = _sections(plan(1, [(0, 0, 8, False), (1, 0, 8, False)]), slots)
    assert laid.layout.decodes == 0
    assert part["slots"][:2] == [0, 1]
    assert set(part["sampled"]) == {-1}


def test_a_row_without_ids_or_blocks_is_found_before_it_runs(slots: HostSlots) -> None:
    slots.update(plan(0, begun=[begin(0, range(9), (1, 2, 3))]))
    slots.check(plan(1, [(0, 0, 9, True)]))
    for row in ((0, 0, 10, True), (0, 12, 1, True), (0, 9, 1, True)):
        with pytest.raises(MemoryCorrupted, match="no block or no id"):
            slots.check(plan(1, [row]))
    for row in ((0, 0, 9, False), (0, 0, 8, True), (0, 9, 0, True), (0, 5, 0, False)):
        with pytest.raises(MemoryCorrupted, match="must sample exactly where its ids end, at position 8"):
            slots.check(plan(1, [row]))
    slots.note_samples(plan(1, [(0, 0, 9, True)]))
    slots.check(plan(2, [(0, 9, 1, True)]))
    with pytest.raises(MemoryCorrupted, match="no block or no id"):
        slots.check(plan(2, [(0, 10, 1, True)]))
    assert slots.fed_by_device(plan(2, [(0, 8, 1, True), (0, 9, 1, True), (0, 7, 1, False)])).tolist() == [
        True,
        True,
        False,
    ]


def test_failures_are_the_occupants_own(slots: HostSlots) -> None:
    slots.update(plan(0, begun=[begin(0, (1,), (1,)), begin(1, (1,), (2,))]))
    slots.update(plan(1, begun=[begin(1, (1,), (3,))]))
    slots.note_failures(plan(0, [(0, 0, 1, True), (1, 0, 1, True)]), np.array([1, 1], np.uint8))
    assert slots.failed[:2].tolist() == [1, 0]
    assert ints([0]).dtype == slots.num_blocks.dtype
