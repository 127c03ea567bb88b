"""A plan written into a packet: what one step sends to the device, in one run of int32 words.

All of it is arithmetic over whole arrays. What a layout has room for and the plan does not fill is padding: slot -1,
owner -1, tile -1, without effect.
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


def decode_packet(plan: Plan, layout: Layout, words: IntArray) -> None:
    """Rows of a step in which every row is fed by the device."""
    count = len(plan.slots)
    part = _parts(layout, words)
    part["slots"][:count] = plan.slots
    part["slots"][count:] = -1
    np.add(plan.starts, plan.counts, out=part["ends"][:count])
    part["ends"][count:] = 1


def mixed_packet(plan: Plan, slots: HostSlots, choice: LayoutChoice, words: IntArray) -> Laid:
    """Rows, tokens, tiles and samples of any step."""
    fed = slots.fed_by_device(plan)
    decodes = np.flatnonzero(fed)
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
    positions = np.arange(tokens, dtype=np.int32) + np.repeat((starts - firsts).astype(np.int32), counts)
    rows = np.concatenate((np.arange(num_decodes), np.arange(layout.decodes, layout.decodes + num_chunks)))
    _fill(part["slots"], -1, rows, row_slots)
    _fill(part["ends"], 1, rows, ends)
    ids = slots.ids.reshape(-1).take(np.repeat(row_slots.astype(np.intp) * slots.ids.shape[1], counts) + positions)
    ids[:num_decodes] = -1
    _head(part["ids"], ids, 0)
    _head(part["positions"], positions, 0)
    _head(part["owners"], np.repeat(rows.astype(np.int32), counts), -1)
    _head(part["offsets"], np.append(firsts[num_decodes:], tokens), tokens)
    _head(part["prior"], starts[num_decodes:], 0)
    tile_rows, spread = (choice.fresh_rows, 0) if layout.fresh else (choice.tile_rows, choice.spread)
    tiles = list_tiles(counts[num_decodes:], starts[num_decodes:], tile_rows, spread)
    _head(part["tiles"], tiles.reshape(-1), -1)
    places = np.flatnonzero(plan.samples[order])
    _head(part["places"], (firsts + counts - 1)[places], 0)
    _head(part["sampled"], row_slots[places], -1)
    by_row = np.empty(len(order), np.intp)
    by_row[order] = firsts
    return Laid(layout, order[places], chunks, by_row)


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
    come first, so that none is late. Those that are few are cut into parts; a card computes `spread` of them at once."""
    each = -(-counts // tile_rows)
    chunk = np.repeat(np.arange(len(counts), dtype=np.int32), each)
    tile = np.arange(len(chunk), dtype=np.int32) - (np.cumsum(each) - each).astype(np.int32)[chunk]
    before = prior[chunk] + tile * np.int32(tile_rows)
    order = np.argsort(-before, kind="stable")
    parts = _parts_of(before[order], spread)
    entry = np.repeat(order, parts)
    part = np.arange(len(entry)) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.stack((chunk[entry], tile[entry], part, np.repeat(parts, parts)), 1).astype(np.int32)


def _parts_of(before: IntArray, spread: int) -> NDArray[np.intp]:
    """Into how many parts tiles are cut that read so much, longest first: into parts of about one length, that one by which
    all is done soonest."""
    whole = np.ones(len(before), np.intp)
    most = min(int(before[0]) // _LEAST_PART, MOST_ROUNDS * spread) if len(before) else 0
    if most < 2 or len(before) > MOST_ROUNDS * spread:
        return whole
    lengths = before[0] / np.arange(1, 1 + most)
    cut = np.rint(before / lengths[:, None]).astype(np.intp)
    parts, total = np.maximum(cut, 1), cut.sum(1)
    rounds = -(-total // spread)
    ends = rounds * ((before / parts).max(1) + _START) + _MERGE * (parts[:, 0] - 1)
    ends[total > MOST_ROUNDS * spread] = np.inf
    best: NDArray[np.intp] = parts[np.argmin(ends)]
    return best
