"""What a connection may do before there is a request. Over a real port: these limits are the server's."""

import asyncio
import logging
import re
import socket
import time
from pathlib import Path

import msgspec
import pytest

from headrace.gateway import protocol, server
from headrace.gateway.protocol import FencedProtocol
from headrace.streams.record import Ending, Part, Usage
from tests.unit.gateway.live import Live, Wire, play, running, write_pair
from tests.unit.gateway.stub import KEY, StubService, gateway

# A client is looked at now and then, and this machine may be busy.
PATIENCE_S = 30.0
GOOD = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEAD = (
    b"POST /whole HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\ncontent-type: application/json\r\n"
    % KEY.encode()
)
TRAILED = HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


async def told(live: Live, *parts: bytes) -> tuple[int, bytes]:
    """Status and body of what a connection is told before it is closed."""
    wire = await live.connect()
    await wire.send(*parts)
    found = await wire.rest()
    head, _, body = found.partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if head else (0, b"")


async def is_answered(live: Live) -> bool:
    """Somebody else, who comes again if this machine stood still for as long as a request may take to arrive."""
    for _ in range(10):
        wire = await live.connect()
        await wire.send(GOOD)
        if (await wire.some(1 << 16)).startswith(b"HTTP/1.1 200"):
            return True
    return False


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(b"GET /live HTTP/1.1\r\nhost localhost\r\n\r\n", 400, id="no colon"),
        pytest.param(b"GET /live HTTP/1.1\nhost: localhost\n\n", 400, id="bare LF"),
        pytest.param(b"GET /live HTTP/1.1\r\nhost: local\x00host\r\n\r\n", 400, id="NUL"),
        pytest.param(b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: a\r\n b\r\n\r\n", 400, id="folded header"),
        pytest.param(b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (1 << 20) + b"\r\n\r\n", 431, id="1 MB header"),
        pytest.param(b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 10_000 + b"\r\n", 431, id="10k headers"),
        pytest.param(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431, id="long path"),
        pytest.param(b"GET /live HTTP/1.1\r\n" + b"a" * 300_000, 431, id="a header that never ends"),
        pytest.param(HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, id="TE and CL"),
        pytest.param(HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400, id="two lengths"),
        pytest.param(HEAD + b"content-length: -1\r\n\r\n", 400, id="negative length"),
        pytest.param(HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400, id="coded chunks"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, id="bad chunk size"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n", 400, id="huge chunk size"),
        pytest.param(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 500_000, 400, id="1-byte chunks"),
        pytest.param(TRAILED + b"x: " + b"a" * 100_000 + b"\r\n\r\n", 431, id="long trailer"),
        pytest.param(TRAILED + b"a: b\r\n" * 1000 + b"\r\n", 431, id="1k trailers"),
        pytest.param(b"\x16\x03\x01\x02\x00garbage\r\n\r\n", 400, id="not HTTP"),
        pytest.param(b"BREW /live HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, id="no such method"),
        pytest.param(b"GET http://localhost HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, id="no path"),
        pytest.param(b"GET http://localhost?x=1 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, id="a query and no path"),
    ],
)  # fmt: skip
def test_what_is_not_a_request_is_refused_and_closed(request_bytes: bytes, status: int) -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            spent_s = time.process_time()
            found, body = await told(live, request_bytes)
            assert found == status
            assert set(msgspec.json.decode(body)["error"]) == {"message", "type", "param", "code"}
            assert time.process_time() - spent_s < 2.0
            wire = await live.connect()
            await wire.send(GOOD)
            assert (await wire.answer())[0] == 200

    play(story())


def test_a_long_head_right_behind_another_request_is_refused_before_it_ends() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            begun = b"GET /live HTTP/1.1\r\nhost: localhost\r\n" + b"".join(
                b"x%d: %b\r\n" % (i, b"a" * 600) for i in range(80)
            )
            await wire.send(GOOD + begun)
            rest = await wire.rest()
            assert rest.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 431" in rest

    play(story())


def test_who_is_slow_to_send_what_is_refused_hears_why_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.gateway.protocol._LINGER_S", 2.0)

    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            await wire.send(b"GET /live HTTP/1.1\r\n" + b"a" * 300_000)
            for _ in range(25):
                await wire.send(b"a" * 1000)
                await asyncio.sleep(0.1)
            assert (await wire.rest()).startswith(b"HTTP/1.1 431")

    play(story())


@pytest.mark.parametrize(
    ("beginning", "answers"),
    [
        pytest.param(b"", False, id="nothing"),
        pytest.param(b"\r\n", True, id="empty lines"),
        pytest.param(b"GET /live HTTP/1.1\r\nhos", True, id="part of the headers"),
        pytest.param(HEAD + b"content-length: 100\r\n\r\n{", True, id="part of the body"),
    ],
)
def test_a_request_that_does_not_arrive_is_closed_by_a_timer(beginning: bytes, answers: bool) -> None:
    async def story() -> None:
        async with running(gateway(receive_s=0.5)) as live:
            slow = await live.connect()
            await slow.send(beginning)
            assert await is_answered(live)
            found = await slow.rest()
            assert (b"HTTP/1.1 408" in found) == answers

    play(story())


def test_many_slow_connections_hold_up_nobody() -> None:
    async def story() -> None:
        async with running(gateway(receive_s=2.0)) as live:
            slow = []
            for _ in range(200):
                slow.append(await live.connect())
                await slow[-1].send(b"GET /live HTTP/1.1\r\nhost: local")
            assert await is_answered(live)
            told = await asyncio.gather(*(wire.rest() for wire in slow))
            assert all(answer.startswith(b"HTTP/1.1 408") for answer in told)

    play(story())


def test_head_has_the_headers_and_no_body() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            await wire.send(GOOD.replace(b"GET", b"HEAD"))
            lines = [await wire.line()]
            while lines[-1] != b"\r\n":
                lines.append(await wire.line())
            assert b"content-length: 15\r\n" in lines
            await wire.send(GOOD)
            assert await wire.answer() == (200, b'{"status":"ok"}')

    play(story())


def test_a_body_that_waits_to_be_asked_for_is_asked_for() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            await wire.send(HEAD + b"expect: 100-continue\r\nexpect: x\r\ncontent-length: 12\r\n\r\n")
            assert await wire.line() == b"HTTP/1.1 100 Continue\r\n"
            assert await wire.line() == b"\r\n"
            await wire.send(b'{"text":"a"}')
            assert await wire.answer() == (200, b'{"text":"a "}')

    play(story())


def test_an_empty_line_between_requests_does_not_hold_a_connection() -> None:
    async def story() -> None:
        async with running(gateway(receive_s=1.0)) as live:
            wire = await live.connect()
            await wire.send(GOOD)
            assert (await wire.answer())[0] == 200
            await wire.send(b"\r\n")
            assert b"HTTP/1.1 408" in await wire.rest()

    play(story())


def test_a_connection_that_asks_nothing_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0)

    async def story() -> None:
        async with running(gateway(max_unread_s=0.2)) as live:
            wire = await live.connect()
            await wire.send(GOOD)
            assert (await wire.answer())[0] == 200
            assert await wire.rest() == b""

    play(story())


def test_a_dribbled_body_does_not_move_the_deadline() -> None:
    async def story() -> None:
        async with running(gateway(receive_s=0.3)) as live:
            wire = await live.connect()
            await wire.send(HEAD + b"content-length: 1000\r\n\r\n")

            async def dribble() -> None:
                while True:
                    await wire.send(b" ")
                    await asyncio.sleep(0.02)

            task = asyncio.create_task(dribble())
            # Its last byte would come after twenty seconds.
            assert b"408" in await wire.rest()
            task.cancel()

    play(story())


def test_a_body_over_the_bound_is_413_and_the_connection_lives(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with running(gateway(max_body_bytes=1000)) as live:
            wire = await live.connect()
            await wire.send(HEAD + b"content-length: 5000\r\n\r\n" + b" " * 5000)
            status, body = await wire.answer()
            assert status == 413
            assert msgspec.json.decode(body)["error"]["code"] == "too_large"
            await wire.send(GOOD)
            assert (await wire.answer())[0] == 200
            await wire.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"800\r\n" + b" " * 2048 + b"\r\n0\r\n\r\n")
            assert (await wire.answer())[0] == 413

    with caplog.at_level(logging.WARNING):
        play(story())
    assert not caplog.records


def test_a_body_without_end_is_cut() -> None:
    async def story() -> None:
        async with running(gateway(max_body_bytes=1000)) as live:
            wire = await live.connect()
            await wire.send(HEAD + b"content-length: 100000000\r\n\r\n", *[b" " * 10_000] * 1000)
            assert (await wire.rest()).startswith(b"HTTP/1.1 413")

    play(story())


def test_requests_behind_each_other_are_answered_in_order() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            body = b'{"text":"a b"}'
            await wire.send((HEAD + b"content-length: %d\r\n\r\n" % len(body) + body) * 2 + GOOD)
            assert [await wire.answer() for _ in range(2)] == [(200, b'{"text":"a b "}')] * 2
            assert (await wire.answer())[1] == b'{"status":"ok"}'

    play(story())


def test_garbage_behind_a_running_stream_is_not_answered_into_it() -> None:
    async def story() -> None:
        app = gateway(disconnect_grace_s=0.0)
        async with running(app) as live:
            wire = await live.connect()
            body = b"{}"
            await wire.send(HEAD.replace(b"/whole", b"/say") + b"content-length: 2\r\n\r\n" + body)
            while not app.context.service.streams:
                await asyncio.sleep(0.005)
            await wire.send(b"\x00\x01garbage\r\n\r\n")
            assert await is_answered(live)
            (stream,) = app.context.service.streams
            stream.append([Part(0, text="all of it")])
            stream.end(Ending(Usage(2, 0, 1)))
            said, _, refusal = (await wire.rest()).partition(b"0\r\n\r\n")
            assert b"all of it" in said and b"HTTP" not in said[4:]
            assert refusal.startswith(b"HTTP/1.1 400")
            assert not [call for call in app.context.service.calls if "cancel" in call]

    play(story())


def statuses_in(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answers)]


WHOLE = HEAD + b'content-length: 14\r\n\r\n{"text":"a b"}'
GARBAGE = b"\x00\x01garbage\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        pytest.param(GOOD + GARBAGE, [200, 400], id="garbage"),
        pytest.param(WHOLE * 3 + GOOD + GARBAGE + GOOD, [200, 200, 200, 200, 400], id="behind several"),
        pytest.param(WHOLE + HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + GOOD, [200, 400], id="in a body"),
        pytest.param(WHOLE * 2 + b"GET /live HTTP/1.1\r\n\r\n" + GOOD, [200, 200, 400], id="no host"),
        pytest.param(WHOLE + b"GET /" + b"a" * 100_000, [200, 431], id="a long path"),
        pytest.param(GOOD[:-2] + b"connection: close\r\n\r\n" + GOOD, [200], id="behind the last"),
    ],
)
def test_what_came_before_garbage_is_answered(sent: bytes, statuses: list[int]) -> None:
    async def story() -> None:
        app = gateway()
        async with running(app) as live:
            wire = await live.connect()
            await wire.send(sent)
            assert statuses_in(await wire.rest()) == statuses
            assert len(app.context.service.streams) == sent.count(WHOLE)
            assert await is_answered(live)

    play(story())


async def being_answered(live: Live, behind: bytes) -> Wire:
    """A request whose stream is open, and what came `behind` it."""
    wire = await live.connect()
    await wire.send(HEAD + b"content-length: 2\r\n\r\n{}" + behind)
    while not live.app.context.service.streams:
        await asyncio.sleep(0.005)
    return wire


@pytest.mark.parametrize("bad", [GARBAGE, HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"])
def test_nothing_is_read_behind_garbage(bad: bytes) -> None:
    async def story() -> None:
        app = gateway(receive_s=0.3)
        async with running(app) as live:
            wire = await being_answered(live, bad)
            # Longer than a request may take to arrive: who is answered first is not cut off for it.
            await asyncio.sleep(0.6)
            await wire.send(WHOLE)
            app.context.service.streams[0].end(Ending(Usage(2, 0, 0)))
            assert statuses_in(await wire.rest()) == [200, 400]
            assert len(app.context.service.streams) == 1

    play(story())


@pytest.mark.parametrize("bad", [GARBAGE, HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"])
def test_who_is_refused_when_a_server_stops_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch, bad: bytes) -> None:
    monkeypatch.setattr(protocol, "_LINGER_S", 600.0)

    async def story() -> None:
        app = gateway(drain_s=600.0)
        async with running(app) as live:
            await being_answered(live, bad)
            live.stop.set()
            await asyncio.sleep(0.1)
            app.context.service.streams[0].end(Ending(Usage(2, 0, 0)))
            await asyncio.wait_for(asyncio.shield(live.done), 10.0)

    play(story())


def test_who_sends_garbage_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_LINGER_BYTES", 100_000)

    async def story() -> None:
        app = gateway(disconnect_grace_s=0.0)
        async with running(app) as live:
            wire = await being_answered(live, GARBAGE)
            await wire.send(*[b" " * 10_000] * 100)
            assert await wire.rest() == b""
            while "finished" not in app.context.service.calls:
                await asyncio.sleep(0.005)
            assert app.context.service.calls[0] == "cancel disconnected"

    play(story())


def test_who_has_said_all_with_garbage_behind_it_is_answered_and_closed() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            await wire.say_all(GOOD + GARBAGE)
            assert (await wire.rest()).startswith(b"HTTP/1.1 200")

    play(story())


def test_an_upgrade_is_not_made() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            await wire.send(GOOD[:-2] + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n")
            assert (await wire.answer())[0] == 200

    play(story())


def test_trailers_change_no_header() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            head = HEAD.replace(b"Bearer " + KEY.encode(), b"Bearer wrong") + b"transfer-encoding: chunked\r\n\r\n"
            await wire.send(head + b"2\r\n{}\r\n0\r\nauthorization: Bearer %s\r\n\r\n" % KEY.encode())
            assert (await wire.answer())[0] == 401
            await wire.send(GOOD)
            assert (await wire.answer())[0] == 200

    play(story())


def test_blanks_around_a_header_s_value_are_no_part_of_it() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            head = HEAD.replace(
                b"authorization: Bearer %s" % KEY.encode(), b"authorization: \t Bearer %s \t " % KEY.encode()
            )
            await wire.send(head + b"expect: 100-continue\t\r\ncontent-length: 12 \r\n\r\n")
            assert await wire.line() + await wire.line() == b"HTTP/1.1 100 Continue\r\n\r\n"
            await wire.send(b'{"text":"a"}')
            assert await wire.answer() == (200, b'{"text":"a "}')

    play(story())


OFFERS = [
    pytest.param(b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n", id="h2c"),
    pytest.param(b"connection: upgrade\r\nupgrade: websocket\r\n", id="websocket"),
]


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("cut", [0, 5, 1000])
def test_an_offer_to_upgrade_is_not_taken_and_the_body_is_a_body(offer: bytes, cut: int) -> None:
    """Sent in one piece, with the body cut, and with the head and the body apart."""
    body = b'{"text":"GET /version HTTP/1.1\\r\\n\\r\\n"}'
    request = HEAD + offer + b"content-length: %d\r\n\r\n" % len(body) + body

    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            at = len(request) - min(cut, len(body))
            await wire.send(request[:at])
            await asyncio.sleep(0.02)
            await wire.send(request[at:] + GOOD)
            status, answer = await wire.answer()
            assert status == 200 and b"/version" in answer
            assert await wire.answer() == (200, b'{"status":"ok"}')

    play(story())


@pytest.mark.parametrize("offer", OFFERS)
def test_requests_behind_an_offer_are_their_own(offer: bytes) -> None:
    chunked = HEAD + offer + b"transfer-encoding: chunked\r\n\r\nc\r\n" + b'{"text":"a"}' + b"\r\n0\r\n\r\n"
    bare = GOOD.replace(b"\r\n\r\n", b"\r\n" + offer + b"\r\n")

    async def story() -> None:
        async with running(gateway()) as live:
            wire = await live.connect()
            await wire.send((chunked + bare) * 50)
            for _ in range(50):
                assert await wire.answer() == (200, b'{"text":"a "}')
                assert await wire.answer() == (200, b'{"status":"ok"}')

    play(story())


def test_a_tunnel_and_a_request_without_a_host_are_refused() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            for request in (b"CONNECT a:80 HTTP/1.1\r\nhost: localhost\r\n\r\n" + GOOD, b"GET /live HTTP/1.1\r\n\r\n"):
                assert (await told(live, request))[0] == 400
            wire = await live.connect()
            await wire.send(b"GET /live HTTP/1.0\r\n\r\n")
            assert (await wire.answer())[0] == 200

    play(story())


@pytest.mark.parametrize("ending", [b"", b"connection: close\r\n"])
def test_who_does_not_read_an_answer_is_cut(ending: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    words = b'{"text":"' + b"word " * (1 << 20) + b'"}'
    cut = asyncio.Event()
    lose = FencedProtocol.connection_lost

    def lost(self: FencedProtocol, error: Exception | None) -> None:
        lose(self, error)
        cut.set()

    async def story() -> None:
        async with running(gateway(max_unread_s=0.2)) as live:
            with socket.socket() as deaf:
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                deaf.connect(("127.0.0.1", live.port))
                deaf.setblocking(False)
                request = HEAD + ending + b"content-length: %d\r\n\r\n" % len(words) + words
                await asyncio.get_running_loop().sock_sendall(deaf, request)
                await asyncio.wait_for(cut.wait(), PATIENCE_S)

    monkeypatch.setattr(FencedProtocol, "connection_lost", lost)
    play(story())


def test_who_reads_slowly_is_left_to_read() -> None:
    words = b'{"text":"' + b"word " * (1 << 20) + b'"}'

    async def story() -> None:
        async with running(gateway(max_unread_s=1.0)) as live:
            wire = await live.connect()
            await wire.send(HEAD + b"content-length: %d\r\n\r\n" % len(words) + words)
            found = 0
            while found < len(words):
                found += len(await wire.some(1 << 18))
                await asyncio.sleep(0.1)

    play(story())


def test_who_has_said_all_is_answered_and_closed() -> None:
    async def story() -> None:
        async with running(gateway()) as live:
            for requests in (1, 3):
                wire = await live.connect()
                await wire.say_all(GOOD * requests)
                assert (await wire.rest()).count(b'{"status":"ok"}') == requests
            half = await live.connect()
            await half.say_all(HEAD + b"content-length: 100\r\n\r\n{")
            assert b"200" not in await half.rest()

    play(story())


@pytest.mark.parametrize("path", [b"/say", b"/whole"])
def test_who_closes_while_a_worker_computes_has_left(path: bytes) -> None:
    service = StubService()

    async def story() -> None:
        async with running(gateway(service, disconnect_grace_s=0.0)) as live:
            wire = await live.connect()
            await wire.say_all(HEAD.replace(b"/whole", path) + b"content-length: 2\r\n\r\n{}")
            assert await wire.rest() == b""
            async with asyncio.timeout(PATIENCE_S):
                while "finished" not in service.calls:
                    await asyncio.sleep(0.001)
            assert service.calls == ["cancel disconnected", "finished"]

    play(story())


def test_over_tls_refusals_reach_their_client_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = write_pair(tmp_path, "localhost")
    # Whatever is told only when the connection is given up, comes too late.
    monkeypatch.setattr(protocol, "_LINGER_S", 10 * PATIENCE_S)
    asked = {
        b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 40_000 + b"\r\n\r\n": 431,
        b"garbage\r\n\r\n": 400,
        b"GET /live HTTP/1.1\r\n\r\n": 400,
        HEAD + b"content-length: 2\r\n\r\n{": 408,
    }

    async def story() -> None:
        async with running(gateway(tls_cert=cert, tls_key=key, receive_s=1.0)) as live:
            for request_bytes, status in asked.items():
                wire = await live.connect(is_tls=True)
                await wire.send(request_bytes)
                found, body = await wire.answer()
                assert found == status and msgspec.json.decode(body)["error"]["message"]
                await wire.close()

    play(story())
