"""The head of an answer leaves with its body, and never later than anything else does."""

import asyncio
from time import monotonic
from typing import Any, cast

from headrace.gateway.cork import MOST_HELD_BYTES, Corked, Turn

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Pipe:
    def __init__(self) -> None:
        self.seen: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.seen.append(data)

    def is_closing(self) -> bool:
        return "close" in self.seen

    def __getattr__(self, name: str) -> Any:
        return lambda: self.seen.append(name)


def corked() -> tuple[Pipe, Corked]:
    pipe = Pipe()
    return pipe, Corked(cast(Any, pipe), Turn())


def test_head_and_body_are_one_write() -> None:
    pipe, cork = corked()
    cork.write(HEAD)
    assert pipe.seen == []
    cork.write(b"body")
    cork.write(b"more")
    assert pipe.seen == [HEAD + b"body", b"more"]


def test_a_head_alone_leaves_when_the_answer_ends() -> None:
    for end in ("flush", "close", "write_eof"):
        pipe, cork = corked()
        cork.write(HEAD)
        getattr(cork, end)()
        assert pipe.seen == [HEAD] + ([] if end == "flush" else [end])


def test_an_empty_body_lets_the_head_go() -> None:
    pipe, cork = corked()
    cork.write(HEAD)
    cork.write(b"")
    assert pipe.seen == [HEAD]


def test_it_notes_when_it_gives_bytes_on_and_before_it_does() -> None:
    pipe, cork = corked()
    seen_s: list[float] = []
    pipe.write = lambda data: seen_s.append(cork.given_s)  # type: ignore[method-assign]
    cork.write(HEAD)
    assert cork.given_s == 0.0
    began_s = monotonic()
    cork.write(b"body")
    cork.write(b"more")
    assert began_s <= seen_s[0] <= seen_s[1] == cork.given_s <= monotonic()


def test_continue_is_not_held() -> None:
    pipe, cork = corked()
    cork.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert len(pipe.seen) == 1


def test_a_body_that_looks_like_a_head_is_not_held() -> None:
    pipe, cork = corked()
    cork.write(HEAD)
    cork.write(HEAD)
    assert pipe.seen == [HEAD + HEAD]


def test_what_streams_say_leaves_together_at_the_end_of_a_turn() -> None:
    pipes, turn = [Pipe(), Pipe()], Turn()
    first, second = (Corked(cast(Any, pipe), turn) for pipe in pipes)

    async def story() -> None:
        first.write(HEAD)
        first.write_soon(b"one")
        second.write_soon(b"two")
        second.write_soon(b"more")
        assert pipes[0].seen == pipes[1].seen == []
        await asyncio.sleep(0)
        assert [pipe.seen for pipe in pipes] == [[HEAD + b"one"], [b"twomore"]]

    asyncio.run(story())


def test_what_is_written_at_once_takes_along_what_waits() -> None:
    pipe, cork = corked()

    async def story() -> None:
        cork.write_soon(b"frame")
        cork.write(b"end")
        assert pipe.seen == [b"frameend"]
        await asyncio.sleep(0)

    asyncio.run(story())
    assert pipe.seen == [b"frameend"]


def test_nothing_is_written_to_who_left_meanwhile() -> None:
    pipe, cork = corked()

    async def story() -> None:
        cork.write_soon(b"frame")
        pipe.seen.append("close")
        await asyncio.sleep(0)

    asyncio.run(story())
    assert pipe.seen == ["close"]


def test_much_does_not_wait() -> None:
    pipe, cork = corked()

    async def story() -> None:
        cork.write_soon(b"a")
        cork.write_soon(b"b" * MOST_HELD_BYTES)
        assert pipe.seen == [b"a" + b"b" * MOST_HELD_BYTES]
        await asyncio.sleep(0)

    asyncio.run(story())


def test_a_connection_that_fails_takes_nothing_from_the_others() -> None:
    pipes, turn = [Pipe(), Pipe()], Turn()
    first, second = (Corked(cast(Any, pipe), turn) for pipe in pipes)

    def fail(data: bytes) -> None:
        raise RuntimeError("broken")

    async def story() -> None:
        pipes[0].write = fail  # type: ignore[method-assign]
        first.write_soon(b"one")
        second.write_soon(b"two")
        await asyncio.sleep(0)

    asyncio.run(story())
    assert pipes[0].seen == ["abort"] and pipes[1].seen == [b"two"]
