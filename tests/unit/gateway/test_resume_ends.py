"""Streams that may be read on, and the requests that began them: when these are over, and whose each id is."""

import asyncio

from headrace.core.stages import Stage
from headrace.streams.record import Part
from tests.unit.gateway.scene import Scene
from tests.unit.gateway.stub import JSON, Call, turns
from tests.unit.gateway.test_resume import NAMED, OTHER, Readers, resumed


def test_the_request_is_over_when_its_stream_is_whoever_reads() -> None:
    """The first client left after a second; the stream ended after three, and its last reader took two more."""

    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        scene.clock.time_s += 1.0
        scene.call.leave()
        await turns()
        reader = await readers.come(1)
        scene.clock.time_s += 2.0
        reader.hold()
        assert scene.service.finished_stages == [] and scene.app.num_open == 2
        await scene.ends()
        scene.clock.time_s += 2.0
        reader.release()
        await turns()

    scene = resumed(story)
    (stages,) = scene.service.finished_stages
    assert sum(stages.values()) == 3.0
    text = scene.app.context.metrics.text().decode()
    assert 'route="/say",status="2xx",tenant="first"} 1.0' in text
    assert 'headrace_tokens_total{direction="out",model="tiny",tenant="first"} 2.0' in text


def test_the_first_client_that_sees_the_end_has_the_time_after_it() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await readers.come()
        scene.clock.time_s += 2.0
        scene.call.hold()
        await scene.ends()
        scene.clock.time_s += 0.5
        scene.call.release()

    (stages,) = resumed(story).service.finished_stages
    assert sum(stages.values()) == 2.5 and stages[Stage.CLIENT] == 0.5


def test_a_taken_id_is_not_given_twice() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        again = await asyncio.wait_for(Call(scene.app, "POST", "/say", {**JSON, **NAMED}, b'{"text":"b"}').run(), 60)
        assert again.headers["x-request-id"].startswith("req_")
        others = {**JSON, **NAMED, "authorization": OTHER["authorization"]}
        foreign = await asyncio.wait_for(Call(scene.app, "POST", "/say", others, b'{"text":"b"}').run(), 60)
        assert foreign.headers["x-request-id"] == "mine"
        await scene.says("a")
        await scene.ends()
        assert scene.answer.headers["x-request-id"] == "mine"
        assert (await readers.asks()).body == scene.answer.body
        scene.service.calls.remove("finished")
        scene.service.calls.remove("finished")

    resumed(story)


def test_at_the_end_of_the_drain_a_stream_without_readers_ends_as_well() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        await scene.says("a")
        scene.call.leave()
        await turns()
        scene.app.drain()
        scene.app.close_streams()
        await turns()

    assert resumed(story).service.calls == ["cancel overloaded", "finished"]


def test_a_server_that_is_cancelled_while_nobody_reads_leaves_no_work_behind() -> None:
    async def run() -> None:
        scene = Scene()
        await scene.start()
        scene.call.leave()
        await turns()
        assert not scene.task.done()
        scene.task.cancel()
        await asyncio.gather(scene.task, return_exceptions=True)
        assert scene.service.calls == ["cancel cancelled", "finished"]

    asyncio.run(run())


def test_late_readers_get_single_frames_in_writes_of_a_bounded_size() -> None:
    async def story(scene: Scene, readers: Readers) -> None:
        for number in range(1000):
            scene.stream.append([Part(0, text=f"{number}")])
            await asyncio.sleep(0)
        await scene.ends()
        answer = await readers.asks()
        assert answer.body == scene.answer.body and answer.body.count(b"id: ") == 1000
        assert [part.count(b"id: ") for part in answer.parts] == [256, 256, 256, 232]

    resumed(story)
