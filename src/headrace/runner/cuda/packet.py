"""A plan written into a packet: what one step sends to the device, in one run of int32 words.

All of it is arithmetic over whole arrays, but for a look at each chunk. What a layout has room for and the plan does not
fill is padding: slot -1, owner -1, tile -1, without effect.
"""

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.core.plan import IntArray, Plan
from headrace.runner.cuda.host_slots import HostSlots
from headrace.runner.cuda.layout import MOST_ROUNDS, Layout, LayoutChoice

# In positions read (measured on an H200): what is shorter is not cut, what a program costs besides, and what merging does.
_LEAST_PART, _START, _MERGE = 1024, 512, 128


@dataclass(slots=True, frozen=True)
class Laid:
    """A plan laid out. `sampling` are its rows that sample, in the order of the samples, `chunks` its rows that are chunks,
    in the order of the layout's; `firsts` say where the tokens of each of its rows begin."""

    layout: Layout
    sampling: NDArray[np.intp]
    chunks: NDArray[np.intp]
    firsts: NDArray[np.intp]


def decode_packet(plan: Plan, layout: Layout, words: IntArray) -> Laid:
    """Rows of a step in which every row is fed by the device."""
    order = longest_first(plan.starts)
    part = _parts(layout, words)
    _head(part["slots"], plan.slots[order], -1)
    _head(part["ends"], plan.starts[order] + 1, 1)
    return Laid(layout, order, order[:0], _by_row(order, np.arange(len(order))))


def chunk_packet(plan: Plan, slots: HostSlots, choice: LayoutChoice, words: IntArray) -> Laid:
    """As `mixed_packet` of a step that is one chunk, in half of its time: a prompt that comes alone waits for it."""
    slot, start, count = int(plan.slots[0]), int(plan.starts[0]), int(plan.counts[0])
    layout = choice.mixed(0, 1, count, fresh=not start)
    if slots.prompt_alternatives[slot] >= 0:
        layout = replace(layout, whole=True)
    part = _parts(layout, words)
    _put_chunk(part, slots, 0, slot, start, start + count, 0)
    _pad_tokens(part, count)
    _put_tiles(part, choice, plan.counts, plan.starts)
    samples = bool(plan.samples[0])
    ones = (("slots", slot, -1), ("ends", start + count, 1), ("offsets", 0, count), ("prior", start, 0))
    sampled = (("places", count - 1, 0), ("sampled", slot, -1)) if samples else (("places", 0, 0), ("sampled", -1, -1))
    for name, value, padding in (*ones, *sampled):
        part[name][0] = value
        part[name][1:] = padding
    alone = np.zeros(1, np.intp)
    return Laid(layout, alone[: int(samples)], alone, alone)


def mixed_packet(plan: Plan, slots: HostSlots, choice: LayoutChoice, words: IntArray) -> Laid:
    """Rows, tokens, tiles and samples of any step."""
    fed = slots.fed_by_device(plan)
    decodes = np.flatnonzero(fed)
    decodes = decodes[longest_first(plan.starts[decodes])]
    chunks = np.flatnonzero(~fed)
    order = np.concatenate((decodes, chunks))
    row_slots, starts, counts = plan.slots[order], plan.starts[order], plan.counts[order]
    ends = starts + counts
    tokens, num_decodes, num_chunks = int(counts.sum()), len(decodes), len(chunks)
    layout = choice.mixed(num_decodes, num_chunks, tokens, fresh=not starts[num_decodes:].any())
    if (slots.prompt_alternatives[row_slots] >= 0).any():
        layout = replace(layout, whole=True)
    part = _parts(layout, words)
    firsts = np.cumsum(counts) - counts
    rows = np.concatenate((np.arange(num_decodes), np.arange(layout.decodes, layout.decodes + num_chunks)))
    _fill(part["slots"], -1, rows, row_slots)
    _fill(part["ends"], 1, rows, ends)
    part["ids"][:num_decodes] = -1
    part["positions"][:num_decodes] = starts[:num_decodes]
    part["owners"][:num_decodes] = rows[:num_decodes]
    described = (column[num_decodes:].tolist() for column in (firsts, row_slots, starts, ends, rows))
    for chunk in zip(*described, strict=True):
        _put_chunk(part, slots, *chunk)
    _pad_tokens(part, tokens)
    _head(part["offsets"], np.append(firsts[num_decodes:], tokens), tokens)
    _head(part["prior"], starts[num_decodes:], 0)
    _put_tiles(part, choice, counts[num_decodes:], starts[num_decodes:])
    places = np.flatnonzero(plan.samples[order])
    places = places[longest_first(ends[places])]
    _head(part["places"], (firsts + counts - 1)[places], 0)
    _head(part["sampled"], row_slots[places], -1)
    return Laid(layout, order[places], chunks, _by_row(order, firsts))


def _put_chunk(
    part: dict[str, IntArray], slots: HostSlots, first: int, slot: int, start: int, end: int, row: int
) -> None:
    """Its tokens, from `first` on."""
    held = slice(first, first + end - start)
    part["ids"][held] = slots.ids[slot, start:end]
    part["positions"][held] = np.arange(start, end, dtype=np.int32)
    part["owners"][held] = row


def _pad_tokens(part: dict[str, IntArray], tokens: int) -> None:
    for name, padding in (("ids", 0), ("positions", 0), ("owners", -1)):
        part[name][tokens:] = padding


def _put_tiles(part: dict[str, IntArray], choice: LayoutChoice, counts: IntArray, prior: IntArray) -> None:
    """Of chunks that begin, where the layout has room for them apart, and of the others."""
    is_fresh = (prior == 0) & (len(part["fresh"]) > 0)
    kinds = (("fresh", is_fresh, choice.fresh_rows, 0), ("tiles", ~is_fresh, choice.tile_rows, choice.spread))
    for name, is_kind, tile_rows, spread in kinds:
        if len(part[name]):
            tiles = list_tiles(np.where(is_kind, counts, 0), prior, tile_rows, spread)
            _head(part[name], tiles.reshape(-1), -1)


def _by_row(order: NDArray[np.intp], values: NDArray[np.intp]) -> NDArray[np.intp]:
    """By the plan's rows what is in the packet's order."""
    found = np.empty_like(order)
    found[order] = values
    return found


def longest_first(starts: IntArray) -> NDArray[np.intp]:
    """The order of rows or tiles at these positions: attention begins with those that read most, so that none is late."""
    return np.argsort(-starts, kind="stable")


def padding_packet(layout: Layout, words: IntArray) -> None:
    """Nothing but padding, and no changes."""
    for name, part in _parts(layout, words).items():
        part[:] = {"ends": 1, "ids": 0, "positions": 0, "offsets": 0, "prior": 0, "places": 0}.get(name, -1)
    words[0] = 0


def put_changes(words: IntArray, at: int, pairs: IntArray) -> int:
    """The changed words after everything else; returns how many words the packet has."""
    words[0] = len(pairs)
    words[at : at + 2 * len(pairs)] = pairs.reshape(-1)
    return at + 2 * len(pairs)


def _parts(layout: Layout, words: IntArray) -> dict[str, IntArray]:
    return {name: words[at : at + size] for name, (at, size) in layout.sections.items()}


def _fill(part: IntArray, padding: int, places: NDArray[np.intp], values: IntArray) -> None:
    part[:] = padding
    part[places] = values


def _head(part: IntArray, values: NDArray[np.signedinteger], padding: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = padding


def list_tiles(counts: IntArray, prior: IntArray, tile_rows: int, spread: int) -> IntArray:
    """[m, 4]: chunk, which `tile_rows` of its tokens, and which part of how many of what they read; those that read most
    come first. Those that are few are cut into parts; a card computes `spread` of them at once."""
    each = -(-counts // tile_rows)
    chunk = np.repeat(np.arange(len(counts), dtype=np.int32), each)
    tile = np.arange(len(chunk), dtype=np.int32) - (np.cumsum(each) - each).astype(np.int32)[chunk]
    before = prior[chunk] + tile * np.int32(tile_rows)
    order = longest_first(before)
    parts = _parts_of(before[order], spread)
    entry = order if parts is None else np.repeat(order, parts)
    listed = np.empty((len(entry), 4), np.int32)
    listed[:, 0] = chunk[entry]
    listed[:, 1] = tile[entry]
    listed[:, 2:] = 0, 1
    if parts is not None:
        listed[:, 2] = np.arange(len(entry)) - np.repeat(np.cumsum(parts) - parts, parts)
        listed[:, 3] = np.repeat(parts, parts)
    return listed


def _parts_of(before: IntArray, spread: int) -> NDArray[np.intp] | None:
    """Into how many parts tiles are cut that read so much, longest first: into parts of about one length, that one by which
    all is done soonest. None: each stays whole."""
    most = min(int(before[0]) // _LEAST_PART, MOST_ROUNDS * spread) if len(before) else 0
    if most < 2 or len(before) > MOST_ROUNDS * spread:
        return None
    lengths = before[0] / np.arange(1, 1 + most)
    cut = np.rint(before / lengths[:, None]).astype(np.intp)
    parts, total = np.maximum(cut, 1), cut.sum(1)
    rounds = -(-total // spread)
    ends = rounds * ((before / parts).max(1) + _START) + _MERGE * (parts[:, 0] - 1)
    ends[total > MOST_ROUNDS * spread] = np.inf
    best: NDArray[np.intp] = parts[np.argmin(ends)]
    return best
