"""The port of a journal: where the records of streams are kept so that they outlive the gateway that wrote them.

A journal is the truth about a stream: what is not in it is derived again, by attaching to the worker or by replay. So
a kept stream never has a gap: where something of it could not be kept, nothing after that is. Streams are known by
tenant and id together. Knows neither how generation goes on nor how frames are worded; it keeps both as bytes.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from msgspec import Struct

from headrace.streams.record import Record

# (tenant, stream): what a stream is known by.
Name = tuple[str, str]
NOBODY: frozenset[Name] = frozenset()
# Told which streams are not ours any more: nothing of them was kept, and their writer must stop.
Then = Callable[[frozenset[Name]], None]


class Birth(Struct, frozen=True):
    """What must be known of a stream to speak for it after its gateway died."""

    stream: str
    tenant: str
    model: str
    fingerprint: str
    # By the wall clock: it is compared across lives and machines.
    created_s: float
    # Serving's: how generation goes on.
    order: bytes
    # The face's: how frames are worded.
    dialect: bytes
    # How long it goes on without a reader, where its client said so.
    grace_s: float | None = None


class Entry(Struct, frozen=True):
    """One record on its way into the journal. `birth` comes with a stream's first."""

    tenant: str
    stream: str
    record: Record
    birth: Birth | None = None


class Kept(Struct):
    """A stream as the journal has it: its records from 1 on, without a gap. `ended_s` is by the wall clock."""

    birth: Birth
    records: list[Record]
    epoch: int
    ended_s: float | None = None


class Call(Struct, frozen=True):
    """What one gateway says to the one that owns a stream: that it is read elsewhere, or is to be cancelled."""

    tenant: str
    stream: str
    is_cancel: bool = False


class Expired(Struct, frozen=True):
    """It was kept here once, and is not any more."""


class Journal(Protocol):
    @property
    def is_keeping(self) -> bool:
        """False while what is appended is not kept: the disk is full, the server is gone."""

    def append(self, entries: Sequence[Entry], then: Then) -> None:
        """One step of all its streams, as one write.

        `then` is called once it is kept: by the file before this returns, by Redis later, in the order of appends.
        Never raises: a journal that cannot keep says so in the log and by `is_keeping`, and calls `then` all the same,
        because inference goes on.
        """

    async def recover(self) -> list[Kept]:
        """Streams that this gateway is to speak for from now on.

        Those without an end, whose owner is gone. File: all that earlier lives left; to be asked once. Redis: those of
        gateways whose lease is over, each claimed; to be asked again from time to time.
        """

    async def find(self, tenant: str, stream: str) -> Kept | Expired | None:
        """Ended or not, whoever owns it."""

    async def knows(self, tenant: str, stream: str) -> bool:
        """It is here, whoever owns it."""

    async def claim(self, tenant: str, stream: str, epoch: int) -> bool:
        """Own the stream from now on, if nobody has claimed it since `epoch` and its owner is gone."""

    async def close(self) -> None: ...


class SharedJournal(Journal, Protocol):
    """One that several gateways write. What is asked raises Unreachable while its server does not answer."""

    def tail(self, tenant: str, stream: str, after: int) -> AsyncIterator[Record]:
        """The records behind `after` of a stream that another gateway writes, as they come, up to the ending. Ends
        without one where the stream is gone."""

    async def call(self, calls: Sequence[Call]) -> list[bool]:
        """Say something of streams to who owns them: of each, whether there is an owner that lives."""

    async def calls(self) -> list[Call]:
        """What was said to this gateway since it was last asked."""


class MemoryJournal:
    """Keeps nothing: streams live as long as their gateway."""

    @property
    def is_keeping(self) -> bool:
        return True

    def append(self, entries: Sequence[Entry], then: Then) -> None:
        then(NOBODY)

    async def recover(self) -> list[Kept]:
        return []

    async def find(self, tenant: str, stream: str) -> Kept | Expired | None:
        return None

    async def knows(self, tenant: str, stream: str) -> bool:
        return False

    async def claim(self, tenant: str, stream: str, epoch: int) -> bool:
        return False

    async def close(self) -> None:
        pass
