"""How sockets end, and what is left of their streams: servers that stop, keys that are taken away, and the books."""

import logging

import pytest

from headrace.accounts.keys import KeyRing
from tests.unit.gateway.socket_rig import SocketScene, end, play, say
from tests.unit.gateway.stub import turns
from tests.unit.gateway.test_websocket_session import BODY, types


def test_a_draining_server_finishes_what_is_open_and_starts_nothing() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        scene.app.drain()
        scene.connection.shutdown()
        await scene.says("start", id="late", api="completions", body=BODY)
        (refused,) = scene.heard
        assert (refused["id"], refused["status"]) == ("late", 503)
        await say(stream, "one")
        assert scene.connection.is_open
        await end(stream)
        assert types(scene.heard) == ["frame", "end"]
        assert not scene.connection.is_open

    play(story)


def test_when_the_time_to_finish_is_over_streams_end_with_an_error() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        await say(stream, "one")
        scene.connection.shutdown()
        scene.app.drain()
        scene.app.close_streams()
        await turns()
        frame, ending = scene.heard
        assert (frame["seq"], ending["seq"], ending["error"]["code"]) == (1, 1, "overloaded")
        assert stream.is_ended and not scene.connection.is_open

    play(story)


def test_a_key_that_was_taken_away_starts_nothing_more() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        keys: KeyRing = scene.app._door._keys
        keys.replace(())
        await scene.says("start", id="b", api="completions", body=BODY)
        await scene.says("resume", stream=stream.id)
        await scene.says("cancel", stream="another of the tenant")
        assert [each["status"] for each in scene.heard] == [401, 400, 400]
        await scene.says("cancel", stream="another")
        assert [each["status"] for each in scene.heard] == [401]

    play(story)


def test_each_stream_is_in_the_books_as_any_request(caplog: pytest.LogCaptureFixture) -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        scene.clock.time_s += 0.5
        await say(stream, "one")
        scene.clock.time_s += 0.25
        await end(stream)
        await scene.says("resume", stream=stream.id)
        await scene.says("start", id="b", api="chat", body={})
        (stages,) = scene.service.finished_stages
        assert sum(stages.values()) == pytest.approx(0.75)
        text = scene.app.context.metrics.text().decode()
        for model, status in (("tiny", "2xx"), ("", "2xx"), ("", "4xx")):
            labels = f'model="{model}",route="/v1/stream",status="{status}",tenant="first"'
            assert f"headrace_requests_total{{{labels}}} 1.0" in text
        assert 'headrace_time_to_first_token_seconds_count{model="tiny",tenant="first"} 1.0' in text

    with caplog.at_level(logging.INFO, "headrace.gateway"):
        play(story)
    lines = [record.getMessage().split() for record in caplog.records]
    assert [line[:3] for line in lines] == [
        ["START", "/v1/stream", "200"],
        ["RESUME", "/v1/stream", "200"],
        ["START", "/v1/stream", "400"],
    ]


def test_a_stream_that_cannot_be_worded_ends_with_an_error_of_ours() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        await say(stream, "\ud800")
        (ending,) = scene.heard
        assert (ending["type"], ending["error"]["code"], stream.is_ended) == ("end", "internal_error", True)
        await scene.starts("b")

    play(story)
