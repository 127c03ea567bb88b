"""Bytes of a socket: whole messages come out, and what no honest peer sends closes it with the code that says why."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from wsproto.connection import ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage

from headrace.gateway.websocket.connection import (
    BURST_FRAMES,
    FREE_FRAGMENTS,
    LAST_WORDS_S,
    LINGER_BYTES,
    MAX_PINGS_PER_S,
    text_head,
)
from tests.unit.gateway.socket_rig import Rig
from tests.unit.gateway.stub import turns

# Masked by zeros, as a lazy client might.
MASK = b"\x00\x00\x00\x00"


def story(tell: Callable[[Rig], None], **settings: Any) -> Rig:
    async def run() -> Rig:
        rig = Rig(**settings)
        tell(rig)
        return rig

    return asyncio.run(run())


def test_messages_come_out_whole_however_they_came_in() -> None:
    def tell(rig: Rig) -> None:
        rig.says("one")
        rig.sends(TextMessage("t", message_finished=False), Ping(b"!"), TextMessage("wö", message_finished=True))
        for byte in rig.peer.send(TextMessage("three")):
            rig.receives(bytes([byte]))
        assert rig.talk.heard_messages == [b"one", "twö".encode(), b"three"]
        assert rig.heard == [Pong(b"!")]

    story(tell)


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
def test_what_is_said_is_a_text_of_any_length(size: int) -> None:
    def tell(rig: Rig) -> None:
        rig.connection.say(b"x" * size, b"y")
        first, second = [event.data for event in rig.heard if isinstance(event, TextMessage)]
        assert (first, second) == ("x" * size, "y")

    story(tell)
    assert len(text_head(b"x" * size)) == (2 if size < 126 else 4 if size < 65536 else 10)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        pytest.param(b"\x81\x82" + MASK + b"\xff\xfe", 1007, id="not UTF-8"),
        pytest.param(b"\x81\x83" + MASK + b"\xed\xa0\x80", 1007, id="half a surrogate"),
        pytest.param(b"\x81\x02hi", 1002, id="not masked"),
        pytest.param(b"\xc1\x82" + MASK + b"hi", 1002, id="compressed, which was not agreed on"),
        pytest.param(b"\x83\x80" + MASK, 1002, id="an opcode that there is not"),
        pytest.param(b"\x80\x80" + MASK, 1002, id="a continuation of nothing"),
        pytest.param(b"\x89\xfe\x00\x7e" + MASK + b"x" * 126, 1002, id="a ping that is too long"),
        pytest.param(b"\x09\x80" + MASK, 1002, id="half a ping"),
        pytest.param(b"\x88\x81" + MASK + b"x", 1002, id="half a code"),
        pytest.param(b"\x81\xff" + b"\xff" * 8 + MASK, 1002, id="a length that there is not"),
    ],
)
def test_what_is_no_frame_closes_it(data: bytes, code: int) -> None:
    def tell(rig: Rig) -> None:
        rig.receives(data)
        assert not rig.connection.is_open
        rig.receives(data)
        assert rig.code == code

    story(tell)


def test_a_text_that_breaks_off_within_a_character_is_no_text() -> None:
    def tell(rig: Rig) -> None:
        rig.receives(b"\x01\x81" + MASK + b"\xc3")
        assert rig.connection.is_open
        rig.receives(b"\x80\x80" + MASK)
        assert rig.code == 1007

    story(tell)


def test_bytes_are_not_read_here() -> None:
    def tell(rig: Rig) -> None:
        rig.sends(BytesMessage(b"{}"))
        assert rig.code == 1003

    story(tell)


def test_a_huge_frame_is_kept_up_to_the_bound_and_no_further() -> None:
    def tell(rig: Rig) -> None:
        rig.receives(b"\x81\xff" + (100 << 20).to_bytes(8, "big") + MASK)
        for _ in range(10):
            rig.receives(b"x" * 100_000)
        assert rig.connection.is_open
        rig.receives(b"x" * 100_000)
        assert rig.code == 1009
        while not rig.pipe.fate():
            rig.receives(b"x" * 1_000_000)
        assert rig.pipe.fate() == "aborted"
        assert rig.connection._ignored_bytes <= LINGER_BYTES + 1_000_000

    story(tell, max_body_bytes=1_000_000)


def test_fragments_are_counted_together() -> None:
    def tell(rig: Rig) -> None:
        rig.sends(*[TextMessage("x" * 500, message_finished=False)] * 2)
        assert rig.connection.is_open
        rig.sends(TextMessage("x", message_finished=True))
        assert rig.code == 1009
        assert rig.talk.heard_messages == []

    story(tell, max_body_bytes=1000)


def test_fragments_without_end_are_a_policy_matter() -> None:
    async def run() -> None:
        rig = Rig()
        empty = rig.peer.send(TextMessage("", message_finished=False))
        more = b"\x00\x80" + MASK
        rig.receives(empty)
        num_sent = 1
        while rig.connection.is_open:
            assert num_sent <= FREE_FRAGMENTS
            rig.clock.time_s += 1.0
            rig.receives(more * 64)
            num_sent += 64
        assert rig.code == 1008

    asyncio.run(run())


def test_a_message_that_does_not_arrive_in_time_closes_it() -> None:
    def tell(rig: Rig) -> None:
        rig.sends(TextMessage("{", message_finished=False))
        rig.passes(29.0)
        assert rig.connection.is_open
        rig.passes(2.0)
        assert rig.code == 1008

    story(tell, receive_s=30.0, heartbeat_s=60.0)


def test_pings_are_answered_at_a_bounded_rate_and_a_flood_closes_it() -> None:
    def tell(rig: Rig) -> None:
        rig.sends(*[Ping(b"%d" % number) for number in range(50)])
        assert rig.heard == [Pong(b"0")]
        rig.passes(0.2)
        # Of those that were not answered only the last one is.
        assert rig.heard == [Pong(b"49")]
        rig.sends(*[Ping()] * (MAX_PINGS_PER_S - 50))
        assert rig.connection.is_open
        rig.sends(Ping())
        assert rig.code == 1008

    story(tell)


def test_frames_beyond_a_rate_wait_in_the_peers_buffers() -> None:
    async def run() -> None:
        rig = Rig()
        rig.receives(rig.peer.send(TextMessage("x")) * 10_000)
        # The rest is not looked at before the loop had its turn, and time has passed.
        assert len(rig.talk.heard_messages) <= BURST_FRAMES
        assert not rig.pipe.reads()
        num_turns = 0
        while len(rig.talk.heard_messages) < 10_000:
            before = len(rig.talk.heard_messages)
            rig.clock.time_s += 0.02
            rig.connection._go_on()
            assert before < len(rig.talk.heard_messages) <= before + BURST_FRAMES
            num_turns += 1
        assert num_turns > 10_000 / BURST_FRAMES - 1
        rig.clock.time_s += 0.02
        rig.connection._go_on()
        assert rig.pipe.reads()
        rig.connection.connection_lost(None)

    asyncio.run(run())


def test_a_silent_peer_is_asked_and_one_that_does_not_answer_is_gone() -> None:
    def tell(rig: Rig) -> None:
        rig.passes(9.0)
        assert rig.heard == []
        rig.passes(1.0)
        assert rig.heard == [Ping(b"")]
        rig.sends(Pong(b""))
        rig.passes(10.0)
        assert rig.heard == [Ping(b"")]
        rig.passes(19.0)
        assert not rig.pipe.fate()
        rig.passes(2.0)
        assert rig.pipe.fate() == "aborted"

    story(tell, heartbeat_s=10.0)


def test_a_peer_that_speaks_is_not_asked() -> None:
    def tell(rig: Rig) -> None:
        for _ in range(10):
            rig.passes(5.0)
            rig.says("{}")
        assert rig.heard == []

    story(tell, heartbeat_s=10.0)


def test_whoever_does_not_read_is_not_listened_to() -> None:
    def tell(rig: Rig) -> None:
        rig.connection.pause_writing()
        assert (rig.connection.is_open, rig.connection.is_writable) == (True, False)
        for _ in range(3):
            rig.says("x")
        assert len(rig.talk.heard_messages) <= 3 and not rig.pipe.reads()
        num_heard = len(rig.talk.heard_messages)
        rig.passes(3.0)
        assert len(rig.talk.heard_messages) == num_heard
        rig.connection.resume_writing()
        assert rig.connection.is_writable and rig.pipe.reads()
        assert rig.talk.told == ["flows"] and len(rig.talk.heard_messages) == 3

    story(tell)


def test_whoever_does_not_read_for_long_is_cut_off_and_never_taken_for_dead_before() -> None:
    def tell(rig: Rig) -> None:
        rig.passes(11.0)
        rig.connection.pause_writing()
        rig.passes(59.0)
        assert not rig.pipe.fate()
        rig.passes(1.5 + LAST_WORDS_S)
        assert rig.pipe.fate() == "aborted"

    story(tell, heartbeat_s=10.0, max_unread_s=60.0)


def test_the_peer_closes() -> None:
    def tell(rig: Rig) -> None:
        rig.sends(CloseConnection(1000, "bye"))
        assert not rig.connection.is_open
        assert rig.code == 1000
        assert rig.peer.state is ConnectionState.CLOSED
        assert rig.pipe.fate() == "closed"
        rig.connection.connection_lost(None)
        assert rig.talk.told == ["lost"] and not rig.connections
        rig.connection.say(b"nobody hears this")
        rig.connection.close(1000, "nor this")
        rig.connection.check()

    story(tell)


def test_this_end_closes_and_waits_for_the_other_to_say_so_too() -> None:
    async def run() -> None:
        rig = Rig()
        rig.connection.close(1001, "going away")
        rig.says("what was under way is not listened to")
        assert rig.code == 1001
        assert not rig.pipe.fate() and rig.talk.heard_messages == []
        rig.sends(CloseConnection(1001))
        assert rig.pipe.fate() == "closed"
        rig.connection.connection_lost(None)
        await turns()

    asyncio.run(run())


@pytest.mark.parametrize(("num_frames", "fate"), [(10, "closed"), (10_000, "")])
def test_behind_a_flood_the_other_ends_close_is_not_looked_for(num_frames: int, fate: str) -> None:
    def tell(rig: Rig) -> None:
        rig.connection.close(1008, "enough")
        rig.receives(rig.peer.send(TextMessage("{}")) * num_frames)
        assert rig.code == 1008
        rig.sends(CloseConnection(1008))
        # Where it is not, the connection is cut a little later.
        assert rig.pipe.fate() == fate

    story(tell)


def test_the_server_stops() -> None:
    def tell(rig: Rig) -> None:
        assert rig.connections == {rig.connection}
        rig.connection.shutdown()
        assert rig.talk.told == ["drain"]

    story(tell)
