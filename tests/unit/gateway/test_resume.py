"""A stream is read on, or again, by whoever of its tenant asks for it: the same bytes, however it was cut."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.streams.record import Record
from tests.unit.gateway.scene import LOST, Scene, play
from tests.unit.gateway.stub import AUTH, METRICS_KEY, Answer, Call, PlainDialect, turns

DONE = b"data: [DONE]\n\n"
PATH = "/v1/streams/mine"
NAMED = {"x-request-id": "mine"}
WORDS = [f"w{number} " for number in range(200)]
OTHER = {**AUTH, "authorization": f"Bearer {METRICS_KEY}"}


class Numbered(PlainDialect):
    """The ending has its number too, as the real dialects say it."""

    def frame(self, record: Record) -> bytes:
        frame = super().frame(record)
        return frame if frame.startswith(b"id: ") else b"id: %d\n" % record.number + frame


class Readers:
    """Those who come later."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.tasks: list[asyncio.Task[Answer]] = []

    async def come(self, after: object = None, *, path: str = PATH, held: bool = False, **headers: str) -> Call:
        given = {**AUTH, **{name.replace("_", "-"): value for name, value in headers.items()}}
        call = Call(self.scene.app, "GET", path, given, query="" if after is None else f"after={after}")
        if held:
            call.hold()
        self.tasks.append(asyncio.create_task(call.run()))
        await turns()
        return call

    async def asks(self, after: object = None, *, method: str = "GET", path: str = PATH, **headers: str) -> Answer:
        """Something that is answered at once."""
        given = {**AUTH, **{name.replace("_", "-"): value for name, value in headers.items()}}
        call = Call(self.scene.app, method, path, given, query="" if after is None else f"after={after}")
        return await asyncio.wait_for(call.run(), 60)

    async def all(self) -> list[Answer]:
        return await asyncio.wait_for(asyncio.gather(*self.tasks), 60)


def resumed(story: Callable[[Scene, Readers], Awaitable[None]], **settings: Any) -> Scene:
    """A stream called `mine`, and others who may read it."""

    async def told(scene: Scene) -> None:
        readers = Readers(scene)
        await story(scene, readers)
        await readers.all()

    return play(told, Scene(headers=NAMED, **settings))


def test_cut_after_every_frame_the_pieces_are_the_whole() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        pieces = []
        for number, word in enumerate(WORDS):
            reader = await readers.come(number)
            await scene.says(word)
            reader.leave()
            await turns()
            pieces.append(reader.answer.body)
        last = await readers.come(len(WORDS))
        await scene.ends()
        whole = scene.answer.body
        assert b"".join([*pieces, last.answer.body]) == whole and whole.endswith(DONE)
        assert all(piece.count(b"id: ") == 1 for piece in pieces)
        for number in range(len(WORDS)):
            assert (await readers.asks(number)).body == b"".join([*pieces[number:], last.answer.body])
        assert (await readers.asks()).body == whole

    assert resumed(story).service.calls == ["finished"]


def test_twenty_readers_get_the_same_bytes_whenever_they_came() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        for number in range(20):
            await scene.says(*WORDS[number * 10 : number * 10 + 10])
            await readers.come()
        await scene.ends()
        assert {answer.body for answer in await readers.all()} == {scene.answer.body}

    resumed(story)


def test_the_query_wins_over_the_header_and_neither_is_the_start() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a", "b", "c")
        await scene.ends()
        assert (await readers.asks(2, last_event_id="1")).body == b'id: 3\ndata: "c"\n\n' + DONE
        assert (await readers.asks(last_event_id="1")).body.startswith(b"id: 2\n")
        assert (await readers.asks(last_event_id="")).body.startswith(b"id: 1\n")

    resumed(story)


@pytest.mark.parametrize("bad", ["-1", "abc", "", "1.5", "5", "1000000000000000000", "%0A1", "+1", "١"])
def test_a_number_that_is_none_or_of_the_future_is_refused_by_name(bad: str) -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        for _ in range(2):
            answer = await readers.asks(bad)
            assert (answer.status, answer.error["param"]) == (400, "after")
            if bad and bad.isascii():
                answer = await readers.asks(last_event_id=bad)
                assert (answer.status, answer.error["param"]) == (400, "Last-Event-ID")
            if not scene.stream.is_ended:
                await scene.ends()
                await scene.passes(1.0)

    resumed(story)


def test_another_key_and_an_unknown_id_are_answered_alike() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        for method in ("GET", "HEAD", "DELETE"):
            others = await readers.asks(method=method, authorization=OTHER["authorization"])
            unknown = await readers.asks(method=method, path="/v1/streams/nothing")
            assert (others.status, others.body) == (unknown.status, unknown.body)
            assert others.status == 404
        assert (await readers.asks(method="HEAD")).status == 200
        await scene.ends()

    assert resumed(story).service.calls == ["finished"]


def test_a_stream_expires() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        await scene.ends()
        await scene.passes(59.0)
        assert (await readers.asks()).status == 200
        await scene.passes(1.0)
        answer = await readers.asks()
        assert (answer.status, answer.error["code"]) == (410, "stream_expired")
        assert (await readers.asks(authorization=OTHER["authorization"])).status == 404

    resumed(story, resume_s=60.0)


def test_who_has_read_everything_is_told_not_to_come_again() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        await scene.ends()
        answer = await readers.asks(2)
        assert (answer.status, answer.body) == (204, b"")

    resumed(story)


def test_a_whole_answer_cannot_be_read_again() -> None:
    async def story(scene: Scene) -> None:
        assert (await Readers(scene).asks()).status == 404
        await scene.ends()

    play(story, Scene("/whole", headers=NAMED))


def test_a_resume_within_the_grace_keeps_the_stream_and_the_grace_begins_again() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        scene.call.leave()
        await turns()
        await scene.passes(9.0)
        reader = await readers.come(1)
        await scene.passes(60.0)
        await scene.says("b")
        assert b'id: 2\ndata: "b"\n\n' in reader.answer.parts
        reader.leave()
        await turns()
        await scene.passes(9.0)
        assert scene.service.calls == []
        await scene.passes(1.5)

    assert resumed(story).service.calls == ["cancel disconnected", "finished"]


def test_while_anybody_reads_nothing_is_cancelled_however_long() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        reader = await readers.come()
        scene.call.leave()
        await turns()
        await scene.passes(1000.0)
        await scene.says("b")
        await scene.ends()
        assert reader.answer.body.endswith(b'id: 2\ndata: "b"\n\n' + DONE)

    assert resumed(story, disconnect_grace_s=0.0).service.calls == ["finished"]


def test_who_resumes_may_say_what_happens_without_it() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        reader = await readers.come(x_headrace_on_disconnect="finish")
        scene.call.leave()
        reader.leave()
        await turns()
        await scene.passes(1e6)
        assert scene.service.calls == []
        reader = await readers.come(x_headrace_on_disconnect="cancel")
        reader.leave()
        await turns()
        assert scene.service.calls == ["cancel disconnected", "finished"]

    resumed(story)


def test_a_slow_reader_does_not_stall_a_fast_one_and_is_cut_off_alone() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        slow = await readers.come(held=True)
        for _ in range(5):
            await scene.says("x" * 600)
            await scene.passes(13.0)
        assert scene.service.calls == [] and not slow.aborted
        slow.release()
        await turns()
        error, done = slow.answer.parts[-1].split(b"\n\n")[:2]
        assert b"client_too_slow" in error and done + b"\n\n" == DONE
        await scene.says("b")
        await scene.ends()
        assert scene.answer.body.endswith(b'id: 7\ndata: "b"\n\n' + DONE) and b"error" not in scene.answer.body

    assert resumed(story, max_unread_bytes=1000).service.calls == ["finished"]


def test_a_first_client_that_is_cut_off_can_go_on_where_it_was() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        scene.stream.dialect = Numbered()
        await scene.says("a")
        scene.call.hold()
        await readers.come()
        await scene.says("b", "c")
        await scene.passes(61.0)
        scene.call.release()
        await turns()
        number = int(scene.answer.parts[-1].split(b"\n")[0].removeprefix(b"id: "))
        assert b"client_too_slow" in scene.answer.parts[-1] and number == 3
        assert scene.service.calls == []
        await scene.says("d")
        await scene.ends()
        assert (await readers.asks(number)).body.startswith(b'id: 4\ndata: "d"\n\n')
        (stages,) = scene.service.finished_stages
        assert sum(stages.values()) == 61.0

    assert resumed(story, heartbeat_s=100.0).service.calls == ["finished"]


def test_it_pauses_when_all_readers_are_behind_and_goes_on_with_the_first_that_reads() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        scene.call.hold()
        other = await readers.come(held=True)
        await scene.says("x")
        await scene.says("y" * 2000)
        await scene.passes(0.25)
        assert scene.service.calls == ["pause"]
        other.release()
        await turns()
        await scene.passes(0.25)
        assert scene.service.calls == ["pause", "resume"]
        scene.call.release()
        await turns()
        await scene.ends()

    resumed(story, max_unread_bytes=1000)


def test_silence_is_broken_by_a_comment_for_every_reader() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        reader = await readers.come(1)
        assert reader.answer.status == 0
        await scene.passes(10.5)
        assert reader.answer.parts == [b": ping\n\n"] and scene.answer.parts[-1] == b": ping\n\n"
        await scene.ends()

    resumed(story)


def test_a_stream_that_broke_is_read_as_its_first_client_saw_it() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        await scene.ends(LOST)
        assert (await readers.asks()).body == scene.answer.body
        tail = await readers.asks(1)
        assert tail.status == 200 and tail.body == scene.answer.parts[-1]

    resumed(story)


def test_a_stream_that_failed_before_its_first_word_has_the_status_again() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.ends(LOST)
        answer = await readers.asks()
        assert (answer.status, answer.error) == (503, scene.answer.error)

    resumed(story)


def test_a_stream_can_be_stopped_by_who_lost_it() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        reader = await readers.come()
        answer = await readers.asks(method="DELETE")
        assert (answer.status, answer.body) == (204, b"")
        await turns()
        assert reader.answer.body == scene.answer.body and scene.answer.body.endswith(DONE)
        assert (await readers.asks(method="DELETE")).status == 204

    assert resumed(story).service.calls == ["cancel cancelled", "finished"]
