import pickle
import tracemalloc
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import TooLarge
from headrace.transport.wire import MAGIC, PREAMBLE, BadWire, Encoder, Greeting, Parser
from tests.unit.transport.rig import Note

BOUND = 1000
HELLO_OF_TLS = bytes.fromhex("16030100c8010000c40303")


def encode(*messages: object) -> bytes:
    buffer = bytearray()
    for message in messages:
        Encoder(BOUND).append(message, buffer)
    return bytes(buffer)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(places)]


@given(st.lists(st.binary(max_size=600), max_size=12), st.lists(st.integers(0, 10_000), max_size=30))
def test_messages_survive_any_cut(payloads: list[bytes], cuts: list[int]) -> None:
    parser = Parser(BOUND)
    parsed = [msgspec.msgpack.decode(body) for piece in pieces(encode(*payloads), cuts) for body in parser.feed(piece)]
    assert parsed == payloads and not parser.is_partial


def test_one_byte_at_a_time() -> None:
    parser = Parser(BOUND)
    data = encode(Note(1, b"x" * 300), Note(2))
    parsed = [msgspec.msgpack.decode(body, type=Note) for byte in data for body in parser.feed(bytes([byte]))]
    assert parsed == [Note(1, b"x" * 300), Note(2)]


def test_a_whole_message_is_a_view_of_what_was_read() -> None:
    data = encode(Note(1))
    (body,) = Parser(BOUND).feed(data)
    assert body.obj is data


def test_a_message_of_the_bound_passes_and_one_byte_more_does_not() -> None:
    parser = Parser(BOUND)
    assert [len(body) for body in parser.feed(BOUND.to_bytes(4, "big") + bytes(BOUND))] == [BOUND]
    with pytest.raises(BadWire, match="longer than 1000"):
        list(parser.feed((BOUND + 1).to_bytes(4, "big")))


def test_a_length_is_refused_when_it_comes_in_parts() -> None:
    parser = Parser(BOUND)
    assert not list(parser.feed(b"\xff\xff"))
    with pytest.raises(BadWire, match="4294967295"):
        list(parser.feed(b"\xff\xff"))


def test_a_length_alone_allocates_nothing() -> None:
    parser = Parser(1 << 30)
    tracemalloc.start()
    try:
        list(parser.feed((1 << 30).to_bytes(4, "big") + b"x"))
        list(parser.feed(b"x"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parser.is_partial and peak < 100_000


def test_what_cannot_be_sent_leaves_the_buffer_as_it_was() -> None:
    buffer = bytearray(encode(Note(1)))
    before = bytes(buffer)
    with pytest.raises(TooLarge):
        Encoder(BOUND).append(Note(2, bytes(BOUND)), buffer)
    with pytest.raises(TypeError):
        Encoder(BOUND).append([Note(2), object()], buffer)
    assert buffer == before


def test_an_encoder_says_how_much_it_added() -> None:
    buffer = bytearray(b"before")
    assert Encoder(BOUND).append(Note(1), buffer) == len(buffer) - len(b"before")


@pytest.mark.parametrize("cut", range(len(PREAMBLE) + 1))
def test_a_preamble_may_come_in_two_reads(cut: int) -> None:
    greeting = Greeting()
    rest = greeting.feed(PREAMBLE[:cut])
    if cut < len(PREAMBLE):
        assert rest is None
        rest = greeting.feed(PREAMBLE[cut:] + b"rest")
        assert rest == b"rest"
    else:
        assert rest == b""


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n", pickle.dumps([1]), HELLO_OF_TLS, b"\x00", encode(Note(1)), MAGIC[:3] + b"X", b"\x89PNG"],
    ids=["http", "pickle", "tls", "zero", "message", "almost", "png"],
)
def test_foreign_bytes_are_refused_at_once(data: bytes) -> None:
    with pytest.raises(BadWire, match="preamble"):
        Greeting().feed(data)


def test_another_version_is_named() -> None:
    with pytest.raises(BadWire, match="version 9 of the wire, this end speaks 1"):
        Greeting().feed(MAGIC + b"\x09")
