"""What no library would send, over a real port: the connection is sent away, and others are answered."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from grpc.aio import Channel
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.gateway.grpc.call import BURST_MESSAGES, SERVICE, Call
from headrace.gateway.grpc.face import MAX_STREAMS
from headrace.gateway.grpc.health import Health
from headrace.streams.record import Part
from tests.builders import TestClock
from tests.unit.gateway.grpc_rig import PATIENCE_S, Client, Rig, ends, eventually, resume, start
from tests.unit.gateway.live import play, write_pair

HEADERS, RESET, SETTINGS, PING, GOAWAY, CONTINUATION = 1, 3, 4, 6, 7, 9
END_HEADERS = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ENHANCE_YOUR_CALM = 11
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def header(name: bytes, value: bytes) -> bytes:
    """As HPACK has it, literally."""
    return b"\0%c%b%c%b" % (len(name), name, len(value), value)


HEAD = b"".join(
    [
        header(b":method", b"POST"),
        header(b":scheme", b"http"),
        header(b":path", f"/{SERVICE}/Predict".encode()),
        header(b":authority", b"localhost"),
        header(b"te", b"trailers"),
        header(b"content-type", b"application/grpc"),
    ]
)


class Wire:
    """A connection of bytes. What comes back is heard as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.heard = bytearray()
        self.closed = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(1 << 16):
                self.heard.extend(data)

    async def sends(self, *parts: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                self._writer.write(part)
                await self._writer.drain()

    async def close(self) -> None:
        self.closed.cancel()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    @property
    def code(self) -> int | None:
        """With which it was sent away."""
        data, code = bytes(self.heard), None
        while len(data) >= 9:
            size, kind = int.from_bytes(data[:3], "big"), data[3]
            if kind == GOAWAY:
                code = struct.unpack(">I", data[13:17])[0]
            data = data[9 + size :]
        return code


@contextlib.asynccontextmanager
async def wire(rig: Rig) -> AsyncIterator[Wire]:
    found = Wire(*await asyncio.open_connection("127.0.0.1", rig.face.port))
    await found.sends(PREFACE, frame(SETTINGS))
    try:
        yield found
    finally:
        await found.close()


async def still_answers(rig: Rig, channel: Channel) -> None:
    num_before = len(rig.service.streams)
    client = await Client(channel, start()).says()
    ends(await rig.stream(num_before))
    assert (await client.hears())[-1].is_final


def test_a_flood_of_pings_is_told_to_calm_down() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel, wire(rig) as wild:
            await wild.sends(frame(PING, b"12345678") * 10_000)
            await asyncio.wait_for(asyncio.shield(wild.closed), PATIENCE_S)
            assert wild.code == ENHANCE_YOUR_CALM
            await still_answers(rig, channel)

    play(story())


def test_noise_is_not_listened_to() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel, wire(rig) as wild:
            await wild.sends(b"\xff" * 100_000)
            await asyncio.wait_for(asyncio.shield(wild.closed), PATIENCE_S)
            await still_answers(rig, channel)

    play(story())


@pytest.mark.parametrize(
    "flood",
    [
        lambda: [frame(SETTINGS) * 20_000],
        lambda: [
            frame(HEADERS, HEAD, stream=1),
            *[frame(CONTINUATION, header(b"x-many", b"a" * 100) * 100, stream=1) for _ in range(500)],
        ],
        lambda: [
            frame(HEADERS, HEAD, flags=END_HEADERS, stream=number) + frame(RESET, b"\0\0\0\x08", stream=number)
            for number in range(1, 4001, 2)
        ],
    ],
    ids=["settings", "continuations", "resets"],
)
def test_a_flood_keeps_nobody_else_from_being_answered(flood: Callable[[], list[bytes]]) -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel, wire(rig) as wild:
            await wild.sends(*flood())
            await still_answers(rig, channel)
            await eventually(lambda: not rig.app.num_open)

    play(story())


def test_a_client_that_does_not_read_at_all_is_cut_off() -> None:
    """Its window over HTTP/2 is full: neither a chunk nor a status can reach it."""

    async def story() -> None:
        rig = Rig(max_unread_s=1.5, max_unread_bytes=1 << 30)
        async with rig.running() as channel:
            client = await Client(channel, start()).says()
            stream = await rig.stream()
            for _ in range(4000):
                stream.append([Part(0, (1,), "a" * 10_000)])
            await eventually(lambda: "cancel client_too_slow" in rig.service.calls)
            await eventually(lambda: not rig.app.num_open)
            assert len(await client.hears()) < 4000
            assert await client.code() is not grpc.StatusCode.OK
            await still_answers(rig, channel)

    play(story())


def test_so_many_messages_are_heard_of_one_connection_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Call] = []
    monkeypatch.setattr(Call, "_hear", lambda call, said: heard.append(call))

    async def story() -> None:
        clock = TestClock()
        rig = Rig(clock=clock)
        async with rig.running() as channel:
            acks = [pb.PredictRequest(ack=pb.Ack(seq=0))] * BURST_MESSAGES
            clients = [Client(channel, start(), *acks) for _ in range(2)]
            saying = asyncio.gather(*[client.says() for client in clients])
            await eventually(lambda: len(heard) >= BURST_MESSAGES)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.face.port}", OWN_CONNECTION) as other:
                await Client(other, start()).says(acks[0])
                await eventually(lambda: len(set(heard)) == 3)
            assert len(heard) <= BURST_MESSAGES + 2, "each call hears what is here already"
            clock.time_s += 1.0
            await eventually(lambda: len(heard) == 2 * BURST_MESSAGES + 1)
            await saying
            for stream in rig.service.streams:
                ends(stream)

    play(story())


def test_what_is_wrong_is_said_shortly_however_long_it_was() -> None:
    """A status is sent as headers, of which a client takes eight kilobytes."""

    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            for first in (start("a" * 100_000), start(headers={"x-headrace-a": "b" * 100_000}), resume("c" * 100_000)):
                client = Client(channel, first)
                assert await client.hears() == []
                assert await client.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert len((await client.error())["message"]) < 500

    play(story())


def test_a_call_whose_chunks_cannot_be_worded_ends_with_the_status_for_that() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            client = await Client(channel, start()).says()
            stream = await rig.stream()
            stream.append([Part(0, (1,), "one")])
            stream.append([Part(0, (2,), "\ud800")])
            *_, last = await client.hears()
            assert last.is_final and last.error.code == "internal_error" and last.chunk_seq <= 1
            assert await client.code() is grpc.StatusCode.INTERNAL

    play(story())


def test_whoever_watches_the_health_of_a_server_that_is_replaced_does_not_keep_it() -> None:
    async def story() -> None:
        rig = Rig(drain_s=1e6)
        async with rig.running() as channel:
            watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            rig.app.retire()
            await asyncio.wait_for(rig.face.finish(), PATIENCE_S)
            assert await watch.code() is grpc.StatusCode.UNAVAILABLE

    play(story())


class SlowContext:
    """Of a call whose client takes its messages when it is told to."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.calls: list[object] = []

    async def write(self, message: health_pb2.HealthCheckResponse) -> None:
        await self.takes.wait()
        self.calls.append(message.status)

    async def abort(self, code: grpc.StatusCode, _: str) -> None:
        self.calls.append(code)


def test_whoever_watches_is_sent_away_behind_the_message_that_is_on_its_way() -> None:
    async def story() -> None:
        health, context = Health(lambda: True), SlowContext()
        health.look()
        watching = asyncio.ensure_future(health.Watch(health_pb2.HealthCheckRequest(), context))
        await asyncio.sleep(0)
        health.close()
        await asyncio.sleep(0)
        assert not watching.done() and context.calls == []
        context.takes.set()
        await asyncio.wait_for(watching, PATIENCE_S)
        assert context.calls == [health_pb2.HealthCheckResponse.SERVING, grpc.StatusCode.UNAVAILABLE]

    play(story())


def test_a_deadline_that_is_over_when_it_comes_leaves_nothing_behind() -> None:
    async def story() -> None:
        rig = Rig(disconnect_grace_s=0.0)
        async with rig.running() as channel:
            client = Client(channel, start(), timeout=1e-6)
            assert await client.hears() == []
            # The client's own library says the second when the deadline meets it while it sends.
            assert await client.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL)
            await eventually(lambda: not rig.app.num_open)
            assert all(stream.is_ended for stream in rig.service.streams)

    play(story())


def test_one_connection_has_so_many_calls_at_once_and_the_others_wait() -> None:
    async def story() -> None:
        rig = Rig()
        async with rig.running() as channel:
            clients = [Client(channel, start()) for _ in range(MAX_STREAMS + 20)]
            opening = [asyncio.ensure_future(client.says()) for client in clients]
            await eventually(lambda: len(rig.service.streams) == MAX_STREAMS)
            assert rig.app.num_open == MAX_STREAMS
            for client, task in zip(clients, opening, strict=True):
                client.call.cancel()
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)

    play(story())


def test_tls_has_the_certificate_of_http_and_takes_a_new_one(tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path, "localhost")

    async def story() -> None:
        rig = Rig(tls_cert=cert, tls_key=key)
        async with rig.running():
            for _ in range(2):
                trusted = grpc.ssl_channel_credentials(Path(cert).read_bytes())
                async with grpc.aio.secure_channel(f"localhost:{rig.face.port}", trusted) as channel:
                    await still_answers(rig, channel)
                write_pair(tmp_path, "localhost")

    play(story())
