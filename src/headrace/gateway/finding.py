"""Streams by tenant and id, wherever they are: on this gateway's shelf, or in a journal that several gateways share.

Owns what of others' streams is read here (`Mirror`), and the adoption of those whose gateway is gone. What another
gateway speaks for is read along from the journal; that one is told so, and told to cancel it. Without a shared journal
a stream is here, or was left by an earlier life of this gateway, or is nowhere.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from headrace.core.errors import Expired, HeadraceError, InvalidInput, NotFound, Refused, Unreachable
from headrace.gateway.earlier import Adopt, Earlier
from headrace.streams.audience import Audience
from headrace.streams.journal import Call, Kept, Name, SharedJournal
from headrace.streams.journal import Expired as ExpiredThere
from headrace.streams.reader import Reader
from headrace.streams.record import Failure
from headrace.streams.shelf import Shelf
from headrace.streams.stream import Stream

_LOG = logging.getLogger("headrace.gateway")
# How often calls are heard and said, and how often it is looked for streams whose gateway is gone.
CALL_S = 0.5
SWEEP_S = 1.0
# A lease may have run out only because Redis stood still: time for all that live to take theirs again.
SETTLE_S = 6.0
# How long readers of another's stream wait for a journal that does not answer.
PATIENCE_S = 30.0
RETRY_S = 0.2
# How long a frame may be on its way here that was read elsewhere.
ARRIVAL_S = 2.0
# Each holds a connection to Redis.
MAX_MIRRORS = 1000
# For how long streams are revived at a time: a few milliseconds each is what a long one takes.
WORK_S = 0.01
CANCELLED = "cancelled"
LOST = Failure("stream_lost", "The rest of this stream is not kept any more.", 503)


class Speaker(Protocol):
    """Who speaks for streams of a journal: the service."""

    def revive(self, kept: Kept) -> Stream | None: ...

    def restored(self, kept: Kept) -> Stream:
        """As far as it was kept, to be read only. Raises InvalidInput."""


@dataclass(slots=True)
class Mirror:
    """A stream that another gateway speaks for, or that has ended there, as it is read here."""

    audience: Audience
    following: "asyncio.Task[None] | None" = None

    @property
    def is_read(self) -> bool:
        """By somebody, or it is to go on even without."""
        audience = self.audience
        return len(audience) > 0 or (audience.grace_s > 0.0 and not audience.stream.is_ended)


class Finding:
    """`adopt` puts a stream that was revived on the shelf. Use from one event loop."""

    def __init__(
        self,
        shelf: Shelf,
        speaker: Speaker,
        adopt: Adopt,
        now_s: Callable[[], float],
        journal: SharedJournal | None = None,
        earlier: Earlier | None = None,
    ) -> None:
        self._shelf = shelf
        self._speaker = speaker
        self._adopt = adopt
        self._now_s = now_s
        self._journal = journal
        self._earlier = earlier
        self._mirrors: dict[Name, Mirror] = {}
        # Between a claim and the shelf a stream must not be claimed again.
        self._claiming = asyncio.Lock()
        self._settled_s = 0.0
        # The journal did not answer when it was last asked: nobody else is to wait for it.
        self._is_away = False
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def num_mirrors(self) -> int:
        return len(self._mirrors)

    def is_mirrored(self, stream: Stream) -> bool:
        """Another gateway speaks for it."""
        mirror = self._mirrors.get((stream.tenant, stream.id))
        return mirror is not None and mirror.audience.stream is stream

    async def find(self, tenant: str, id: str, *, after: int = 0) -> Audience:
        """NotFound, Expired, or Unreachable where only the journal could know and does not answer.

        `after` is a frame that was read, maybe through another gateway: if it is on its way here, it is waited for."""
        audience = await self._find(tenant, id)
        if self._journal is None or not _lacks(audience.stream, after):
            return audience
        await self._arrival(audience.stream, after)
        return await self._find(tenant, id)

    async def _find(self, tenant: str, id: str) -> Audience:
        try:
            return self._shelf.find(tenant, id)
        except NotFound:
            if self._shelf.is_taken(tenant, id):
                raise
            if self._journal is None:
                if self._earlier is None:
                    raise
                return await self._earlier.find(tenant, id)
        mirror = self._mirrors.get((tenant, id))
        return mirror.audience if mirror is not None else await self._look((tenant, id), self._journal)

    async def cancel(self, tenant: str, id: str) -> None:
        """Stop it, wherever it is made; one that is over stays as it is."""
        audience = await self.find(tenant, id)
        mirror = self._mirrors.get((tenant, id))
        if mirror is None or mirror.audience is not audience or self._journal is None:
            return audience.cancel(CANCELLED)
        if audience.stream.is_ended:
            return
        if not (await self._journal.call([Call(tenant, id, is_cancel=True)]))[0]:
            raise Unreachable("The gateway that makes this stream is gone. Another takes it over shortly.")

    async def is_elsewhere(self, tenant: str, id: str) -> bool:
        """A stream of that id can be read, and not on this shelf. False where that is not known."""
        if self._earlier is not None:
            return await self._earlier.knows(tenant, id)
        if self._journal is None or self._is_away or not self._journal.is_keeping:
            return False
        with suppress(Unreachable):
            return await self._journal.knows(tenant, id)
        return False

    async def run(self) -> None:
        """Until cancelled: adopt what was left, hear what other gateways say, tell them what is read here."""
        if self._earlier is not None:
            await self._earlier.recover()
        if self._journal is None:
            return
        swept_s = -SWEEP_S
        while True:
            try:
                await self._converse(self._journal)
                self._is_away = False
                now_s = self._now_s()
                if now_s - swept_s >= SWEEP_S and now_s >= self._settled_s and self._journal.is_keeping:
                    swept_s = now_s
                    await self.sweep()
            except Unreachable:
                self._is_away = True
                self._settled_s = self._now_s() + SETTLE_S
            except Exception:  # noqa: BLE001 - a loop of the top: what one stream brings must not end it for all
                _LOG.exception("other gateways' streams could not be looked after")
            await asyncio.sleep(CALL_S)

    async def sweep(self) -> None:
        """Speak for streams whose gateway is gone. Those that nobody comes back for end with their grace."""
        if self._journal is None:
            return
        num_streams, rested_s = 0, self._now_s()
        async with self._claiming:
            for kept in await self._journal.recover():
                try:
                    stream = self._speaker.revive(kept)
                    if stream is not None:
                        self._adopt(stream, kept.birth.grace_s)
                        num_streams += 1
                except Exception:  # noqa: BLE001 - likewise: one stream must not keep the others away
                    _LOG.exception("stream %s of a gateway that is gone cannot be read on", kept.birth.stream)
                if self._now_s() - rested_s > WORK_S:
                    await asyncio.sleep(0)  # there may be thousands, and others speak meanwhile
                    rested_s = self._now_s()
        if num_streams:
            _LOG.info("%d streams of a gateway that is gone can be read on here", num_streams)

    async def close(self) -> None:
        tasks = [mirror.following for mirror in self._mirrors.values() if mirror.following is not None]
        for task in (*tasks, *self._telling):
            task.cancel()
        await asyncio.gather(*tasks, *self._telling, return_exceptions=True)

    async def _arrival(self, stream: Stream, after: int) -> None:
        """Until that frame can be read here, or cannot any more. Whoever read it through another gateway may be quicker
        than what is read along from the journal, and than what the journal says to who has written there."""
        try:
            async with asyncio.timeout(ARRIVAL_S):
                while _lacks(stream, after):
                    await Reader(stream, len(stream.records)).wait()
        except TimeoutError:
            if stream.num_written >= after:
                raise Unreachable("This stream cannot be read on now: the journal does not answer.") from None

    def _at_hand(self, name: Name) -> Audience | None:
        """Others may have looked for it as well."""
        with suppress(NotFound):
            return self._shelf.find(*name)
        mirror = self._mirrors.get(name)
        return None if mirror is None else mirror.audience

    async def _look(self, name: Name, journal: SharedJournal) -> Audience:
        """In the journal. Who asks for what is not there keeps nobody else waiting."""
        if self._is_away or not journal.is_keeping:
            raise Unreachable("This stream cannot be looked for now: the journal does not answer.")
        kept = await self._kept(name, journal)
        if kept.records[-1].ending is None and self._now_s() >= self._settled_s:
            await self._claim(name, kept.epoch, journal)
        found = self._at_hand(name)
        return found if found is not None else self._reflect(name, kept, journal).audience

    async def _claim(self, name: Name, epoch: int, journal: SharedJournal) -> None:
        """Speak for it from now on, unless its owner lives or somebody here was quicker."""
        async with self._claiming:
            if self._at_hand(name) is not None or not await journal.claim(*name, epoch):
                return
            kept = await self._kept(name, journal)
            stream = self._speaker.revive(kept)
            if stream is None:
                raise NotFound("There is no such stream.")
            self._adopt(stream, kept.birth.grace_s)

    async def _kept(self, name: Name, journal: SharedJournal) -> Kept:
        kept = await journal.find(*name)
        if kept is None:
            raise NotFound("There is no such stream.")
        if isinstance(kept, ExpiredThere):
            raise Expired("This stream is over and is not kept any more.")
        return kept

    def _reflect(self, name: Name, kept: Kept, journal: SharedJournal) -> Mirror:
        if len(self._mirrors) >= MAX_MIRRORS:
            raise Refused("Too many streams of other gateways are read here. Try again shortly.", retry_after_s=1.0)
        try:
            stream = self._speaker.restored(kept)
        except InvalidInput:  # of another version
            raise Expired("This stream cannot be read any more.") from None
        mirror = Mirror(Audience(stream, _Elsewhere(self), self._now_s(), grace_s=0.0, on_over=self._forget))
        self._mirrors[name] = mirror
        if not stream.is_ended:
            mirror.following = asyncio.create_task(self._follow(name, stream, journal))
            self._tell(Call(*name))
        return mirror

    async def _follow(self, name: Name, stream: Stream, journal: SharedJournal) -> None:
        """Read along, until its ending. Where Redis is away for a while it is waited for."""
        answered_s = self._now_s()
        while not stream.is_ended and self._now_s() - answered_s < PATIENCE_S:
            began_s = self._now_s()
            try:
                async for record in journal.tail(*name, len(stream.records)):
                    stream.restore((record,))
                break
            except Unreachable:
                if self._now_s() - began_s > SETTLE_S:  # it had answered for a while
                    answered_s = self._now_s()
                await asyncio.sleep(RETRY_S)
        if not stream.is_ended:
            stream.abandon(LOST)
            mirror = self._mirrors.get(name)
            if mirror is not None and mirror.audience.stream is stream:
                del self._mirrors[name]  # who asks again may find it

    async def _converse(self, journal: SharedJournal) -> None:
        for call in await journal.calls():
            with suppress(HeadraceError):  # it is over, or was taken over
                audience = self._shelf.find(call.tenant, call.stream)
                if call.is_cancel:
                    audience.cancel(CANCELLED)
                else:
                    audience.stay(self._now_s())
        for mirror in [mirror for mirror in self._mirrors.values() if not mirror.is_read]:
            self._forget(mirror.audience)
        read = [mirror.audience.stream for mirror in self._mirrors.values() if not mirror.audience.stream.is_ended]
        if read:
            await journal.call([Call(stream.tenant, stream.id) for stream in read])

    def left(self, stream: Stream, *, is_cancelled: bool) -> None:
        """By the readers of a mirror: nobody is there any more, or one of them wants it to end everywhere."""
        name = (stream.tenant, stream.id)
        mirror = self._mirrors.get(name)
        if is_cancelled:
            self._tell(Call(*name, is_cancel=True))
        elif mirror is not None and mirror.audience.stream is stream and not len(mirror.audience):
            self._forget(mirror.audience)

    def _tell(self, call: Call) -> None:
        async def tell(journal: SharedJournal) -> None:
            with suppress(Unreachable):
                await journal.call([call])

        if self._journal is not None:
            task = asyncio.create_task(tell(self._journal))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    def _forget(self, audience: Audience) -> None:
        name = (audience.stream.tenant, audience.stream.id)
        mirror = self._mirrors.get(name)
        if mirror is not None and mirror.audience is audience:
            del self._mirrors[name]
            if mirror.following is not None:
                mirror.following.cancel()


def _lacks(stream: Stream, number: int) -> bool:
    """More may come, and that record has not."""
    return not stream.is_ended and len(stream.records) < number


class _Elsewhere:
    """Who generates what is mirrored, as its readers here see it. That nobody reads it here any more is no reason to
    end it there."""

    __slots__ = ("_finding",)

    def __init__(self, finding: Finding) -> None:
        self._finding = finding

    def cancel(self, stream: Stream, why: str) -> None:
        self._finding.left(stream, is_cancelled=why == CANCELLED)

    def pause(self, stream: Stream) -> None: ...

    def resume(self, stream: Stream) -> None: ...
