"""What a socket asks and hears: several streams at once, windows, resuming, and what becomes of those who do not keep up."""

from typing import Any

import pytest

from headrace.gateway.pace import HELD_S
from headrace.gateway.websocket.session import MAX_MISUNDERSTOOD, MAX_OPEN
from headrace.streams.record import Failure
from tests.unit.gateway.socket_rig import SocketScene, end, play, say
from tests.unit.gateway.stub import turns

WORDS = [f"{number} " for number in range(20)]
BODY = {"model": "tiny", "prompt": "Hello"}


def types(heard: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in heard]


def numbers(heard: list[dict[str, Any]]) -> list[int]:
    return [message["seq"] for message in heard if message["type"] == "frame"]


def test_a_stream_is_heard_from_its_start_to_its_end() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        await say(stream, "one", "two")
        await say(stream, "three")
        await end(stream)
        heard = scene.heard
        assert types(heard) == ["frame", "frame", "frame", "end"]
        assert [message["seq"] for message in heard] == [1, 2, 3, 4]
        assert {message["stream"] for message in heard} == {stream.id}
        assert all("headrace" in frame["chunk"] for frame in heard[:3])
        assert (heard[-1]["error"], heard[-1]["usage"]["completion_tokens"]) == (None, 2)
        assert scene.session.num_open == 0

    play(story)


def test_a_record_that_says_nothing_is_no_frame() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(window=1)
        await say(stream, "one", "", "", "two", "")
        assert numbers(scene.heard) == [1]
        await scene.says("ack", stream=stream.id, seq=1)
        assert numbers(scene.heard) == [4]
        await end(stream)
        await scene.says("ack", stream=stream.id, seq=4)
        assert types(scene.heard) == ["end"]

    play(story)


def test_a_window_is_never_exceeded_and_the_end_needs_no_room_in_it() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(window=8)
        await say(stream, *WORDS)
        assert numbers(scene.heard) == [1, 2, 3, 4, 5, 6, 7, 8]
        await scene.says("ack", stream=stream.id, seq=3)
        assert numbers(scene.heard) == [9, 10, 11]
        await scene.says("ack", stream=stream.id, seq=2)
        assert scene.heard == []
        await scene.says("window", stream=stream.id, size=10)
        assert numbers(scene.heard) == [12, 13]
        await scene.says("ack", stream=stream.id, seq=13)
        assert numbers(scene.heard) == [14, 15, 16, 17, 18, 19, 20]
        await scene.says("window", stream=stream.id, size=7)
        await end(stream)
        assert types(scene.heard) == ["end"]

    play(story)


def test_a_window_of_nothing_waits_and_one_without_bound_does_not() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(window=0)
        await say(stream, *WORDS)
        assert scene.heard == []
        await scene.says("window", stream=stream.id, size=None)
        assert numbers(scene.heard) == list(range(1, 21))

    play(story)


def test_what_was_not_sent_cannot_be_acknowledged() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(window=2)
        await say(stream, *WORDS)
        scene.heard  # noqa: B018 - the first two
        await scene.says("ack", stream=stream.id, seq=3)
        (refused,) = scene.heard
        assert (refused["stream"], refused["error"]["param"]) == (stream.id, "seq")
        await scene.says("ack", stream="another", seq=3)
        await scene.says("window", stream="another", size=3)
        assert scene.heard == []

    play(story)


def test_two_streams_on_one_socket_do_not_mix() -> None:
    async def story(scene: SocketScene) -> None:
        first, second = await scene.starts("a", window=2), await scene.starts("b")
        assert first.id != second.id
        for word in WORDS:
            await say(first, word)
            await say(second, word)
        await end(second)
        heard = scene.heard
        assert numbers([each for each in heard if each["stream"] == first.id]) == [1, 2]
        assert numbers([each for each in heard if each["stream"] == second.id]) == list(range(1, 21))
        assert types(heard).count("end") == 1

    play(story)


def test_a_stream_that_breaks_ends_once_with_its_error() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        await end(stream, Failure("unreachable", "lost", 503))
        (ending,) = scene.heard
        assert (ending["type"], ending["error"]["code"], ending["status"]) == ("end", "unreachable", 503)

    play(story)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"body": {"model": "other", "prompt": "x"}}, 404, "model"),
        ({"body": {"model": "tiny"}}, 400, "prompt"),
        ({"body": []}, 400, None),
        ({"body": {"model": "tiny", "prompt": "x", "temperature": 9}}, 400, "temperature"),
        ({"body": BODY, "headers": {"x-headrace-deadline-ms": "soon"}}, 400, "x-headrace-deadline-ms"),
    ],
)
def test_what_cannot_be_started_is_refused_as_http_would(fields: dict[str, Any], status: int, param: str) -> None:
    async def story(scene: SocketScene) -> None:
        await scene.says("start", id="a", api="completions", **fields)
        (refused,) = scene.heard
        assert (refused["type"], refused["id"], refused["status"]) == ("error", "a", status)
        assert refused["error"]["param"] == param
        # The socket is as good as before, and it was no misunderstanding.
        for _ in range(MAX_MISUNDERSTOOD):
            await scene.says("start", id="a", api="completions", **fields)
        assert len(scene.heard) == MAX_MISUNDERSTOOD and scene.connection.is_open
        await scene.starts()

    play(story)


def test_a_stream_is_asked_for_whatever_the_body_says() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(body={**BODY, "stream": False, "stream_options": {"include_usage": True}})
        await say(stream, "one")
        assert types(scene.heard) == ["frame"]

    play(story)


def test_a_client_names_its_stream_unless_the_name_is_taken() -> None:
    async def story(scene: SocketScene) -> None:
        first = await scene.starts("a", headers={"x-request-id": "mine"})
        second = await scene.starts("b", headers={"x-request-id": "mine"})
        assert first.id == "mine" != second.id

    play(story)


def test_after_ten_messages_that_are_none_of_ours_the_socket_closes() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        for _ in range(MAX_MISUNDERSTOOD - 1):
            await scene.says("nonsense", stream="s")
        heard = scene.heard
        assert types(heard) == ["error"] * (MAX_MISUNDERSTOOD - 1)
        assert all(each["stream"] == "s" and each["error"]["param"] == "type" for each in heard)
        await say(stream, "still here")
        assert types(scene.heard) == ["frame"]
        await scene.says("nonsense")
        assert not scene.connection.is_open

    play(story)


def test_so_many_streams_are_open_on_one_socket_and_no_more() -> None:
    async def story(scene: SocketScene) -> None:
        streams = [await scene.starts(str(number)) for number in range(MAX_OPEN)]
        for number in range(1000):
            await scene.says("start", id=str(number), api="completions", body=BODY)
            scene.clock.time_s += 1.0
        refused = scene.heard
        assert len(refused) == 1000 and {each["error"]["code"] for each in refused} == {"overloaded"}
        assert len(scene.service.streams) == MAX_OPEN
        await scene.says("resume", stream=streams[0].id)
        assert scene.heard[0]["status"] == 503
        await end(streams[0])
        assert types(scene.heard) == ["end"]
        await scene.starts("again")

    play(story, heartbeat_s=3600.0)


def test_a_stream_is_resumed_behind_any_frame() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        await say(stream, *WORDS)
        await end(stream)
        whole = scene.heard
        for after in range(len(whole)):
            await scene.says("resume", stream=stream.id, after=after)
            assert scene.heard == whole[after:]
        # Behind the end there is nothing but that it has ended.
        await scene.says("resume", stream=stream.id, after=len(whole))
        assert scene.heard == whole[-1:]

    play(story)


@pytest.mark.parametrize(
    ("stream_id", "after", "status", "code"),
    [("unknown", 0, 404, "not_found"), ("mine", 22, 400, "invalid_request"), ("mine", 2**53, 400, "invalid_request")],
)
def test_what_cannot_be_resumed_is_refused(stream_id: str, after: int, status: int, code: str) -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(headers={"x-request-id": "mine"})
        await say(stream, *WORDS)
        await end(stream)
        scene.heard  # noqa: B018 - all of it
        await scene.says("resume", stream=stream_id, after=after)
        (refused,) = scene.heard
        assert (refused["type"], refused["stream"], refused["status"]) == ("error", stream_id, status)
        assert refused["error"]["code"] == code
        assert refused["error"]["param"] == ("after" if status == 400 else None)

    play(story)


def test_a_stream_that_is_not_kept_any_more_is_gone() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        await end(stream)
        await scene.passes(301.0)
        scene.heard  # noqa: B018 - all of it
        await scene.says("resume", stream=stream.id)
        assert (scene.heard[0]["status"], scene.session.num_open) == (410, 0)

    play(story)


def test_a_stream_is_read_once_per_socket() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        await scene.says("resume", stream=stream.id)
        (refused,) = scene.heard
        assert (refused["stream"], refused["error"]["param"]) == (stream.id, "stream")
        await say(stream, "one")
        assert numbers(scene.heard) == [1]

    play(story)


def test_a_stream_is_cancelled() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(window=1)
        await say(stream, "one", "two")
        await scene.says("cancel", stream=stream.id)
        frame, ending = scene.heard
        assert (frame["seq"], ending["type"], ending["seq"]) == (1, "end", 1)
        assert (ending["error"]["code"], ending["status"]) == ("cancelled", 499)
        assert scene.service.calls == ["cancel cancelled", "finished"]
        await scene.says("cancel", stream=stream.id)
        assert scene.heard == []
        await scene.says("cancel", stream="unknown")
        assert scene.heard[0]["status"] == 404

    play(story)


def test_a_socket_that_is_lost_leaves_its_streams_their_grace() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        gone = await scene.starts("b", headers={"x-headrace-on-disconnect": "cancel"})
        await say(stream, "one")
        scene.connection.connection_lost(None)
        await turns()
        assert [gone.is_ended, stream.is_ended] == [True, False]
        await scene.passes(9.0)
        assert scene.service.calls.count("cancel disconnected") == 1
        await scene.passes(2.0)
        assert scene.service.calls.count("cancel disconnected") == 2

    play(story)


def test_a_full_window_pauses_the_stream_and_then_ends_it_for_that_reader() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(window=2)
        await say(stream, *WORDS)
        await scene.passes(HELD_S / 2)
        assert scene.service.calls == []
        await scene.passes(HELD_S)
        assert scene.service.calls == ["pause"]
        await scene.says("ack", stream=stream.id, seq=2)
        await scene.passes(59.0)
        # It took something, and goes on being paused until it has caught up.
        assert scene.service.calls == ["pause"]
        assert numbers(scene.heard) == [1, 2, 3, 4]
        await scene.passes(3.0)
        (ending,) = scene.heard
        assert (ending["type"], ending["seq"], ending["error"]["code"]) == ("end", 4, "client_too_slow")
        assert scene.service.calls[:2] == ["pause", "cancel client_too_slow"]
        assert scene.connection.is_open

    play(story)


def test_a_reader_that_takes_one_a_second_is_not_generated_far_ahead_of() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(window=8)
        for second in range(1, 61):
            for _ in range(4):
                # Twenty a second, while it is not paused.
                await say(stream, *(["word "] * 5 if scene.service.calls[-1:] != ["pause"] else []))
                await scene.passes(0.25)
            await scene.says("ack", stream=stream.id, seq=second)
        # It never waited for a frame, and its sequence ran each time for little more than the while of noticing.
        assert scene.service.calls == ["pause", "resume", "pause", "resume", "pause"]
        assert numbers(scene.heard) == list(range(1, 69))
        assert len(stream.records) <= 68 + 20 * (HELD_S + 1.0)

    play(story)


def test_without_a_window_only_who_takes_nothing_holds_the_stream_and_until_it_has_caught_up() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        scene.connection.pause_writing()
        await say(stream, *WORDS)
        await scene.passes(HELD_S + 0.5)
        assert scene.service.calls == ["pause"]
        (reader,) = scene.app.context.shelf.find(stream.tenant, stream.id)._readers
        reader.take(1)
        await scene.passes(0.5)
        assert scene.service.calls == ["pause"], "it took one of many"
        reader.take()
        await scene.passes(0.5)
        assert scene.service.calls == ["pause", "resume"]

    play(story)


def test_a_reader_that_catches_up_lets_the_stream_go_on() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(window=2)
        await say(stream, *WORDS)
        await scene.passes(2.0)
        await scene.says("window", stream=stream.id, size=None)
        await scene.passes(0.5)
        assert scene.service.calls == ["pause", "resume"]
        assert numbers(scene.heard) == list(range(1, 21))

    play(story)


def test_a_peer_that_does_not_read_stops_all_its_streams_and_is_cut_off() -> None:
    async def story(scene: SocketScene) -> None:
        streams = [await scene.starts(str(number)) for number in range(2)]
        scene.connection.pause_writing()
        for stream in streams:
            await say(stream, *WORDS)
        assert scene.heard == []
        await scene.passes(2.0)
        assert scene.service.calls == ["pause", "pause"]
        await scene.passes(60.0)
        assert types(scene.heard) == ["end", "end"]
        assert scene.service.calls.count("cancel client_too_slow") == 2
        await scene.passes(2.0)
        assert scene.pipe.fate() == "aborted"

    play(story)


def test_a_peer_that_reads_again_misses_nothing() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        scene.connection.pause_writing()
        await say(stream, *WORDS)
        await scene.passes(10.0)
        scene.connection.resume_writing()
        await turns()
        assert scene.texts == "".join(WORDS)

    play(story)
