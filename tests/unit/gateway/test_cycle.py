"""An answer as bytes: what its head says of its body, and what no header can hold."""

import asyncio
import logging
from typing import Any, cast

import pytest

from headrace.gateway.cork import Corked, Turn
from headrace.gateway.cycle import Cycle

LOG = logging.getLogger("tests")


class Pipe:
    def __init__(self) -> None:
        self.seen = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.seen += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


class Flow:
    write_paused = False


def answered(
    *messages: dict[str, Any],
    method: str = "POST",
    version: str = "1.1",
    keep_alive: bool = True,
    date: bytes = b"today",
) -> tuple[bytes, Pipe]:
    pipe = Pipe()

    async def story() -> None:
        transport = Corked(cast(Any, pipe), Turn())
        cycle = Cycle(
            cast(Any, {"method": method, "http_version": version}),
            cast(Any, transport),
            cast(Any, Flow()),
            LOG,
            LOG,
            False,
            [(b"date", date)],
            asyncio.Event(),
            False,
            keep_alive,
            transport.flush,
        )
        for message in messages:
            await cycle.send(message)
        await asyncio.sleep(0)

    asyncio.run(story())
    return pipe.seen, pipe


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def test_a_body_of_known_length_follows_its_head() -> None:
    seen, pipe = answered(start((b"content-length", b"2")), body(b"ok"))
    assert seen == b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: 2\r\n\r\nok"
    assert not pipe.is_closed


def test_a_stream_comes_in_chunks_and_ends() -> None:
    seen, _ = answered(start(), body(b"a" * 16, more=True), body(b"", more=True), body(b"b"))
    assert seen.endswith(b"transfer-encoding: chunked\r\n\r\n10\r\n" + b"a" * 16 + b"\r\n1\r\nb\r\n0\r\n\r\n")
    seen, _ = answered(start(), body(b"a", more=True), body(b""))
    assert seen.endswith(b"1\r\na\r\n0\r\n\r\n")


def test_who_knows_no_chunks_is_sent_none() -> None:
    seen, pipe = answered(
        start(), body(b"a", more=True), body(b"", more=True), body(b"b"), version="1.0", keep_alive=False
    )
    head, _, rest = seen.partition(b"\r\n\r\n")
    assert rest == b"ab" and b"transfer-encoding" not in head and pipe.is_closed
    seen, _ = answered(start((b"content-length", b"2")), body(b"ok"), version="1.0", keep_alive=False)
    assert seen.endswith(b"\r\n\r\nok")


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
def test_what_has_no_body_has_no_chunks(method: str, status: int) -> None:
    seen, _ = answered(start(status=status), body(b""), method=method)
    assert seen.endswith(b"date: today\r\n\r\n")


def test_a_connection_that_is_not_kept_says_so_once_and_closes() -> None:
    for headers, keep_alive in ([], False), ([(b"connection", b"close")], True), ([(b"connection", b"close")], False):
        seen, pipe = answered(start((b"content-length", b"0"), *headers), body(b""), keep_alive=keep_alive)
        assert seen.count(b"connection: close\r\n") == 1
        assert pipe.is_closed


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb", b"a\0b", b"a\x7fb"])
def test_no_header_holds_another_line(value: bytes) -> None:
    with pytest.raises(RuntimeError, match="control character"):
        answered(start((b"x-request-id", value), (b"content-length", b"0")), body(b""))


def test_a_value_may_hold_tabs_and_what_is_no_ascii() -> None:
    seen, _ = answered(start((b"x", b"a\tb \xe9"), (b"content-length", b"0")), body(b""))
    assert b"x: a\tb \xe9\r\n" in seen


def test_a_body_of_another_length_than_was_said_is_our_fault() -> None:
    with pytest.raises(RuntimeError, match="as long as"):
        answered(start((b"content-length", b"3")), body(b"ok"))
