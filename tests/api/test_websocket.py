"""The WebSocket face of a real server: it says what server-sent events say, no more than its window at once, and goes on
where a connection broke off, on whatever face."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wsproto.events import Ping, Pong, TextMessage

from tests.api.conftest import FAKE
from tests.api.live_server import LiveServer, eventually, live_server, written
from tests.socket_client import Closed, Refused, SocketClient, opened

pytestmark = pytest.mark.api

Frames = list[tuple[int, Any]]
NUM_TOKENS = 200
CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "Go on."}],
    "max_tokens": NUM_TOKENS,
    "seed": 7,
}
MASK = b"\x00\x00\x00\x00"


def events(server: LiveServer, method: str, path: str, body: Any = None) -> Iterator[tuple[int | None, Any, str]]:
    """Number, JSON and stream of each event, up to `[DONE]`."""
    with server.connect() as connection:
        response = server.send(connection, method, path, body)
        assert response.status == 200, response.read()
        stream_id = response.headers["x-request-id"]
        number = None
        for line in response:
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"id: "):
                number = int(line[4:])
            elif line.startswith(b"data: "):
                yield number, json.loads(line[6:]), stream_id
    raise AssertionError("the stream broke off")


def chosen(frames: list[dict[str, Any]]) -> Frames:
    return [(frame["seq"], frame["chunk"]["choices"]) for frame in frames if frame["type"] == "frame"]


async def start(client: SocketClient, id: str = "a", **fields: Any) -> str:
    body = {**CHAT, **fields.pop("body", {})}
    await client.say(type="start", id=id, api="chat", body=body, **fields)
    started = await client.hear()
    assert (started["type"], started["id"], started["model"]) == ("started", id, "fake"), started
    stream_id: str = started["stream"]
    return stream_id


@pytest.fixture(scope="module")
def said(fake_server: LiveServer) -> Frames:
    """The stream as server-sent events tell it."""
    return [(number or 0, chunk["choices"]) for number, chunk, _ in _posted(fake_server)]


def _posted(server: LiveServer) -> Iterator[tuple[int | None, Any, str]]:
    return events(server, "POST", "/v1/chat/completions", {**CHAT, "stream": True})


def test_frames_are_those_of_server_sent_events(fake_server: LiveServer, said: Frames) -> None:
    async def story() -> None:
        async with opened(fake_server.port, fake_server.key) as client:
            stream_id = await start(client)
            heard = await client.hear_end()
            assert chosen(heard) == said and len(said) >= NUM_TOKENS / 2
            *frames, end = heard
            assert end["seq"] == frames[-1]["seq"] + 1 and end["error"] is None
            assert end["usage"]["completion_tokens"] == NUM_TOKENS
            assert end["stages_ms"]["decode"] > 0.0
            for frame in frames:
                metadata = frame["chunk"]["headrace"]
                assert (metadata["request_id"], metadata["chunk_seq"]) == (stream_id, frame["seq"])
                assert frame["stream"] == stream_id

        def look() -> Any:
            status, found = fake_server.ask("GET", f"/v1/requests/{stream_id}/explain")
            return found if status == 200 else None

        explained = eventually(look, "it is not explained")
        assert sum(explained["stages"].values()) == pytest.approx(explained["total_s"], abs=1e-4)

    asyncio.run(story())


def test_a_window_of_eight_is_never_exceeded(fake_server: LiveServer, said: Frames) -> None:
    async def story() -> None:
        async with opened(fake_server.port, fake_server.key) as client:
            stream_id = await start(client, window=8)
            frames: list[dict[str, Any]] = []
            num_acknowledged = 0
            while True:
                # All that comes without being asked for: a full window, or the rest.
                while len(frames) < min(num_acknowledged + 8, len(said)):
                    frames.append(await client.hear())
                if len(frames) == len(said):
                    break
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(client.hear(), 0.02)
                num_acknowledged = len(frames) - 3
                await client.say(type="ack", stream=stream_id, seq=frames[num_acknowledged - 1]["seq"])
            assert chosen(frames) == said
            assert (await client.hear())["type"] == "end"

    asyncio.run(story())


def test_cut_after_every_frame_and_resumed_it_is_the_same(fake_server: LiveServer, said: Frames) -> None:
    async def story() -> None:
        async with opened(fake_server.port, fake_server.key) as client:
            stream_id = await start(client)
            frames = [await client.hear()]
        while frames[-1]["type"] == "frame":
            async with opened(fake_server.port, fake_server.key) as client:
                await client.say(type="resume", stream=stream_id, after=frames[-1]["seq"])
                frames.append(await client.hear())
        assert chosen(frames) == said
        assert frames[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        # It was computed once.
        assert frames[-1]["seq"] == said[-1][0] + 1

    asyncio.run(story())


def test_from_events_to_a_socket_and_back(fake_server: LiveServer, said: Frames) -> None:
    async def story() -> None:
        posted = _posted(fake_server)
        heard: Frames = []
        stream_id = ""
        for number, chunk, named in posted:
            stream_id = named
            heard.append((number or 0, chunk["choices"]))
            if len(heard) == 50:
                break
        posted.close()  # type: ignore[attr-defined]
        async with opened(fake_server.port, fake_server.key) as client:
            await client.say(type="resume", stream=stream_id, after=heard[-1][0], window=50)
            frames = [await client.hear() for _ in range(50)]
            assert all("headrace" in frame["chunk"] for frame in frames)
            heard += chosen(frames)
        path = f"/v1/streams/{stream_id}?after={heard[-1][0]}"
        rest = [(number, chunk) for number, chunk, _ in events(fake_server, "GET", path)]
        # Events were asked for without metadata, and go on without.
        assert not any("headrace" in chunk for _, chunk in rest)
        assert heard + [(number, chunk["choices"]) for number, chunk in rest] == said

    asyncio.run(story())


def test_from_a_socket_to_events(fake_server: LiveServer, said: Frames) -> None:
    async def story() -> None:
        async with opened(fake_server.port, fake_server.key) as client:
            stream_id = await start(client, headers={"x-request-id": "begun-on-a-socket"})
            assert stream_id == "begun-on-a-socket"
            heard = chosen([await client.hear() for _ in range(10)])
        rest = events(fake_server, "GET", f"/v1/streams/{stream_id}?after={heard[-1][0]}")
        assert heard + [(number or 0, chunk["choices"]) for number, chunk, _ in rest] == said

    asyncio.run(story())


def test_two_streams_share_a_socket(fake_server: LiveServer, said: Frames) -> None:
    async def story() -> None:
        async with opened(fake_server.port, fake_server.key) as client:
            for id in ("a", "b"):
                await client.say(type="start", id=id, api="chat", body=CHAT)
            heard: list[dict[str, Any]] = []
            while sum(each["type"] == "end" for each in heard) < 2:
                heard.append(await client.hear())
            streams = {each["id"]: each["stream"] for each in heard if each["type"] == "started"}
            assert set(streams) == {"a", "b"} and streams["a"] != streams["b"]
            for stream_id in streams.values():
                assert chosen([each for each in heard if each.get("stream") == stream_id]) == said

    asyncio.run(story())


def test_what_is_cancelled_is_free_at_once(fake_server: LiveServer) -> None:
    async def story() -> None:
        async with opened(fake_server.port, fake_server.key) as client:
            stream_id = await start(client, body={"max_tokens": 3000})
            await client.hear()
            await client.say(type="cancel", stream=stream_id)
            end = (await client.hear_end())[-1]
            assert (end["error"]["code"], end["status"]) == ("cancelled", 499)
            eventually(lambda: fake_server.figure("headrace_replica_running") == 0, "it still runs")
            # The socket is as good as before.
            await start(client, "b")

    asyncio.run(story())


async def _flood(client: SocketClient, data: bytes) -> int:
    """The code that it is closed with while it sends this over and over."""

    async def flood() -> None:
        while await client.send_bytes(data):
            await asyncio.sleep(0)

    flooding = asyncio.create_task(flood())
    try:
        return await client.closing()
    finally:
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


@pytest.mark.parametrize(
    ("opening", "data", "codes"),
    [
        pytest.param(b"\x81\xff" + (100 << 20).to_bytes(8, "big") + MASK, b"x" * 65536, {1009}, id="huge frame"),
        pytest.param(b"\x01\x80" + MASK, b"\x00\x80" + MASK, {1008}, id="endless empty fragments"),
        pytest.param(b"", b"\x00\x81" + MASK + b"x", {1002}, id="fragments of nothing"),
        pytest.param(b"", b"\x89\x80" + MASK, {1008}, id="ping flood"),
        pytest.param(b"", b"\x8a\x80" + MASK, {1008}, id="pong flood"),
        pytest.param(b"", b"\x81\x81" + MASK + b"\xff", {1007}, id="bad UTF-8"),
        pytest.param(b"", b"\xc1\x81" + MASK + b"x", {1002}, id="compressed"),
        pytest.param(b"", b"\x81\x82" + MASK + b"{}", {1008}, id="no message of ours"),
    ],
)
def test_attackers_are_shut_out_and_others_do_not_notice(
    fake_server: LiveServer, said: Frames, opening: bytes, data: bytes, codes: set[int]
) -> None:
    async def story() -> None:
        async with (
            opened(fake_server.port, fake_server.key) as client,
            opened(fake_server.port, fake_server.key) as bad,
        ):
            await start(client)
            await bad.send_bytes(opening)
            # Small frames come many to a packet.
            code, heard = await asyncio.gather(_flood(bad, data * max(1, 4096 // len(data))), client.hear_end())
            # A peer that goes on sending may be cut off before it reads why.
            assert code in codes | {1006}
            assert chosen(heard) == said

    asyncio.run(story())
    assert fake_server.ask("GET", "/live")[0] == 200


def test_a_thousand_starts_on_one_socket(fake_server: LiveServer) -> None:
    async def story() -> None:
        async with opened(fake_server.port, fake_server.key) as client:
            body = {**CHAT, "max_tokens": 3000}
            start = {"type": "start", "id": "x", "api": "chat", "body": body, "window": 0}
            message = TextMessage(json.dumps({**start, "headers": {"x-headrace-on-disconnect": "cancel"}}))
            await client.send(*[message] * 1000)
            kinds = [(await client.hear())["type"] for _ in range(1000)]
            assert (kinds.count("started"), kinds.count("error")) == (32, 968)
        eventually(lambda: fake_server.figure("headrace_open_streams") == 0, "they are still read")
        eventually(lambda: fake_server.figure("headrace_replica_running") == 0, "they still run")

    asyncio.run(story())


def test_strangers_are_refused_before_they_say_anything(fake_server: LiveServer) -> None:
    async def story() -> None:
        for key, headers, status in (
            (None, {}, 401),
            ("sk-wrong", {}, 401),
            (fake_server.key, {"origin": "https://elsewhere.example"}, 403),
        ):
            with pytest.raises(Refused) as refused:
                async with opened(fake_server.port, key, headers=headers):
                    pass
            assert refused.value.status == status

    asyncio.run(story())


def test_a_server_that_stops_finishes_what_is_open_and_says_that_it_goes(home: Path) -> None:
    async def story(server: LiveServer) -> None:
        async with opened(server.port, server.key) as busy, opened(server.port, server.key) as idle:
            await start(busy)
            await idle.send(Ping(b"here"))
            while not isinstance(await idle.event(), Pong):
                pass
            server.signal(signal.SIGTERM)
            heard = await busy.hear_end()
            assert heard[-1]["error"] is None and heard[-1]["usage"]["completion_tokens"] == NUM_TOKENS
            for client in (busy, idle):
                with pytest.raises(Closed) as closed:
                    await client.hear()
                assert closed.value.code == 1001

    with live_server(home, "--config", str(written(home, FAKE.replace("c0_s = 0.001", "c0_s = 0.005")))) as server:
        asyncio.run(story(server))
        assert server.wait() == 0
