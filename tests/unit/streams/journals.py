"""Entries for journals, and what to do with a journal in one line."""

import asyncio
from collections.abc import Sequence

from headrace.streams.journal import NOBODY, Birth, Entry, Expired, Journal, Kept, Name
from headrace.streams.record import Ending, Part, Record, Usage

SECRET = b"a secret of the tests, long enough"


class Wall:
    """A wall clock that tests set; also a monotonic one."""

    def __init__(self) -> None:
        self.time_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.time_s

    def now_s(self) -> float:
        return self.time_s


def birth(stream: str = "s", tenant: str = "acme", grace_s: float | None = None) -> Birth:
    order = b"order of " + stream.encode()
    return Birth(stream, tenant, "tiny", "fp1", 1_700_000_000.25, order, b"\x00dialect", grace_s)


def said(number: int, text: str = "") -> Record:
    return Record(number, (Part(0, (number,), text or f" {number}", index=number - 1),), step=number, age_s=number / 8)


def ended(number: int) -> Record:
    return Record(number, ending=Ending(Usage(3, 0, number), stages={"decode": 0.5}))


def entry(number: int, stream: str = "s", tenant: str = "acme", *, is_end: bool = False) -> Entry:
    """The `number`th record of a stream, with the birth where it is the first."""
    record = ended(number) if is_end else said(number)
    return Entry(tenant, stream, record, birth(stream, tenant) if number == 1 else None)


def whole(stream: str = "s", tenant: str = "acme", *, length: int = 3) -> list[Entry]:
    """A stream from birth to ending."""
    return [entry(number, stream, tenant, is_end=number == length) for number in range(1, length + 1)]


def put(journal: Journal, *entries: Entry) -> None:
    """One append each, all kept and none refused before this returns."""
    answers: list[frozenset[Name]] = []
    for one in entries:
        journal.append([one], answers.append)
    assert answers == [NOBODY] * len(entries)


def numbers(found: Kept | Expired | None) -> list[int]:
    assert isinstance(found, Kept), found
    return [record.number for record in found.records]


def by_name(kept: Sequence[Kept]) -> dict[str, list[int]]:
    return {one.birth.stream: numbers(one) for one in kept}


async def appended(journal: Journal, entries: Sequence[Entry]) -> frozenset[Name]:
    """One append, once it is answered: what is not ours any more."""
    future: asyncio.Future[frozenset[Name]] = asyncio.get_running_loop().create_future()
    journal.append(entries, future.set_result)
    return await asyncio.wait_for(future, 60)
