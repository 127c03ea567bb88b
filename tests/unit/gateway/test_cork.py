"""The head of an answer leaves with its body, and never later than anything else does."""

from time import monotonic
from typing import Any, cast

from headrace.gateway.cork import Corked

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
    return pipe, Corked(cast(Any, pipe))


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
