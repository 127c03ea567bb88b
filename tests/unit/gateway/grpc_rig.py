"""gRPC over a real port, and a service that opens streams for the real endpoints and says what a test tells it to."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from grpc.aio import EOF, Channel

from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.gateway.grpc.call import SERVICE
from headrace.gateway.grpc.face import GrpcFace
from headrace.gateway.grpc.status import ERROR_KEY
from headrace.streams.record import Ending, Failure, Part, Usage
from headrace.streams.stream import Stream
from tests.unit.gateway.socket_rig import OpeningService
from tests.unit.gateway.stub import KEY, METRICS_KEY, gateway

PATIENCE_S = 60.0
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
OTHER_KEY = METRICS_KEY


def start(api: str = "chat", body: Any = CHAT, **fields: Any) -> pb.PredictRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return pb.PredictRequest(start=pb.Start(api=api, body=data, **fields))


def resume(stream: str, after: int = 0, **fields: Any) -> pb.ResumeRequest:
    return pb.ResumeRequest(resume=pb.Resume(stream=stream, after=after, **fields))


class _Unspoilt:
    """grpc's call, which tells the server's status also where a write fails because the server has ended the call.

    Otherwise the client makes that INTERNAL now and then (grpc/grpc#36066).
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def set_internal_error(self, _: str) -> None:
        pass


class Client:
    """One call, from the client's side."""

    def __init__(
        self, channel: Channel, *said: Any, key: str | None = KEY, timeout: float | None = None, **metadata: str
    ) -> None:
        method = "ResumePredict" if said and isinstance(said[0], pb.ResumeRequest) else "Predict"
        sent = tuple((name.replace("_", "-"), value) for name, value in metadata.items())
        if key is not None:
            sent += (("authorization", f"Bearer {key}"),)
        opened = channel.stream_stream(
            f"/{SERVICE}/{method}",
            request_serializer=lambda each: each if isinstance(each, bytes) else each.SerializeToString(),
            response_deserializer=pb.PredictChunk.FromString,
        )
        self.call = opened(metadata=sent, timeout=timeout)
        self.call._cython_call = _Unspoilt(self.call._cython_call)
        self._said = said

    async def says(self, *messages: Any) -> "Client":
        for message in (*self._said, *messages):
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it was refused meanwhile
                await self.call.write(message)
        self._said = ()
        return self

    async def hears(self, most: int | None = None) -> list[pb.PredictChunk]:
        """The next chunks, all of them until the end unless `most` are wanted."""
        await self.says()
        found: list[pb.PredictChunk] = []
        while most is None or len(found) < most:
            chunk = EOF
            with suppress(grpc.aio.AioRpcError):
                chunk = await asyncio.wait_for(self.call.read(), PATIENCE_S)
            if chunk is EOF:
                break
            found.append(chunk)
        return found

    async def silent(self) -> bool:
        """Nothing comes for a while."""
        reading = asyncio.ensure_future(self.call.read())
        done, _ = await asyncio.wait([reading], timeout=0.2)
        assert not done, reading.result()
        self._pending = reading
        return True

    async def next(self) -> pb.PredictChunk:
        """What `silent` waited for."""
        return await asyncio.wait_for(self._pending, PATIENCE_S)

    async def code(self) -> grpc.StatusCode:
        return await asyncio.wait_for(self.call.code(), PATIENCE_S)

    async def trailer(self) -> dict[str, Any]:
        return dict(await self.call.trailing_metadata())

    async def error(self) -> dict[str, Any]:
        """As HTTP would say it."""
        found: dict[str, Any] = json.loads((await self.trailer())[ERROR_KEY])["error"]
        return found


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.service = OpeningService()
        self.app = gateway(self.service, **settings)
        self.face = GrpcFace(self.app, self.app.context.config)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Channel]:
        pulse = asyncio.create_task(self.app.context.pulse.run())
        await self.face.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{self.face.port}") as channel:
                yield channel
        finally:
            self.app.drain()
            self.app.close_streams()
            await asyncio.wait_for(self.face.finish(), PATIENCE_S)
            pulse.cancel()

    async def stream(self, number: int = 0) -> Stream:
        """The stream that was opened for a call."""
        await eventually(lambda: len(self.service.streams) > number)
        return self.service.streams[number]


async def eventually(look: Callable[[], Any]) -> Any:
    for _ in range(6000):
        found = look()
        if found:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def tells(stream: Stream, num_tokens: int, first: int = 0) -> None:
    for index in range(first, first + num_tokens):
        stream.append([Part(0, (index,), f"w{index} ", index=index)], step=index + 1)


def ends(stream: Stream, failure: Failure | None = None) -> None:
    stream.append([Part(0, finish="stop")])
    stream.end(Ending(Usage(3, 1, len(stream.records) - 1), failure))
