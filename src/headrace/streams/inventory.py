"""What earlier lives left in the files of a journal: which streams lie where, and which of them have not ended.

Read from the indices, where there are any; else from the files, names and endings only, and an index is made. Reads
nothing of what was said. May run in a thread, with a seal of its own.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headrace.streams.codec import glance_append
from headrace.streams.index import Index, index_path, read_index, read_left_index, write_index
from headrace.streams.joined import GAP, Held
from headrace.streams.journal import Name
from headrace.streams.roll import Roll, Row, digest_of
from headrace.streams.seal import Seal
from headrace.streams.segment import Segment, SegmentReader, read_id


@dataclass(slots=True)
class Inventory:
    """`held` are the streams that have not ended, in the order of their births; `bygones` digests of those whose file
    is gone, by index. `faults` says of files, by name, why their rest is lost."""

    segments: list[Segment] = field(default_factory=list)
    held: dict[Name, Held] = field(default_factory=dict)
    bygones: list[tuple[bytes, Path]] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)


class Leftovers(NamedTuple):
    """Files and indices that earlier lives left, with their numbers, oldest first."""

    segments: list[tuple[int, Path]]
    indices: list[tuple[int, Path]]

    @property
    def last_number(self) -> int:
        return max((number for number, _ in (*self.segments, *self.indices)), default=0)


def take_inventory(old: Leftovers, seal: Seal, stop: Callable[[], bool]) -> Inventory:
    """`stop` is asked before each file: nobody waits for the answer any more."""
    inventory = Inventory()
    for number, path in old.segments:
        if stop():
            return inventory
        _enter(inventory, number, path, seal)
    there = {number for number, _ in old.segments}
    for number, path in old.indices:
        if number in there:
            continue
        index = read_left_index(path, seal)
        if index is not None:
            inventory.bygones.append((index.digests(), path))
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return inventory


def _enter(inventory: Inventory, number: int, path: Path, seal: Seal) -> None:
    index = read_index(path, seal) or _rebuild(path, seal, inventory.faults)
    # A file of which nothing can be read expires as if its last stream had ended when it was last written.
    size_bytes, index_bytes = _size_bytes(path), _size_bytes(index_path(path))
    segment = Segment(
        number,
        path,
        size_bytes,
        index.last_s,
        index.last_s,
        roll=index.roll,
        shares=index.shares,
        is_apart=index.is_apart,
        index_bytes=index_bytes,
    )
    inventory.segments.append(segment)
    for name, over_s in index.over.items():
        held = inventory.held.pop(name, None)
        if held is not None:
            held.segments.append(segment)
            held.end(name, over_s)
    for name, spot in index.open.items():
        held = inventory.held.get(name)
        if spot is not None:
            inventory.held[name] = Held([segment], spot)
        elif held is not None:
            held.segments.append(segment)


def _rebuild(path: Path, seal: Seal, faults: dict[str, str]) -> Index:
    """From the file itself; and write it down, so that this was the last time."""
    number = int(path.stem)
    reader = SegmentReader(path, seal, glance_append)
    index = Index(0.0, Roll(), {}, {}, Counter())
    for at_s, glances in reader:
        index.last_s = max(index.last_s, at_s)
        for glance in glances:
            name = glance.name
            if glance.is_birth:
                index.open[name] = (reader.begin, reader.ordinal)
            elif name not in index.open:
                index.open[name] = None
            if glance.is_end:
                index.shares[name[0]] += glance.number
            if glance.is_end or glance.number == GAP:
                spot = index.open.pop(name)
                if spot is None:
                    index.over[name] = at_s
                else:
                    index.roll.add(Row(digest_of(name), at_s, number, *spot))
    if reader.fault:
        faults[path.name] = reader.fault
    if not reader.ordinal:
        index.last_s = _written_s(path)
        return index
    with contextlib.suppress(OSError):
        id, size_bytes = read_id(path)
        if id is not None:
            write_index(path, size_bytes, id, index, seal)
    return index


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
