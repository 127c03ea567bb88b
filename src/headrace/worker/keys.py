"""Whose each sequence is: gateways' keys, the engine's numbers, names that outlive a gateway, and the ways between them.

Owned by the engine's thread. Knows neither engine nor link, only their numbers. What a lost link leaves belongs to
`NOBODY`, under keys of our own.
"""

from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from headrace.core.messages import End, SubmitPart
from headrace.core.request import Request

NO_NUMBER = -1
# The link of what has none: links are numbered from 1.
NOBODY = 0

# Tenant, request and the number of the sequence among all of that request.
Name = tuple[str, str, int]


class Entry(Struct, eq=False):
    """A submission from its arrival to its end. It has a number once the engine has it."""

    link: int
    key: int
    arrived_s: float
    request: Request
    name: Name
    number: int = NO_NUMBER
    # Every token by its index, those that were replayed first: of an orphan. The engine has those of the others.
    ids: "array[int]" = field(default_factory=partial(array, "i"))
    # From its arrival here to the engine's taking it in.
    early_s: float = 0.0
    # By the gateway's wish; a crowded outbox pauses besides.
    is_paused: bool = False
    matcher: "Future[Any] | None" = None
    # Of one that ended while it was nobody's.
    end: End | None = None
    # Whether anybody may come for it once its link is lost.
    outlives: bool = True
    # Whether a worker may have died of it.
    is_suspect: bool = False


class Building(Struct, eq=False):
    """A submission some of whose matchers are in the making: it goes to the engine whole, when all are there."""

    entries: list[Entry]
    num_left: int = 0


def entries_of(part: SubmitPart, link: int, arrived_s: float) -> list[Entry]:
    """A sequence for each choice; all of them share prompt, hashes and sampling."""
    request = part.request
    if part.grammar is not None:
        request = replace(request, sampling=replace(request.sampling, masked=True))
    return [
        Entry(
            link,
            key,
            arrived_s,
            replace(request, choice=request.choice + index) if index else request,
            (request.tenant, request.request_id, part.first + index),
            outlives=part.outlives,
            is_suspect=part.is_suspect,
        )
        for index, key in enumerate(part.keys)
    ]


class KeyTable:
    def __init__(self) -> None:
        self._by_number: dict[int, Entry] = {}
        self._by_link: dict[int, dict[int, Entry]] = {}
        # The latest of a name: who submits it again goes on with that one.
        self._by_name: dict[Name, Entry] = {}
        self._own_keys = count()
        self.count = 0

    def __iter__(self) -> Iterator[Entry]:
        """All entries, as they are now: they may be dropped meanwhile."""
        return iter([entry for entries in self._by_link.values() for entry in entries.values()])

    def add(self, entry: Entry) -> None:
        self._by_link.setdefault(entry.link, {})[entry.key] = entry
        self._by_name[entry.name] = entry
        self.count += 1

    def number(self, entry: Entry, number: int) -> None:
        entry.number = number
        self._by_number[number] = entry

    def move(self, entry: Entry, link: int, key: int) -> None:
        """It belongs to another from now on, where that key is free."""
        self._leave_link(entry)
        entry.link, entry.key = link, key
        self._by_link.setdefault(link, {})[key] = entry

    def orphan(self, entry: Entry) -> None:
        self.move(entry, NOBODY, next(self._own_keys))

    def keep_end(self, entry: Entry, end: End) -> None:
        """The engine is done with it, and somebody may still ask for it."""
        entry.end = end
        self._by_number.pop(entry.number, None)

    def find(self, link: int, key: int) -> Entry | None:
        return self._by_link.get(link, {}).get(key)

    def has_any(self, link: int, keys: Iterable[int]) -> bool:
        entries = self._by_link.get(link)
        return entries is not None and not entries.keys().isdisjoint(keys)

    def named(self, name: Name) -> Entry | None:
        return self._by_name.get(name)

    def owner(self, number: int) -> Entry | None:
        return self._by_number.get(number)

    def of(self, link: int) -> list[Entry]:
        return list(self._by_link.get(link, {}).values())

    def drop(self, entry: Entry) -> None:
        if self.find(entry.link, entry.key) is not entry:
            return
        self._leave_link(entry)
        self._by_number.pop(entry.number, None)
        if self._by_name.get(entry.name) is entry:
            del self._by_name[entry.name]
        self.count -= 1

    def _leave_link(self, entry: Entry) -> None:
        entries = self._by_link[entry.link]
        del entries[entry.key]
        if not entries:
            del self._by_link[entry.link]
