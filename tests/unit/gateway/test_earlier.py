"""What an earlier life of a gateway left in its own journal: asked for, or gone on with, once, and for its tenant."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headrace.core.errors import Expired, InvalidInput, NotFound
from headrace.core.stages import StageClock
from headrace.gateway.earlier import Earlier
from headrace.gateway.finding import Finding
from headrace.streams.file_journal import FileJournal
from headrace.streams.journal import Entry, Kept
from headrace.streams.record import Record
from headrace.streams.shelf import Shelf
from headrace.streams.stream import Stream
from tests.builders import TestClock
from tests.unit.gateway.stub import StubService, gateway, turns
from tests.unit.gateway.test_finding import Plain
from tests.unit.streams.journals import SECRET, Wall, birth, entry, said, whole

WINDOW_S = 300.0


class Scene:
    """One life of a gateway over a folder that earlier ones wrote."""

    def __init__(self, folder: Path, wall: Wall) -> None:
        self.wall = wall
        self.shelf = Shelf(wall)
        self.journal = FileJournal(folder, SECRET, window_s=WINDOW_S, clock=wall, wall_s=wall)
        self.earlier = Earlier(self.shelf, self, self.adopt, self.journal)
        self.finding = Finding(self.shelf, self, self.adopt, wall, earlier=self.earlier)
        self.revived: list[str] = []
        self.graces_s: dict[str, float | None] = {}
        self.is_readable = True

    def restored(self, kept: Kept) -> Stream:
        if not self.is_readable:
            raise InvalidInput("of another version")
        stream = Stream(kept.birth.stream, kept.birth.tenant, Plain())
        stream.restore(kept.records)
        return stream

    def revive(self, kept: Kept) -> Stream | None:
        raise AssertionError(kept)

    async def revive_beside(self, kept: Kept) -> Stream | None:
        await asyncio.sleep(0)
        self.revived.append(kept.birth.stream)
        return self.restored(kept) if self.is_readable else None

    def adopt(self, stream: Stream, grace_s: float | None) -> None:
        self.graces_s[stream.id] = grace_s
        self.shelf.put(stream, self, grace_s=10.0)

    def cancel(self, stream: Stream, why: str) -> None: ...

    def pause(self, stream: Stream) -> None: ...

    def resume(self, stream: Stream) -> None: ...


def play(folder: Path, *entries: Entry, story: Callable[[Scene], Awaitable[None]], later_s: float = 0.0) -> None:
    """A life that says this and dies; and, so much later, the next."""

    async def whole_story() -> None:
        wall = Wall()
        before = FileJournal(folder, SECRET, window_s=WINDOW_S, clock=wall, wall_s=wall)
        for one in entries:
            before.append([one], lambda lost: None)
        await before.close()
        wall.time_s += later_s
        scene = Scene(folder, wall)
        try:
            await story(scene)
        finally:
            await scene.journal.close()

    asyncio.run(whole_story())


def read(scene: Scene, stream: str, after: int = 0) -> list[Record]:
    return scene.shelf.find("acme", stream).enter(after).take()


def test_what_ended_is_taken_from_the_journal_when_somebody_asks(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.finding.run()
        assert (scene.revived, scene.shelf.num_open, scene.shelf.num_kept) == ([], 0, 0)
        audience = await scene.finding.find("acme", "s")
        assert [record.number for record in audience.enter(1).take()] == [2, 3]
        assert await scene.finding.find("acme", "s") is audience
        for stranger in (("rival", "s"), ("acme", "never")):
            with pytest.raises(NotFound):
                await scene.finding.find(*stranger)
        assert scene.revived == []

    play(tmp_path, *whole(), story=story)


def test_who_asks_for_an_open_stream_does_not_wait_for_its_turn_and_it_is_revived_once(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        finding = scene.finding
        first, second, _ = await asyncio.gather(finding.find("acme", "b"), finding.find("acme", "b"), finding.run())
        assert first is second
        assert sorted(scene.revived) == ["a", "b"]
        assert read(scene, "a") == [said(1), said(2)] and read(scene, "b") == [said(1)]

    play(tmp_path, entry(1, "a"), entry(2, "a"), entry(1, "b"), story=story)


def test_what_has_expired_is_not_what_never_was(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        for name in ("s", "open"):
            with pytest.raises(Expired):
                await scene.finding.find("acme", name)
        with pytest.raises(NotFound):
            await scene.finding.find("acme", "never")
        assert not await scene.finding.is_elsewhere("acme", "s")

    play(tmp_path, *whole(), entry(1, "open"), story=story, later_s=WINDOW_S)


def test_an_id_that_can_still_be_read_is_not_given_to_another_request(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        assert [await scene.finding.is_elsewhere("acme", name) for name in ("s", "open", "new")] == [True, True, False]
        assert not await scene.finding.is_elsewhere("rival", "s")

    play(tmp_path, *whole(), entry(1, "open"), story=story)


def test_the_grace_that_a_client_chose_comes_back_with_its_stream(tmp_path: Path) -> None:
    def born(name: str, grace_s: float | None) -> Entry:
        return Entry("acme", name, said(1), birth(name, grace_s=grace_s))

    async def story(scene: Scene) -> None:
        await scene.finding.run()
        assert scene.graces_s == {"finish": float("inf"), "cancel": 0.0, "any": None}

    play(tmp_path, born("finish", float("inf")), born("cancel", 0.0), born("any", None), story=story)


def test_what_cannot_be_worded_any_more_has_expired_and_holds_up_nobody(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        scene.is_readable = False
        for name in ("s", "open"):
            with pytest.raises(Expired):
                await scene.finding.find("acme", name)
        await scene.finding.run()
        assert scene.shelf.num_open == 0

    play(tmp_path, *whole(), entry(1, "open"), entry(1, "other"), story=story)


def test_a_stream_of_this_life_that_is_not_on_the_shelf_yet_is_left_alone(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        assert scene.shelf.take_id("acme", "new")
        scene.journal.append([entry(1, "new")], lambda lost: None)
        with pytest.raises(NotFound):
            await scene.finding.find("acme", "new")
        assert scene.revived == []

    play(tmp_path, story=story)


class Adopting(StubService):
    """What was adopted has no clock but its own."""

    def parting(self, stream: Stream) -> None:
        return None

    def finished(self, stream: Stream, stages: StageClock | None = None) -> None:
        self.calls.append("finished")


@pytest.mark.parametrize(("grace_s", "lives_s"), [(0.0, 10.0), (None, 10.0), (60.0, 60.0), (float("inf"), 1e9)])
def test_who_was_lost_with_the_gateway_has_time_to_come_back_whatever_was_chosen(
    grace_s: float | None, lives_s: float
) -> None:
    async def story() -> None:
        service, clock = Adopting(), TestClock()
        app = gateway(service, clock=clock, disconnect_grace_s=10.0)
        app.adopt(Stream("s", "first", Plain()), grace_s)
        clock.time_s += lives_s - 0.1
        app.context.shelf.tick(clock.time_s)
        assert service.calls == []
        clock.time_s += 0.2
        app.context.shelf.tick(clock.time_s)
        assert service.calls == ([] if grace_s == float("inf") else ["cancel disconnected"])
        await turns()

    asyncio.run(story())


def test_who_came_back_and_leaves_is_taken_at_its_word() -> None:
    async def story() -> None:
        service, clock = Adopting(), TestClock()
        app = gateway(service, clock=clock, disconnect_grace_s=10.0)
        app.adopt(Stream("s", "first", Plain()), 0.0)
        audience = app.context.shelf.find("first", "s")
        reader = audience.enter()
        clock.time_s += 1.0
        audience.leave(reader, clock.time_s)
        assert service.calls == ["cancel disconnected"]
        await turns()

    asyncio.run(story())
