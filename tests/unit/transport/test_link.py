import asyncio
from typing import Any, cast

from headrace.transport.link import SocketLink
from headrace.transport.reception import Reception
from headrace.transport.wire import PREAMBLE, Encoder, Limits
from tests.unit.transport.rig import Ear, Known, Note, run


class Wire:
    """A transport that keeps what is written, and is full when told so."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> None: ...


def connect(limits: Limits | None = None) -> tuple[SocketLink, Wire, list[Ear]]:
    ears: list[Ear] = []

    def make(link: Any) -> Ear:
        ears.append(Ear(link))
        return ears[-1]

    wire = Wire()
    link = SocketLink(Reception(make, Known), limits or Limits(), lambda _: "wire")
    link.connection_made(cast("asyncio.Transport", wire))
    return link, wire, ears


def test_a_small_first_message_of_a_turn_leaves_at_once_and_all_behind_it_in_one_write() -> None:
    async def story() -> None:
        link, wire, _ = connect()
        for number in range(100):
            link.send(Note(number))
            assert len(wire.writes) == 2
        await asyncio.sleep(0)
        assert len(wire.writes) == 3
        link.send(Note(100))
        assert len(wire.writes) == 4
        await asyncio.sleep(0)
        assert len(wire.writes) == 4
        encoded, sent = bytearray(), Encoder(1 << 20)
        for number in range(101):
            sent.append(Note(number), encoded)
        assert b"".join(wire.writes) == PREAMBLE + encoded
        link.abandon("done")

    run("asyncio", story())


def test_a_large_message_leaves_with_all_others_of_its_turn() -> None:
    async def story() -> None:
        link, wire, _ = connect()
        for number in range(3):
            link.send(Note(number, bytes(32 << 10)))
        assert wire.writes == [PREAMBLE]
        await asyncio.sleep(0)
        assert len(wire.writes) == 2
        link.abandon("done")

    run("asyncio", story())


def test_a_full_transport_is_given_no_more_and_then_all_at_once() -> None:
    async def story() -> None:
        link, wire, _ = connect()
        link.pause_writing()
        for number in range(100):
            link.send(Note(number))
            await asyncio.sleep(0)
        assert len(wire.writes) == 1 and link.pending_bytes > 1000
        link.resume_writing()
        assert len(wire.writes) == 2 and link.pending_bytes == 0
        link.abandon("done")

    run("asyncio", story())


def test_a_large_message_leaves_in_parts_that_count_until_they_left() -> None:
    async def story() -> None:
        link, wire, _ = connect()
        link.send(Note(1, bytes(1 << 20)))
        await asyncio.sleep(0)
        assert max(map(len, wire.writes)) == 256 << 10 and sum(map(len, wire.writes)) > 1 << 20
        link.abandon("done")

    run("asyncio", story())


def test_an_end_has_one_reason_and_the_receiver_hears_it_in_a_turn_of_its_own() -> None:
    async def story() -> None:
        link, wire, ears = connect()
        link.data_received(PREAMBLE)
        link.fail("first")
        link.fail("second")
        link.close()
        assert ears[0].reasons == [] and wire.is_aborted
        link.connection_lost(OSError("third"))
        link.data_received(b"late")
        await asyncio.sleep(0)
        assert ears[0].reasons == ["first"] and link.gone.done()

    run("asyncio", story())
