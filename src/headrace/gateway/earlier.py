"""Streams that an earlier life of this gateway left in a journal of its own. Owns their way back onto the shelf.

Those that have not ended are spoken for again, one after the other, while the gateway answers; whoever asks for one does
not wait for the others. Those that have ended lie in the journal until somebody asks.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from headrace.core.errors import Expired, InvalidInput, NotFound
from headrace.streams.audience import Audience
from headrace.streams.journal import Expired as ExpiredThere
from headrace.streams.journal import Journal, Kept, Name
from headrace.streams.shelf import Shelf
from headrace.streams.stream import Stream

_LOG = logging.getLogger("headrace.gateway")

# Puts a stream on the shelf, with the grace that its client chose.
Adopt = Callable[[Stream, float | None], None]


class Speaker(Protocol):
    """Who speaks for streams of a journal: the service."""

    async def revive_beside(self, kept: Kept) -> Stream | None: ...

    def restored(self, kept: Kept) -> Stream:
        """As far as it was kept, to be read only. Raises InvalidInput."""


class Earlier:
    """Use from one event loop."""

    def __init__(self, shelf: Shelf, speaker: Speaker, adopt: Adopt, journal: Journal) -> None:
        self._shelf = shelf
        self._speaker = speaker
        self._adopt = adopt
        self._journal = journal
        # Between the journal and the shelf a stream must not be put there by somebody else.
        self._putting = asyncio.Lock()
        # What was asked for before its turn, while there are turns.
        self._early: set[Name] | None = set()

    async def knows(self, tenant: str, id: str) -> bool:
        return await self._journal.knows(tenant, id)

    async def find(self, tenant: str, id: str) -> Audience:
        """One that the shelf does not know. NotFound, Expired."""
        if not await self._journal.knows(tenant, id):
            raise _missing(await self._journal.find(tenant, id))
        async with self._putting:
            with suppress(NotFound):
                return self._shelf.find(tenant, id)
            kept = await self._journal.find(tenant, id)
            if not isinstance(kept, Kept):
                raise _missing(kept)
            if self._early is not None:
                self._early.add((tenant, id))
            if not await self._take(kept):
                raise Expired("This stream cannot be read any more.")
            return self._shelf.find(tenant, id)

    async def recover(self) -> None:
        """Go on with what an earlier life was telling when it died."""
        num_taken = 0
        found = await self._journal.recover()
        while found:
            async with self._putting:
                kept = found.pop()
                try:
                    if self._early is None or (kept.birth.tenant, kept.birth.stream) not in self._early:
                        num_taken += await self._take(kept)
                except Exception:  # noqa: BLE001 - a loop of the top: one stream must not keep the others away
                    _LOG.exception("stream %s of an earlier life cannot be read on", kept.birth.stream)
            await asyncio.sleep(0)  # others speak meanwhile
        self._early = None
        if num_taken:
            _LOG.info("%d streams of an earlier life can be read on", num_taken)

    async def _take(self, kept: Kept) -> bool:
        if kept.ended_s is None:
            stream = await self._speaker.revive_beside(kept)
        else:
            try:
                stream = self._speaker.restored(kept)
            except InvalidInput:  # of another version
                stream = None
        if stream is not None:
            self._adopt(stream, kept.birth.grace_s)
        return stream is not None


def _missing(found: object) -> NotFound | Expired:
    if isinstance(found, ExpiredThere):
        return Expired("This stream is over and is not kept any more.")
    return NotFound("There is no such stream.")
