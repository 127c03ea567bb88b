"""The offer of a socket: who may make it, by which key, and what becomes of the connection if it is not taken."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from wsproto.events import Ping, TextMessage

from headrace.core.errors import InvalidInput
from headrace.gateway.errors import UpgradeRequired
from headrace.gateway.websocket.handshake import accept, is_offer, with_key
from tests.socket_client import Closed, Refused, connected, opened
from tests.unit.gateway.live import play, running, write_pair
from tests.unit.gateway.socket_rig import OpeningService, end, say
from tests.unit.gateway.stub import AUTH, KEY, METRICS_KEY, ask, gateway

# The example of RFC 6455.
NONCE = "dGhlIHNhbXBsZSBub25jZQ=="
OFFER = {"sec-websocket-version": "13", "sec-websocket-key": NONCE}


def test_the_answer_is_that_of_the_standard() -> None:
    head = accept(OFFER)
    assert head.startswith(b"HTTP/1.1 101 ") and head.endswith(b"\r\n\r\n")
    assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in head
    assert b"sec-websocket-extensions" not in head and b"sec-websocket-protocol" not in head
    assert b"sec-websocket-protocol: headrace.v1\r\n" in accept({**OFFER, "sec-websocket-protocol": "x, headrace.v1"})


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-websocket-key": ""},
        {"sec-websocket-key": "dGhl"},
        {"sec-websocket-key": NONCE + "=="},
        {"sec-websocket-key": "ä" * 24},
        {"sec-websocket-protocol": "graphql-ws"},
        {"sec-websocket-protocol": ""},
    ],
)
def test_what_is_no_offer_of_ours_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        accept({**OFFER, **headers})


@pytest.mark.parametrize("version", ["", "8", "13, 8"])
def test_another_version_is_not_spoken(version: str) -> None:
    with pytest.raises(UpgradeRequired):
        accept({**OFFER, "sec-websocket-version": version})


def test_the_key_of_a_page_moves_to_where_keys_are() -> None:
    offered = [(b"host", b"x"), (b"sec-websocket-protocol", b"headrace.v1, headrace.key.sk-1")]
    assert with_key(offered) == [(b"host", b"x"), (b"x-api-key", b"sk-1"), (b"sec-websocket-protocol", b"headrace.v1")]
    assert with_key([(b"sec-websocket-protocol", b"headrace.key.sk-1")]) == [(b"x-api-key", b"sk-1")]
    assert with_key([(b"accept", b"headrace.key.sk-1")]) == [(b"accept", b"headrace.key.sk-1")]


@pytest.mark.parametrize(
    ("method", "url", "headers"),
    [
        (b"POST", b"/v1/stream", [(b"upgrade", b"websocket")]),
        (b"GET", b"/v1/streams", [(b"upgrade", b"websocket")]),
        (b"GET", b"/v1/models", [(b"upgrade", b"websocket")]),
        (b"GET", b"/v1/stream", [(b"upgrade", b"h2c")]),
        (b"GET", b"/v1/stream", [(b"upgrade", b"websocket"), (b"content-length", b"4")]),
        (b"GET", b"/v1/stream", [(b"upgrade", b"websocket"), (b"transfer-encoding", b"chunked")]),
    ],
)
def test_only_a_socket_at_its_path_is_an_offer(method: bytes, url: bytes, headers: Any) -> None:
    assert is_offer(b"GET", b"/v1/stream?x=1", [(b"upgrade", b"WebSocket")])
    assert not is_offer(method, url, headers)


def test_without_an_offer_it_is_said_what_to_offer() -> None:
    answer = ask(gateway(), "GET", "/v1/stream", AUTH)
    assert (answer.status, answer.error["code"]) == (426, "upgrade_required")
    assert (answer.headers["upgrade"], answer.headers["sec-websocket-version"]) == ("websocket", "13")
    assert ask(gateway(), "POST", "/v1/stream", AUTH).status == 405


@pytest.mark.parametrize(
    ("key", "options", "status", "code"),
    [
        (None, {}, 401, "invalid_api_key"),
        ("wrong", {}, 401, "invalid_api_key"),
        (None, {"subprotocols": ("headrace.v1",)}, 401, "invalid_api_key"),
        (None, {"subprotocols": ("headrace.v1", "headrace.key.")}, 401, "invalid_api_key"),
        (None, {"subprotocols": ("headrace.v1", "headrace.key.wrong")}, 401, "invalid_api_key"),
        (KEY, {"subprotocols": ("headrace.v1", f"headrace.key.{METRICS_KEY}")}, 400, "invalid_request"),
        (None, {"subprotocols": (f"headrace.key.{KEY}", f"headrace.key.{KEY}")}, 400, "invalid_request"),
        (None, {"headers": {"cookie": f"key={KEY}"}}, 401, "invalid_api_key"),
        (KEY, {"headers": {"origin": "https://elsewhere.example"}}, 403, "forbidden"),
        (KEY, {"headers": {"origin": "null"}}, 403, "forbidden"),
        (KEY, {"subprotocols": ("other",)}, 400, "invalid_request"),
    ],
)
def test_whoever_may_not_come_in_is_told_so_before_anything_else(
    key: str | None, options: dict[str, Any], status: int, code: str
) -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            with pytest.raises(Refused) as refused:
                async with opened(live.port, key, **options):
                    pass
            assert (refused.value.status, refused.value.code) == (status, code)

    play(story())


@pytest.mark.parametrize(
    ("key", "options"),
    [
        (KEY, {}),
        (None, {"headers": {"x-api-key": KEY}}),
        (None, {"subprotocols": (f"headrace.key.{KEY}", "headrace.v1")}),
        (KEY, {"subprotocols": ("headrace.v1", f"headrace.key.{KEY}")}),
        (KEY, {"headers": {"origin": "http://127.0.0.1"}}),
        (KEY, {"headers": {"origin": "https://app.example"}}),
    ],
)
def test_a_key_and_a_page_that_are_known_come_in(key: str | None, options: dict[str, Any]) -> None:
    async def story() -> None:
        app = gateway(allowed_origins=("https://app.example",))
        async with running(app) as live, opened(live.port, key, **options) as client:
            assert client.accepted is not None
            assert client.accepted.subprotocol == ("headrace.v1" if "subprotocols" in options else None)
            await client.say(type="cancel", stream="unknown")
            assert (await client.hear())["error"]["code"] == "not_found"

    play(story())


def test_another_name_of_this_server_is_refused() -> None:
    async def story() -> None:
        async with running(gateway()) as live, connected(live.port) as client:
            lines = ["GET /v1/stream HTTP/1.1", "host: rebound.example", "upgrade: websocket", "connection: Upgrade"]
            lines += [f"authorization: Bearer {KEY}", *(f"{name}: {value}" for name, value in OFFER.items())]
            await client.send_bytes("\r\n".join([*lines, "", ""]).encode())
            wire = await asyncio.wait_for(client._reader.readuntil(b"\r\n\r\n"), 10)
            assert wire.startswith(b"HTTP/1.1 403 ")

    play(story())


def offer(*lines: str) -> bytes:
    head = ["GET /v1/stream HTTP/1.1", "host: localhost", "upgrade: websocket", "connection: Upgrade", *lines]
    return "\r\n".join([*head, *(f"{name}: {value}" for name, value in OFFER.items()), "", ""]).encode()


def test_data_behind_an_offer_that_is_refused_is_no_message() -> None:
    async def story() -> None:
        app = gateway()
        async with running(app) as live:
            wire = await live.connect()
            await wire.send(offer() + b"\x81\x85\x00\x00\x00\x00hello")
            assert (await wire.answer())[0] == 401
            assert (await wire.answer())[0] == 400
            assert await wire.rest() == b""
            assert app.num_open == 0

    play(story())


def test_a_connection_whose_offer_was_refused_goes_on_as_http() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            await wire.send(offer() + b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await wire.answer())[0] == 401
            assert (await wire.answer())[0] == 200
            await wire.send(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await wire.answer())[0] == 200

    play(story())


def test_data_that_comes_with_the_offer_is_heard_once_it_is_taken() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            message = b'{"type":"cancel","stream":"x"}'
            frame = b"\x81" + bytes([0x80 | len(message)]) + b"\x00" * 4 + message
            await wire.send(offer(f"authorization: Bearer {KEY}") + frame)
            assert (await wire.line()).startswith(b"HTTP/1.1 101 ")
            while await wire.line() != b"\r\n":
                pass
            assert b'"not_found"' in await wire.some(1000)

    play(story())


def test_a_socket_behind_another_request_on_its_connection() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            await wire.send(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await wire.answer())[0] == 200
            await wire.send(offer(f"authorization: Bearer {KEY}"))
            assert (await wire.line()).startswith(b"HTTP/1.1 101 ")

    play(story())


def test_while_it_drains_no_socket_is_opened_and_idle_ones_are_closed() -> None:
    async def story() -> None:
        app = gateway()
        async with running(app) as live, opened(live.port, KEY) as idle, connected(live.port) as late:
            app.drain()
            with pytest.raises(Refused) as refused:
                await late.open(KEY)
            assert (refused.value.status, refused.value.code) == (503, "overloaded")
            assert refused.value.headers["connection"] == "close"
            live.stop.set()
            assert await idle.closing() == 1001

    play(story())


def test_a_socket_is_one_line_in_the_log_and_no_key_is_in_it(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        app = gateway()
        async with running(app) as live:
            async with opened(live.port, None, subprotocols=("headrace.v1", f"headrace.key.{KEY}")) as client:
                await client.send(Ping(), TextMessage(json.dumps({"type": "cancel", "stream": "x"})))
                await client.hear()
                assert app.num_open == 1
            while app.num_open:
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.INFO, "headrace.gateway"):
        play(story())
    cancel, line = [record.getMessage() for record in caplog.records]
    assert cancel.startswith("CANCEL /v1/stream 404 ") and line.startswith("GET /v1/stream 101 ")
    assert "tenant=first" in line and "tenant=first" in cancel
    assert KEY not in caplog.text


def test_a_client_that_breaks_off_leaves_nothing() -> None:
    async def story() -> None:
        app = gateway()
        async with running(app) as live:
            async with opened(live.port, KEY) as client:
                await client.leave()
                with pytest.raises((Closed, ConnectionError, RuntimeError)):
                    await client.hear()
            while app.num_open:
                await asyncio.sleep(0.01)

    play(story())


@pytest.mark.parametrize("is_half", [False, True])
def test_a_client_that_leaves_before_it_is_let_in_leaves_nothing(
    is_half: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        app = gateway(inject={"authenticate": 0.05})
        async with running(app) as live:
            wire = await live.connect()
            if is_half:
                await wire.say_all(offer(f"authorization: Bearer {KEY}"))
                assert await wire.rest() == b""
            else:
                await wire.send(offer(f"authorization: Bearer {KEY}"))
                while not app.num_open:
                    await asyncio.sleep(0)
                await wire.close()
            while app.num_open:
                await asyncio.sleep(0.01)

    play(story())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_stream_is_its_tenants_on_every_socket_and_unknown_to_others() -> None:
    async def story() -> None:
        service = OpeningService()
        async with (
            running(gateway(service)) as live,
            opened(live.port, KEY) as owner,
            opened(live.port, KEY) as reader,
            opened(live.port, METRICS_KEY) as other,
        ):
            body = {"model": "tiny", "prompt": "Hello"}
            await owner.say(type="start", id="a", api="completions", body=body)
            stream_id = (await owner.hear())["stream"]
            for message in ("resume", "cancel"):
                await other.say(type=message, stream=stream_id)
                mine = await other.hear()
                await other.say(type=message, stream="unknown")
                unknown = await other.hear()
                # Nothing tells one from the other.
                assert {**mine, "stream": ""} == {**unknown, "stream": ""} and mine["status"] == 404
            await reader.say(type="resume", stream=stream_id)
            await say(service.streams[0], "one", "two")
            await end(service.streams[0])
            assert await owner.hear_end() == await reader.hear_end()

    play(story())


def test_over_tls(tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path, "here.example")

    async def story() -> None:
        async with running(gateway(tls_cert=cert, tls_key=key)) as live, opened(live.port, KEY, is_tls=True) as client:
            text = TextMessage(json.dumps({"type": "cancel", "stream": "x" * 100}))
            await client.send(*[text] * 40)
            assert [(await client.hear())["status"] for _ in range(40)] == [404] * 40

    play(story())
