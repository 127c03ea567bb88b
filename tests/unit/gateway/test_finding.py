"""Streams that are looked for: here, at another gateway, or left by one that is gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from headrace.core.errors import Expired, InvalidInput, NotFound, Unreachable
from headrace.gateway.finding import Finding
from headrace.streams.journal import Call, Entry, Kept, MemoryJournal, Then
from headrace.streams.journal import Expired as ExpiredThere
from headrace.streams.record import Failure, Record
from headrace.streams.shelf import Shelf
from headrace.streams.stream import Stream
from tests.unit.streams.journals import birth, ended, said

S = ("acme", "s")


class Plain:
    """A dialect that is never asked."""

    def bound(self, created_s: float, fingerprint: str) -> "Plain":
        return self

    def frame(self, record: Record) -> bytes:
        raise AssertionError(record)


class Table(MemoryJournal):
    """A shared journal that a story fills. `is_owned`: another gateway lives and speaks for what is there."""

    def __init__(self) -> None:
        self.found: Kept | ExpiredThere | None = None
        self.is_owned = True
        self.is_up = True
        self.said: list[Call] = []
        self.heard: list[Call] = []
        self.more: asyncio.Queue[Record] = asyncio.Queue()
        self.num_finds = 0

    @property
    def is_keeping(self) -> bool:
        return self.is_up

    async def recover(self) -> list[Kept]:
        await asyncio.sleep(0)
        if self.is_owned or not isinstance(self.found, Kept):
            return []
        self.is_owned = True
        return [self.found]

    async def find(self, tenant: str, stream: str) -> Kept | ExpiredThere | None:
        self.num_finds += 1
        await asyncio.sleep(0)
        return self.found if (tenant, stream) == S else None

    async def claim(self, tenant: str, stream: str, epoch: int) -> bool:
        await asyncio.sleep(0)
        is_ours, self.is_owned = not self.is_owned, True
        return is_ours

    async def knows(self, tenant: str, stream: str) -> bool:
        return (tenant, stream) == S

    async def tail(self, tenant: str, stream: str, after: int) -> AsyncIterator[Record]:
        while True:
            record = await self.more.get()
            yield record
            if record.ending is not None:
                return

    async def call(self, calls: Sequence[Call]) -> list[bool]:
        self.said += calls
        return [True] * len(calls)

    async def calls(self) -> list[Call]:
        if not self.is_up:
            raise Unreachable("away")
        heard, self.heard = self.heard, []
        return heard

    def append(self, entries: Sequence[Entry], then: Then) -> None:
        raise AssertionError(entries)


class Scene:
    """One gateway's shelf, and the journal that it shares with others."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.shelf = Shelf(lambda: self.now_s)
        self.journal = Table()
        self.revived: list[Kept] = []
        self.cancelled: list[str] = []
        self.finding = Finding(self.shelf, self, self.adopt, lambda: self.now_s, self.journal)

    def restored(self, kept: Kept) -> Stream:
        stream = Stream(kept.birth.stream, kept.birth.tenant, Plain())
        stream.restore(kept.records)
        return stream

    def revive(self, kept: Kept) -> Stream | None:
        self.revived.append(kept)
        return self.restored(kept)

    def adopt(self, stream: Stream, grace_s: float | None = None) -> None:
        self.shelf.put(stream, self, grace_s=10.0)

    def cancel(self, stream: Stream, why: str) -> None:
        self.cancelled.append(why)

    def pause(self, stream: Stream) -> None: ...

    def resume(self, stream: Stream) -> None: ...


def play(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def whole() -> None:
        scene = Scene()
        running = asyncio.create_task(scene.finding.run())
        try:
            await story(scene)
        finally:
            running.cancel()
            await scene.finding.close()

    asyncio.run(whole())


def opened(*records: Record) -> Kept:
    return Kept(birth(), list(records), 1)


def test_what_another_gateway_makes_is_read_along_and_that_one_is_told() -> None:
    async def story(scene: Scene) -> None:
        scene.journal.found = opened(said(1), said(2))
        audience = await scene.finding.find(*S)
        reader = audience.enter(1)
        assert await scene.finding.find(*S) is audience
        for record in (said(3), ended(4)):
            scene.journal.more.put_nowait(record)
        await audience.stream.ended()
        assert [record.number for record in reader.take()] == [2, 3, 4]
        assert scene.journal.said == [Call(*S)] and not scene.revived and not scene.shelf.num_open
        audience.leave(reader, scene.now_s)
        assert scene.finding.num_mirrors == 0 and not scene.cancelled

    play(story)


def test_a_reader_that_leaves_ends_nothing_but_its_reading() -> None:
    async def story(scene: Scene) -> None:
        scene.journal.found = opened(said(1))
        audience = await scene.finding.find(*S)
        audience.leave(audience.enter(), scene.now_s)
        await asyncio.sleep(0)
        assert scene.finding.num_mirrors == 0 and not any(call.is_cancel for call in scene.journal.said)

    play(story)


def test_to_cancel_it_is_said_to_its_gateway() -> None:
    async def story(scene: Scene) -> None:
        scene.journal.found = opened(said(1))
        await scene.finding.cancel(*S)
        assert Call(*S, is_cancel=True) in scene.journal.said
        (await scene.finding.find(*S)).cancel("cancelled")
        await asyncio.sleep(0)
        assert scene.journal.said.count(Call(*S, is_cancel=True)) == 2

    play(story)


def test_what_was_left_is_claimed_once_however_many_ask() -> None:
    async def story(scene: Scene) -> None:
        scene.journal.found = opened(said(1))
        scene.journal.is_owned = False
        found = await asyncio.gather(*(scene.finding.find(*S) for _ in range(5)), scene.finding.sweep())
        assert len(set(found[:5])) == 1 and len(scene.revived) == 1
        assert scene.shelf.find(*S) is found[0]

    play(story)


def test_what_ended_elsewhere_is_read_and_not_shelved() -> None:
    async def story(scene: Scene) -> None:
        scene.journal.found = opened(said(1), ended(2))
        scene.journal.is_owned = False
        audience = await scene.finding.find(*S)
        reader = audience.enter()
        assert len(reader.take()) == 2
        audience.leave(reader, scene.now_s)
        assert (scene.finding.num_mirrors, scene.shelf.num_kept, scene.revived) == (0, 0, [])

    play(story)


def test_a_frame_that_was_read_elsewhere_is_waited_for_where_it_is_read_along() -> None:
    async def story(scene: Scene) -> None:
        scene.journal.found = opened(said(1))
        early = (await scene.finding.find(*S)).enter()
        finding = asyncio.create_task(scene.finding.find(*S, after=2))
        await asyncio.sleep(0.01)
        assert not finding.done()
        for record in (said(2), said(3)):
            scene.journal.more.put_nowait(record)
        audience = await asyncio.wait_for(finding, 60)
        late = audience.enter(2)
        scene.journal.more.put_nowait(ended(4))
        await audience.stream.ended()
        assert [record.number for record in early.take()] == [1, 2, 3, 4]
        assert [record.number for record in late.take()] == [3, 4]
        assert scene.journal.num_finds == 1

    play(story)


def test_a_frame_that_nobody_can_have_read_is_refused_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.finding.ARRIVAL_S", 0.01)

    async def story(scene: Scene) -> None:
        scene.journal.found = opened(said(1), said(2))
        first = (await scene.finding.find(*S)).enter()
        for _ in range(5):
            audience = await scene.finding.find(*S, after=3)
            with pytest.raises(InvalidInput):
                audience.enter(3)
        assert first.take() == [said(1), said(2)] and scene.journal.num_finds == 1

    play(story)


def test_what_was_written_and_is_not_kept_in_time_is_to_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.finding.ARRIVAL_S", 0.01)

    async def story(scene: Scene) -> None:
        stream = Stream("s", "acme", Plain())
        stream.keeper = lambda stream, record: None
        scene.adopt(stream)
        stream.append(said(1).parts)
        with pytest.raises(Unreachable):
            await scene.finding.find(*S, after=1)

    play(story)


def test_what_others_can_read_before_it_is_published_here_is_waited_for() -> None:
    async def story(scene: Scene) -> None:
        stream = Stream("s", "acme", Plain())
        stream.keeper = lambda stream, record: None
        scene.adopt(stream)
        for _ in range(2):
            stream.append(said(1).parts)
        finding = asyncio.create_task(scene.finding.find(*S, after=2))
        await asyncio.sleep(0.01)
        stream.publish()
        await asyncio.sleep(0.01)
        assert not finding.done()
        stream.publish()
        assert (await asyncio.wait_for(finding, 60)).enter(2).take() == []

    play(story)


def test_what_was_taken_over_before_it_was_published_is_read_where_it_went() -> None:
    async def story(scene: Scene) -> None:
        stream = Stream("s", "acme", Plain())
        stream.keeper = lambda stream, record: None
        assert scene.shelf.take_id(*S), "by the request that opens it, and still writes"
        scene.adopt(stream)
        stream.append(said(1).parts)
        finding = asyncio.create_task(scene.finding.find(*S, after=1))
        await asyncio.sleep(0.01)
        scene.journal.found = opened(said(1), said(2))
        stream.abandon(Failure("stream_moved", "elsewhere", 503))
        audience = await asyncio.wait_for(finding, 60)
        assert audience.enter(1).take() == [said(2)]

    play(story)


def test_what_is_unknown_or_expired_there_is_so_here() -> None:
    async def story(scene: Scene) -> None:
        with pytest.raises(NotFound):
            await scene.finding.find(*S)
        scene.journal.found = opened(said(1))
        with pytest.raises(NotFound):
            await scene.finding.find("other", "s")
        scene.journal.found = ExpiredThere()
        with pytest.raises(Expired):
            await scene.finding.find(*S)

    play(story)


def test_while_the_journal_is_away_only_its_own_can_be_found() -> None:
    async def story(scene: Scene) -> None:
        scene.adopt(Stream("mine", "acme", Plain()))
        scene.journal.is_up = False
        with pytest.raises(Unreachable):
            await scene.finding.find(*S)
        assert (await scene.finding.find("acme", "mine")).stream.id == "mine"
        assert scene.journal.num_finds == 0 and not await scene.finding.is_elsewhere(*S)

    play(story)


def test_what_others_say_of_our_streams_is_done() -> None:
    async def story(scene: Scene) -> None:
        scene.adopt(Stream("s", "acme", Plain()))
        audience = scene.shelf.find(*S)
        scene.now_s += 9.0
        scene.journal.heard = [Call("acme", "gone"), Call(*S)]
        while scene.journal.heard:
            await asyncio.sleep(0.01)
        scene.now_s += 9.0
        audience.tick(scene.now_s, 1 << 20)
        assert not scene.cancelled, "it is read elsewhere"
        scene.journal.heard = [Call(*S, is_cancel=True)]
        while scene.journal.heard:
            await asyncio.sleep(0.01)
        assert scene.cancelled == ["cancelled"]

    play(story)


def test_what_another_gateway_took_over_is_looked_for_there_and_may_come_back() -> None:
    async def story(scene: Scene) -> None:
        scene.adopt(Stream("s", "acme", Plain()))
        scene.shelf.find(*S).stream.abandon(Failure("stream_moved", "elsewhere", 503))
        scene.journal.found = opened(said(1))
        assert (await scene.finding.find(*S)).stream.records == [said(1)]
        scene.journal.is_owned = False
        await scene.finding.sweep()
        assert scene.shelf.find(*S).stream.records == [said(1)]

    play(story)


def test_who_looks_for_nothing_keeps_nobody_waiting() -> None:
    """Ids that nobody has may be asked for thousands of times a second."""

    async def story(scene: Scene) -> None:
        scene.journal.found = opened(said(1))
        scene.journal.is_owned = False
        gate = asyncio.Event()
        find = scene.journal.find

        async def slow(tenant: str, stream: str) -> Kept | ExpiredThere | None:
            if stream != "s":
                await gate.wait()
            return await find(tenant, stream)

        scene.journal.find = slow  # type: ignore[method-assign]
        asking = [asyncio.create_task(scene.finding.find("acme", f"no-{number}")) for number in range(3)]
        await asyncio.sleep(0)
        audience = await asyncio.wait_for(scene.finding.find(*S), 60)
        assert audience.stream.records == [said(1)] and len(scene.revived) == 1
        gate.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in found] == [NotFound] * 3

    play(story)


def test_what_was_lost_while_it_was_read_along_is_looked_for_again_by_who_comes_then() -> None:
    async def story(scene: Scene) -> None:
        scene.journal.found = opened(said(1))

        async def gone(tenant: str, stream: str, after: int) -> AsyncIterator[Record]:
            return
            yield

        scene.journal.tail = gone  # type: ignore[method-assign]
        first = await scene.finding.find(*S)
        reader = first.enter()
        await first.stream.ended()
        *_, ending = reader.take()
        # Nothing of what there may be elsewhere is left out by who goes on behind this.
        assert ending.number == 1 and ending.ending is not None and ending.ending.failure is not None
        assert await scene.finding.find(*S) is not first
        first.leave(reader, scene.now_s)

    play(story)


def test_thousands_that_were_left_do_not_keep_the_loop() -> None:
    async def story(scene: Scene) -> None:
        kept = [Kept(birth(f"s{number}"), [said(1)], 1) for number in range(20)]
        beats: list[int] = []

        async def recover() -> list[Kept]:
            found, kept[:] = kept[:], []
            return found

        def revive(found: Kept) -> Stream:
            scene.now_s += 0.006
            return scene.restored(found)

        async def beat() -> None:
            while True:
                beats.append(scene.shelf.num_open)
                await asyncio.sleep(0)

        scene.journal.recover = recover  # type: ignore[method-assign]
        scene.revive = revive  # type: ignore[method-assign, assignment]
        beating = asyncio.create_task(beat())
        await scene.finding.sweep()
        beating.cancel()
        assert scene.shelf.num_open == 20 and len(set(beats)) >= 9

    play(story)
