"""A request that is over is gone at once: nothing of it waits for the garbage collector, which comes seldom."""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
from grpc.aio import Channel

from headrace.streams.record import Ending, Part, Usage
from tests.unit.gateway.grpc_rig import Client, Rig, ends, start, tells
from tests.unit.gateway.live import Live, Wire, play, running
from tests.unit.gateway.socket_rig import OpeningService
from tests.unit.gateway.stub import KEY, StubService, gateway

SAY = (
    b"POST /say HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}" % KEY.encode()
)
OPEN = (
    b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\nconnection: Upgrade\r\n"
    b"upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: %s==\r\n\r\n" % (KEY.encode(), b"A" * 22)
)
START = {"type": "start", "id": "a", "api": "completions", "body": {"model": "tiny", "prompt": "Hello"}, "window": 1}
OURS = ("headrace.", "uvicorn.", "wsproto.")


@contextmanager
def collector_away(found: Counter[str]) -> Iterator[None]:
    """What only a collection would free, of ours, by its type."""
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        found.update(type(each).__name__ for each in gc.garbage if type(each).__module__.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


async def begin(live: Live, service: StubService, wire: Wire | None = None) -> Wire:
    """A stream that has said one word."""
    wire = wire or await live.connect()
    await wire.send(SAY)
    while not service.streams:
        await asyncio.sleep(0.001)
    service.streams[-1].append([Part(0, text="a")])
    while await wire.line() != b'data: "a"\n':
        pass
    return wire


async def finish(service: StubService, wire: Wire) -> None:
    service.streams.pop().end(Ending(Usage()))
    while await wire.line() != b"0\r\n":
        pass
    await wire.line()


async def is_over(service: StubService, num_requests: int) -> None:
    while service.calls.count("finished") < num_requests:
        await asyncio.sleep(0.001)
    # What the loop does with a connection that it has closed, and with a task that is done, it does a turn later.
    for _ in range(10):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_streams_over_one_connection_leave_no_garbage(num_requests: int) -> None:
    found: Counter[str] = Counter()

    async def story() -> None:
        service = StubService()
        async with running(gateway(service, resume_s=0.0)) as live:
            wire = await begin(live, service)
            await finish(service, wire)
            with collector_away(found):
                for _ in range(num_requests):
                    await begin(live, service, wire)
                    await finish(service, wire)
                await is_over(service, 1 + num_requests)

    play(story())
    assert not found


def test_clients_that_leave_in_the_middle_leave_no_garbage() -> None:
    found: Counter[str] = Counter()

    async def story() -> None:
        service = StubService()
        async with running(gateway(service, resume_s=0.0, disconnect_grace_s=0.0)) as live:
            with collector_away(found):
                wire = await begin(live, service)
                await wire.close()
                await is_over(service, 1)
                service.streams.clear()

    play(story())
    assert not found


async def begin_socket(live: Live, service: OpeningService) -> Wire:
    """As `begin`, over a socket, with a window that lets one of two words through. Made by hand: a client of a library
    would leave garbage of its own."""
    wire = await live.connect()
    await wire.send(OPEN)
    while await wire.line() != b"\r\n":
        pass
    await wire.send(masked(START))
    while not service.streams:
        await asyncio.sleep(0.001)
    for word in ("a", "b"):
        service.streams[-1].append([Part(0, text=word)])
    await heard(wire, b'"type":"frame"')
    return wire


async def heard(wire: Wire, what: bytes) -> None:
    said = b""
    while what not in said:
        more = await wire.some(4096)
        assert more, "the server has closed"
        said += more


def masked(message: dict[str, object]) -> bytes:
    data = json.dumps(message).encode()
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return b"\x81" + size + bytes(4) + data


@pytest.mark.parametrize("ends", [True, False])
def test_sockets_leave_no_garbage_whether_their_streams_have_ended_or_not(ends: bool) -> None:
    found: Counter[str] = Counter()

    async def story() -> None:
        service = OpeningService()
        async with running(gateway(service, resume_s=0.0, disconnect_grace_s=0.0)) as live:
            with collector_away(found):
                for number in range(2):
                    wire = await begin_socket(live, service)
                    stream = service.streams.pop()
                    if ends:
                        await wire.send(masked({"type": "ack", "stream": stream.id, "seq": 1}))
                        stream.end(Ending(Usage()))
                        await heard(wire, b'"type":"end"')
                    del stream
                    await wire.close()
                    await is_over(service, 1 + number)

    play(story())
    assert not found


async def call_to_its_end(rig: Rig, channel: Channel) -> None:
    client = await Client(channel, start()).says()
    stream = await rig.stream()
    tells(stream, 3)
    ends(stream)
    await client.hears()
    rig.service.streams.clear()


async def call_that_is_left(rig: Rig, channel: Channel) -> None:
    client = await Client(channel, start(window=1)).says()
    tells(await rig.stream(), 3)
    await client.hears(1)
    client.call.cancel()
    rig.service.streams.clear()


async def call_that_is_refused(rig: Rig, channel: Channel) -> None:
    await Client(channel, start(body={"model": "tiny", "messages": []})).hears()


async def call_without_a_key(rig: Rig, channel: Channel) -> None:
    await Client(channel, start(), key=None).hears()


@pytest.mark.parametrize("act", [call_to_its_end, call_that_is_left, call_that_is_refused, call_without_a_key])
def test_calls_leave_no_garbage(act: Callable[[Rig, Channel], Awaitable[None]]) -> None:
    found: Counter[str] = Counter()

    async def story() -> None:
        rig = Rig(resume_s=0.0, disconnect_grace_s=0.0)
        async with rig.running() as channel:
            await act(rig, channel)
            with collector_away(found):
                for _ in range(3):
                    await act(rig, channel)
                while rig.app.num_open or rig.face._servicer._answers:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.1)

    play(story())
    assert not found


def test_a_request_whose_headers_are_refused_leaves_no_garbage() -> None:
    found: Counter[str] = Counter()

    async def story() -> None:
        async with running(gateway(StubService())) as live:
            wire = await live.connect()
            with collector_away(found):
                await wire.send(SAY.replace(b"\r\n", b"\r\nx-api-key: a\r\nx-api-key: b\r\n", 1))
                assert (await wire.answer())[0] == 400
                await asyncio.sleep(0.01)

    play(story())
    assert not found
