"""Whose each sequence is: gateways' keys, the engine's numbers, and the way from one to the other.

Owned by the engine's thread. Knows neither engine nor link, only their numbers.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from headrace.core.request import Request

NO_NUMBER = -1


@dataclass(slots=True, eq=False)
class Entry:
    """A submission from its arrival to its end. It has a number once the engine has it."""

    link: int
    key: int
    arrived_s: float
    request: Request
    number: int = NO_NUMBER
    # From its arrival here to the engine's taking it in.
    early_s: float = 0.0
    # By the gateway's wish; a crowded outbox pauses besides.
    is_paused: bool = False
    matcher: "Future[Any] | None" = None


@dataclass(slots=True, eq=False)
class Building:
    """A submission some of whose matchers are in the making: it goes to the engine whole, when all are there."""

    entries: list[Entry]
    num_left: int = 0


class KeyTable:
    def __init__(self) -> None:
        self._by_number: dict[int, Entry] = {}
        self._by_link: dict[int, dict[int, Entry]] = {}
        self.count = 0

    def __iter__(self) -> Iterator[Entry]:
        """All entries, as they are now: they may be dropped meanwhile."""
        return iter([entry for entries in self._by_link.values() for entry in entries.values()])

    def add(self, entry: Entry) -> None:
        self._by_link.setdefault(entry.link, {})[entry.key] = entry
        self.count += 1

    def number(self, entry: Entry, number: int) -> None:
        entry.number = number
        self._by_number[number] = entry

    def find(self, link: int, key: int) -> Entry | None:
        return self._by_link.get(link, {}).get(key)

    def owner(self, number: int) -> Entry | None:
        return self._by_number.get(number)

    def of(self, link: int) -> list[Entry]:
        return list(self._by_link.get(link, {}).values())

    def drop(self, entry: Entry) -> None:
        entries = self._by_link.get(entry.link, {})
        if entries.get(entry.key) is not entry:
            return
        del entries[entry.key]
        if not entries:
            del self._by_link[entry.link]
        self._by_number.pop(entry.number, None)
        self.count -= 1
