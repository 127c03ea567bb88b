"""A stream over HTTP: when bytes are written, and what happens when nobody reads them."""

import asyncio
import threading

import msgspec
import pytest

from headrace.core.stages import Stage
from headrace.streams.record import Alternative, Part, Record, Score
from headrace.streams.stream import Stream
from tests.unit.gateway.scene import LOST, Scene, play
from tests.unit.gateway.stub import JSON, PlainDialect, StubService, ask, gateway, turns

DONE = b"data: [DONE]\n\n"


def test_each_step_is_written_at_once_and_ends_once() -> None:
    async def story(scene: Scene) -> None:
        assert scene.answer.status == 0
        await scene.says("a")
        assert scene.answer.parts == [b'id: 1\ndata: "a"\n\n']
        await scene.says("b")
        await scene.ends()

    answer = play(story).answer
    assert answer.parts == [b'id: 1\ndata: "a"\n\n', b'id: 2\ndata: "b"\n\n', DONE]
    assert answer.is_complete
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert "receive;dur=" in answer.headers["server-timing"]


def test_what_came_while_a_write_waited_is_one_write() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a")
        scene.call.hold()
        await scene.says("b")
        await scene.says("c")
        await scene.says("d")
        scene.call.release()
        await turns()
        await scene.ends()

    assert play(story).answer.parts[1:3] == [b'id: 2\ndata: "b"\n\n', b'id: 3\ndata: "c"\n\nid: 4\ndata: "d"\n\n']


def test_a_reader_that_lags_gets_one_merged_frame() -> None:
    async def story(scene: Scene) -> None:
        scene.call.hold()
        await scene.says("a")
        await scene.says(*"bcdefghijklm")
        scene.call.release()
        await turns()
        await scene.ends()

    assert play(story).answer.parts[1] == b'id: 13\ndata: "bcdefghijklm"\n\n'


def test_merging_keeps_the_ending_apart() -> None:
    async def story(scene: Scene) -> None:
        scene.call.hold()
        await scene.says("a")
        await scene.says(*"bcdefghijklm")
        await scene.ends()
        scene.call.release()

    assert play(story).answer.parts[1:] == [b'id: 13\ndata: "bcdefghijklm"\n\n' + DONE]


def test_deltas_within_the_interval_are_one() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a")
        await scene.says("b")
        await scene.says("c")
        assert len(scene.answer.parts) == 1
        while len(scene.answer.parts) < 2:
            await asyncio.sleep(0.001)
        await scene.ends()

    assert play(story, Scene(coalesce_s=0.5)).answer.parts[1] == b'id: 3\ndata: "bc"\n\n'


def test_silence_is_broken_by_a_comment() -> None:
    async def story(scene: Scene) -> None:
        await scene.passes(9.0)
        assert scene.answer.status == 0
        await scene.passes(1.5)
        assert scene.answer.parts == [b": ping\n\n"]
        await scene.passes(1.0)
        await scene.says("a")
        await scene.passes(9.0)
        assert len(scene.answer.parts) == 2
        await scene.ends()

    play(story)


def test_what_fails_before_the_first_frame_is_an_error_with_a_status() -> None:
    async def story(scene: Scene) -> None:
        await scene.ends(LOST)

    answer = play(story).answer
    assert (answer.status, answer.error["code"]) == (503, "unreachable")
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1500")


def test_what_fails_later_is_one_error_frame() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a")
        await scene.ends(LOST)

    answer = play(story).answer
    assert answer.status == 200
    error, done = answer.parts[1].split(b"\n\n")[:2]
    assert msgspec.json.decode(error.removeprefix(b"data: "))["error"]["type"] == "overloaded"
    assert done + b"\n\n" == DONE


def test_a_client_that_left_has_its_grace() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a")
        scene.call.leave()
        await turns()
        await scene.passes(9.0)
        assert scene.service.calls == []
        await scene.says("b")
        await scene.passes(2.0)

    scene = play(story)
    assert scene.service.calls == ["cancel disconnected", "finished"]
    assert len(scene.answer.parts) == 1


def test_within_the_grace_a_stream_may_end_by_itself() -> None:
    async def story(scene: Scene) -> None:
        scene.call.leave()
        await turns()
        await scene.ends()

    assert play(story).service.calls == ["finished"]


def test_without_grace_it_is_cancelled_at_once() -> None:
    async def story(scene: Scene) -> None:
        scene.call.leave()
        await turns()
        assert scene.service.calls == ["cancel disconnected", "finished"]

    play(story, Scene(disconnect_grace_s=0.0))
    play(story, Scene(headers={"x-headrace-on-disconnect": "cancel"}))


def test_a_client_may_ask_to_finish_without_it() -> None:
    async def story(scene: Scene) -> None:
        scene.call.leave()
        await turns()
        await scene.passes(1e6)
        assert scene.service.calls == []
        await scene.ends()

    play(story, Scene(headers={"x-headrace-on-disconnect": "finish"}))


def test_unread_text_pauses_and_reading_resumes() -> None:
    async def story(scene: Scene) -> None:
        scene.call.hold()
        await scene.says("a")
        await scene.says("x" * 600, "x" * 600)
        await scene.passes(0.25)
        assert scene.service.calls == ["pause"]
        await scene.passes(0.25)
        assert scene.service.calls == ["pause"]
        scene.call.release()
        await turns()
        await scene.passes(0.25)
        assert scene.service.calls == ["pause", "resume"]
        await scene.ends()

    play(story, Scene(max_unread_bytes=1000))


def test_who_never_reads_is_told_and_cut() -> None:
    async def story(scene: Scene) -> None:
        scene.call.hold()
        await scene.says("a")
        await scene.says("x" * 2000)
        await scene.passes(0.25)
        await scene.passes(61.0)
        assert scene.service.calls == ["pause", "cancel client_too_slow"]
        assert not scene.call.aborted
        await scene.passes(3.0)
        assert scene.call.aborted

    play(story, Scene(max_unread_bytes=1000))


def test_who_reads_again_after_the_bound_gets_the_error_frame() -> None:
    async def story(scene: Scene) -> None:
        scene.call.hold()
        await scene.says("a")
        await scene.says("x" * 2000)
        await scene.passes(0.25)
        await scene.passes(61.0)
        scene.call.release()
        await turns()

    answer = play(story, Scene(max_unread_bytes=1000)).answer
    assert b"client_too_slow" in answer.parts[-1]
    assert answer.body.count(DONE) == 1
    assert answer.is_complete


def test_a_write_that_waits_too_long_is_cut_however_little_is_unread() -> None:
    async def story(scene: Scene) -> None:
        scene.call.hold()
        await scene.says("a")
        await scene.says("b")
        await scene.passes(59.0)
        assert scene.service.calls == []
        await scene.passes(2.0)
        assert scene.service.calls == ["cancel client_too_slow"]
        await scene.passes(3.0)
        assert scene.call.aborted

    play(story)


def test_a_reader_broken_off_here_is_told_the_number_of_the_last_frame_it_was_sent() -> None:
    """Not of the ending: who resumes behind that one would miss what was never sent."""

    class Numbered(PlainDialect):
        def frame(self, record: Record) -> bytes:
            return b"%d " % record.number + super().frame(record)

    async def story(scene: Scene) -> None:
        scene.stream.dialect = Numbered()
        await scene.says("a")
        scene.call.hold()
        await scene.says("b")
        await scene.says("c", "d")
        scene.app.close_streams()
        assert [record.number for record in scene.stream.records if record.ending is not None] == [5]
        scene.call.release()
        await turns()

    scene = play(story)
    assert scene.answer.parts[-1].startswith(b"2 ") and b"shutting down" in scene.answer.parts[-1]


def test_a_stream_that_had_ended_well_is_not_made_to_fail_by_who_reads_it_late() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a")
        scene.call.hold()
        await scene.says("b")
        await scene.ends()
        scene.app.close_streams()
        scene.call.release()
        await turns()

    answer = play(story).answer
    assert answer.body.endswith(b'id: 2\ndata: "b"\n\n' + DONE) and b"error" not in answer.body


def test_a_frame_with_many_scores_is_worded_beside_the_loop() -> None:
    threads: list[int] = []

    class Noting(PlainDialect):
        def frame(self, record: Record) -> bytes:
            threads.append(threading.get_ident())
            return super().frame(record)

    async def story(scene: Scene) -> None:
        scene.stream.dialect = Noting()
        await scene.says("a")
        scene.stream.append([Part(0, text="b", scores=(Score(1, b"b", -1.0, (Alternative(2, b"c", -2.0),)),) * 600)])
        while len(scene.answer.parts) < 2:
            await asyncio.sleep(0.001)
        await scene.ends()

    scene = play(story, Scene(headers={"x-scored": "1"}))
    assert [thread == threading.get_ident() for thread in threads] == [True, False, True]
    assert scene.answer.parts[1] == b'id: 2\ndata: "b"\n\n'


def test_a_dialect_that_raises_ends_its_stream_alone_with_an_error_frame() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a")
        frame = scene.stream.dialect.frame

        def broken(record: object) -> bytes:
            scene.stream.dialect.frame = frame  # type: ignore[method-assign]
            raise KeyError("secret")

        scene.stream.dialect.frame = broken  # type: ignore[method-assign]
        await scene.says("b")

    scene = play(story)
    assert b"internal_error" in scene.answer.parts[-1] and b"secret" not in scene.answer.body
    assert scene.answer.is_complete
    assert scene.service.calls == ["cancel internal_error", "finished"]


def test_an_answer_that_cannot_be_looked_after_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def pause(self: StubService, stream: Stream) -> None:
        raise OSError("no way to the worker")

    async def story(scene: Scene) -> None:
        scene.call.hold()
        await scene.says("a")
        await scene.says("x" * 2000)
        await scene.passes(0.25)
        scene.call.release()
        await turns()
        await scene.passes(0.25)
        await scene.ends()

    monkeypatch.setattr(StubService, "pause", pause)
    assert play(story, Scene(max_unread_bytes=1000)).answer.is_complete


def test_at_the_end_of_the_drain_streams_are_closed_with_an_error() -> None:
    async def story(scene: Scene) -> None:
        await scene.says("a")
        scene.app.drain()
        scene.app.close_streams()
        await turns()

    scene = play(story)
    assert b"shutting down" in scene.answer.parts[-1]
    assert scene.answer.body.endswith(DONE)


def test_a_task_that_is_cancelled_leaves_no_work_behind() -> None:
    async def run() -> None:
        for path in ("/say", "/whole"):
            scene = Scene(path)
            await scene.start()
            scene.task.cancel()
            await asyncio.gather(scene.task, return_exceptions=True)
            assert scene.service.calls == ["cancel cancelled", "finished"]
            assert len(scene.app.context.pulse) == 0

    asyncio.run(run())


def test_stages_are_contiguous_and_the_client_has_its_own() -> None:
    async def story(scene: Scene) -> None:
        scene.clock.time_s += 2.0
        scene.call.hold()
        await scene.ends()
        scene.clock.time_s += 0.5
        scene.call.release()

    for path in ("/say", "/whole"):
        (stages,) = play(story, Scene(path)).service.finished_stages
        assert sum(stages.values()) == 2.5
        assert stages[Stage.CLIENT] == 0.5


def test_injected_time_is_in_its_stage() -> None:
    for stage in (Stage.RECEIVE, Stage.AUTHENTICATE, Stage.ADMIT, Stage.CLIENT):
        for path in ("/say", "/whole"):
            service = StubService()
            app = gateway(service, inject={stage.value: 0.05})
            assert ask(app, "POST", path, JSON, b'{"text":"a b"}').status == 200
            (stages,) = service.finished_stages
            assert max(stages, key=stages.__getitem__) is stage
            assert stages[stage] >= 0.05
