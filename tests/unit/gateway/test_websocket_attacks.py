"""What a hostile client does with a socket that is open to it: it costs what it may cost, and nobody else notices."""

import asyncio
import json
import random
from collections.abc import Callable

import pytest
from wsproto.events import CloseConnection, TextMessage

from headrace.core.errors import NotFound
from headrace.gateway.websocket import connection as connections
from headrace.gateway.websocket.session import MAX_CANCELLING, MAX_MISUNDERSTOOD, MAX_MOVING_BYTES, MAX_OPEN
from headrace.streams.audience import Audience
from headrace.streams.record import Failure
from tests.unit.gateway.socket_rig import Rig, SocketScene, end, play, say
from tests.unit.gateway.stub import turns


def test_streams_that_are_cancelled_by_the_thousand_are_looked_for_a_few_at_a_time() -> None:
    async def story(scene: SocketScene) -> None:
        gate, asked = asyncio.Event(), list[str]()

        async def find(tenant: str, id: str, *, after: int = 0) -> Audience:
            asked.append(id)
            await gate.wait()
            raise NotFound("There is no such stream.")

        scene.app.context.finding.find = find  # type: ignore[method-assign]
        messages = [json.dumps({"type": "cancel", "stream": f"s{number}"}) for number in range(100)]
        data = b"".join([scene._peer.send(TextMessage(message)) for message in messages])
        scene.connection.data_received(data)
        await turns()
        most = MAX_OPEN + MAX_CANCELLING
        assert len(asked) == scene.session.num_open == most
        assert {each["status"] for each in scene.heard} == {503}
        gate.set()
        await turns()
        assert [each["status"] for each in scene.heard] == [404] * most
        assert scene.session.num_open == 0

    play(story)


def test_a_socket_that_is_full_of_streams_may_still_cancel_others() -> None:
    async def story(scene: SocketScene) -> None:
        elsewhere = await scene.starts("elsewhere")
        for number in range(MAX_OPEN - 1):
            await scene.starts(f"{number}")
        await scene.says("cancel", stream="unknown")
        assert [each["status"] for each in scene.heard] == [404]
        await scene.says("cancel", stream=elsewhere.id)
        assert [each["type"] for each in scene.heard] == ["end"]

    play(story)


def test_a_stream_that_moved_ends_behind_the_last_frame_that_was_said() -> None:
    """Its next frame is said by another gateway: whoever resumes behind this end must get it."""

    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        await say(stream, "one", "two")
        stream.abandon(Failure("stream_moved", "Another gateway goes on with it.", 503))
        await turns()
        *frames, ending = scene.heard
        assert [frame["seq"] for frame in frames] == [1, 2]
        assert (ending["type"], ending["seq"], ending["error"]["code"]) == ("end", 2, "stream_moved")

    play(story)


def test_frames_that_could_not_be_worded_are_not_counted_as_said() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts(window=0)
        await say(stream, "one", "two", "\ud800", "four")
        await scene.says("window", stream=stream.id, size=2)
        assert [each["seq"] for each in scene.heard] == [1, 2]
        await scene.says("ack", stream=stream.id, seq=2)
        (ending,) = scene.heard
        assert (ending["type"], ending["seq"], ending["error"]["code"]) == ("end", 2, "internal_error")

    play(story)


def test_a_peer_that_says_goodbye_and_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.0)

    async def run() -> None:
        rig = Rig()
        aborted: list[bool] = []
        rig.pipe.abort = lambda: aborted.append(True)  # type: ignore[method-assign]
        rig.connection.pause_writing()
        rig.sends(CloseConnection(1000))
        assert rig.pipe.fate() == "closed" and not aborted
        await asyncio.sleep(0.01)
        assert aborted

    asyncio.run(run())


def test_goodbye_is_said_once_however_often_the_peer_says_it() -> None:
    async def run() -> None:
        rig = Rig()
        rig.receives(rig.peer.send(CloseConnection(1000)) * 3 + b"\x81\x81\x00\x00\x00\x00x")
        written = rig.pipe.written
        rig.receives(b"\x88\x80\x00\x00\x00\x00")
        assert rig.pipe.written == written == b"\x88\x02\x03\xe8" and rig.pipe.fate() == "closed"

    asyncio.run(run())


FRAMES = [
    b"\x81\x82\x00\x00\x00\x00{}",
    b"\x01\x80\x00\x00\x00\x00",
    b"\x00\x80\x00\x00\x00\x00",
    b"\x80\x81\x00\x00\x00\x00x",
    b"\x89\x80\x00\x00\x00\x00",
    b"\x8a\x80\x00\x00\x00\x00",
    b"\x88\x80\x00\x00\x00\x00",
    b"\x88\x82\x00\x00\x00\x00\x03\xe8",
    b"\x82\x81\x00\x00\x00\x00x",
    b"\x81\xfe\xff\xff\x00\x00\x00\x00",
]


@pytest.mark.parametrize("seed", range(20))
def test_no_noise_of_frames_and_bytes_raises_anything(seed: int) -> None:
    """Whatever order they come in, cut anywhere, whatever this end does meanwhile."""
    chance = random.Random(seed)

    def act(rig: Rig) -> None:
        acts: list[Callable[[], None]] = [
            rig.connection.pause_writing,
            rig.connection.resume_writing,
            lambda: rig.passes(chance.choice((0.01, 1.0, 11.0))),
            lambda: rig.connection.say(b"{}"),
            lambda: rig.connection.close(1001, "away") if chance.random() < 0.05 else None,
        ]
        chance.choice(acts)()

    async def run() -> None:
        for _ in range(50):
            rig = Rig()
            data = b"".join(
                [
                    chance.choice(FRAMES) if chance.random() < 0.95 else chance.randbytes(chance.randrange(20))
                    for _ in range(chance.randrange(1, 300))
                ]
            )
            at = 0
            while at < len(data) and not rig.pipe.fate():
                size = chance.randrange(1, 200)
                rig.receives(data[at : at + size])
                at += size
                act(rig)
                await asyncio.sleep(0)
            rig.connection.connection_lost(None)
            assert rig.talk.told.count("lost") == 1

    asyncio.run(run())


def test_an_ack_of_what_was_never_said_or_of_another_stream_moves_nothing() -> None:
    async def story(scene: SocketScene) -> None:
        one, two = await scene.starts("a", window=1), await scene.starts("b", window=1)
        await say(one, "1", "2")
        await say(two, "1", "2")
        assert len(scene.heard) == 2
        await scene.says("ack", stream=one.id, seq=2)
        await scene.says("ack", stream=one.id, seq=-1)
        await scene.says("ack", stream=one.id, seq=2**63)
        await scene.says("ack", stream="unknown", seq=1)
        assert [(each["type"], each["status"]) for each in scene.heard] == [("error", 400)] * 3
        await scene.says("ack", stream=two.id, seq=1)
        (frame,) = scene.heard
        assert (frame["stream"], frame["seq"]) == (two.id, 2)
        await end(one)
        await end(two)

    play(story)


def test_long_messages_that_say_little_are_none_of_ours() -> None:
    async def story(scene: SocketScene) -> None:
        stream = await scene.starts()
        for _ in range(MAX_MISUNDERSTOOD):
            await scene.says("ack", stream=stream.id, seq=0, padding="x" * MAX_MOVING_BYTES)
        assert [each["status"] for each in scene.heard] == [400] * MAX_MISUNDERSTOOD
        assert not scene.connection.is_open

    play(story)
