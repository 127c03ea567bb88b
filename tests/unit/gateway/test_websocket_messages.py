"""What sockets say: read strictly, written as documented; and the count of frames that a window lets through."""

import json
from typing import Any

import pytest

from headrace.core.errors import InvalidInput, Refused
from headrace.gateway.dialects.chat import ChatDialect
from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.dialects.envelope import Wants, chunk_of
from headrace.gateway.websocket.messages import (
    Ack,
    Cancel,
    Resize,
    Resume,
    Start,
    frame_head,
    read,
    read_about,
    write_end,
    write_error,
    write_frame,
)
from headrace.gateway.websocket.wording import told_more
from headrace.gateway.window import Window
from headrace.streams.record import Ending, Failure, Part, Record, Usage
from tests.unit.gateway.told import HEADING


def test_each_message_is_read() -> None:
    start = read(b'{"type":"start","id":"a","api":"chat","body":{"model": "x"},"headers":{"x-headrace-metadata":"1"}}')
    assert isinstance(start, Start) and bytes(start.body) == b'{"model": "x"}' and start.window is None
    assert read(b'{"type":"ack","stream":"s","seq":3}') == Ack("s", 3)
    assert read(b'{"type":"window","stream":"s","size":8}') == Resize("s", 8)
    assert read(b'{"type":"window","stream":"s","size":null}') == Resize("s", None)
    assert read(b'{"type":"cancel","stream":"s"}') == Cancel("s")
    assert read(b'{"type":"resume","stream":"s","after":3,"window":8}') == Resume("s", 3, 8)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (b"", None),
        (b"hello", None),
        (b"[]", None),
        (b"{}", "type"),
        (b'{"type":"stop"}', "type"),
        (b'{"type":1}', "type"),
        (b'{"type":"ack","stream":"s"}', "seq"),
        (b'{"type":"ack","stream":"s","seq":-1}', "seq"),
        (b'{"type":"ack","stream":"s","seq":1e18}', "seq"),
        (b'{"type":"ack","stream":"s","seq":"1"}', "seq"),
        (b'{"type":"ack","stream":"../x","seq":1}', "stream"),
        (b'{"type":"cancel","stream":""}', "stream"),
        (b'{"type":"resume","stream":"s","after":"abc"}', "after"),
        (b'{"type":"resume","stream":"s","window":-1}', "window"),
        (b'{"type":"start","id":"a","api":"images","body":{}}', "api"),
        (b'{"type":"start","id":"a","api":"chat"}', "body"),
        (b'{"type":"start","id":"a","api":"chat","body":{},"headers":{"authorization":"Bearer x"}}', "headers"),
        (
            b'{"type":"start","id":"a","api":"chat","body":{},"headers":{"x-headrace-metadata":"1\\r\\nx: y"}}',
            "headers",
        ),
        (b'{"type":"start","id":"' + b"a" * 200 + b'","api":"chat","body":{}}', "id"),
        (b"[" * 200_000, None),
    ],
)
def test_what_is_none_is_refused_by_its_field(message: bytes, param: str | None) -> None:
    with pytest.raises(InvalidInput) as refused:
        read(message)
    assert refused.value.param == param
    assert "body" not in refused.value.message or param == "body"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b'{"type":"stop"}', "type: must be one of start, ack, window, cancel, resume"),
        (b'{"type":"start","id":"a","api":"images","body":{}}', "api: must be one of chat, completions"),
    ],
)
def test_a_word_that_is_none_of_those_that_are_known_is_told_them(message: bytes, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(message)
    assert caught.value.message == words


def test_a_message_that_is_not_understood_may_still_be_about_something() -> None:
    assert read_about(b'{"type":"start","id":"a"}') == ("a", None)
    assert read_about(b'{"type":"resume","stream":"s","after":-1}') == (None, "s")
    for message in (b"", b"[]", b'{"id":1}', b'{"id":"' + b"x" * 1000 + b'"}', b"[" * 200_000):
        assert read_about(message) == (None, None)


def written(data: bytes) -> Any:
    return json.loads(data)


@pytest.mark.parametrize("kind", [ChatDialect, CompletionDialect])
@pytest.mark.parametrize("text", ["word", "zwei\nZeilen \u2028 und\r\n\ndata: mehr", "\u0085"])
def test_a_frame_holds_what_an_event_does_and_metadata_always(kind: Any, text: str) -> None:
    plain = kind(HEADING, Wants(), 1)
    record = Record(7, (Part(0, (1,), text, index=6),), step=3, age_s=0.5)
    event = told_more(plain).frame(record)
    frame = written(write_frame(frame_head("s"), 7, chunk_of(event)))
    assert event == b"id: 7\ndata: " + chunk_of(event) + b"\n\n"
    assert (frame["type"], frame["stream"], frame["seq"]) == ("frame", "s", 7)
    metadata = frame["chunk"].pop("headrace")
    assert (metadata["chunk_seq"], metadata["token_index"], metadata["batch_id"]) == (7, 6, 3)
    assert frame["chunk"] == json.loads(chunk_of(plain.frame(record)))


def test_the_end_tells_usage_error_and_stages() -> None:
    end = written(write_end("s", Record(9, ending=Ending(Usage(3, 1, 5), stages={"decode": 0.25}))))
    assert (end["type"], end["stream"], end["seq"], end["error"]) == ("end", "s", 9, None)
    assert (end["usage"]["total_tokens"], end["stages_ms"]) == (8, {"decode": 250.0})
    broken = written(write_end("s", Record(9, ending=Ending(Usage(), Failure("unreachable", "lost", 503)))))
    assert broken["error"] == {"message": "lost", "type": "overloaded", "param": None, "code": "unreachable"}
    cut_off = written(write_end("s", Record(4), Failure("client_too_slow", "slow", 408)))
    assert (cut_off["seq"], cut_off["usage"], cut_off["status"]) == (4, None, 408)


def test_a_refusal_is_the_catalogues() -> None:
    refused = written(write_error(Refused("full", retry_after_s=1.5), id="a"))
    assert refused == {
        "type": "error",
        "error": {"message": "full", "type": "overloaded", "param": None, "code": "overloaded"},
        "status": 503,
        "id": "a",
        "retry_after_ms": 1500,
    }
    ours = written(write_error(ZeroDivisionError("secret"), stream="s"))
    assert ours["stream"] == "s" and ours["status"] == 500 and "secret" not in str(ours)


def test_a_window_counts_frames_and_not_numbers() -> None:
    window = Window(2)
    assert window.room(64) == 2
    window.send(3)
    window.send(9)
    assert window.room(64) == 0
    assert window.ack(3) and window.room(64) == 1
    assert window.ack(3) and window.ack(1) and window.room(64) == 1
    assert not window.ack(10) and window.room(64) == 1
    assert window.ack(9) and window.room(64) == 2


def test_a_window_changes_its_size() -> None:
    window = Window(None, after=5)
    assert window.room(64) == 64
    for number in range(6, 16):
        window.send(number)
    window.size = 8
    assert window.room(64) == 0
    assert window.ack(9) and window.room(64) == 2
    window.size = 0
    assert window.room(64) == 0
    window.size = None
    assert window.room(64) == 64
