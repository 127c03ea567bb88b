"""Events are the same however the bytes are cut."""

import pytest

from headrace.cli.load.sse import MAX_EVENT_BYTES, EventStream
from headrace.core.errors import HeadraceError

pytestmark = pytest.mark.unit

STREAM = b': hello\n\nid: 1\ndata: {"a":1}\n\ndata:{"b":2}\n\n: beat\n\ndata: x\ndata: y\nid: 3\n\nevent: e\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":2}', b"x\ny", b"[DONE]"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_cut_in_two_anywhere(line_end: bytes) -> None:
    data = STREAM.replace(b"\n", line_end)
    for cut in range(len(data) + 1):
        stream = EventStream()
        assert stream.feed(data[:cut]) + stream.feed(data[cut:]) == EVENTS, cut
        assert stream.is_whole and stream.comments == 2


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_byte_by_byte(line_end: bytes) -> None:
    stream = EventStream()
    data = STREAM.replace(b"\n", line_end)
    found = [event for index in range(len(data)) for event in stream.feed(data[index : index + 1])]
    assert found == EVENTS


def test_a_stream_cut_within_an_event_is_not_whole() -> None:
    stream = EventStream()
    assert stream.feed(b"data: 1\n\ndata: 2\n") == [b"1"]
    assert not stream.is_whole


def test_an_event_without_end_is_refused() -> None:
    stream = EventStream()
    with pytest.raises(HeadraceError, match="longer than"):
        stream.feed(b"x" * (MAX_EVENT_BYTES + 1))
