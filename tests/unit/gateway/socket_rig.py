"""Sockets without a network: a connection whose transport is a list of bytes, a peer that reads them with wsproto, and a
service that opens streams for the real endpoints."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

from wsproto.connection import Connection as Wire
from wsproto.connection import ConnectionType
from wsproto.events import CloseConnection, Event, TextMessage

from headrace.accounts.keys import KeyRing
from headrace.core.caller import Caller
from headrace.core.errors import ModelNotFound
from headrace.core.stages import StageClock
from headrace.gateway.exchange import Exchange
from headrace.gateway.websocket.connection import Connection
from headrace.gateway.websocket.session import Session
from headrace.serving.order import Order
from headrace.streams.record import Ending, Failure, Part, Usage
from headrace.streams.stream import Stream
from tests.builders import TestClock
from tests.unit.gateway.stub import KEY, TENANTS, StubService, gateway, turns


class Pipe:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.written = b""
        self._is_reading = True
        self._fate = ""

    def fate(self) -> str:
        """Empty while it is open."""
        return self._fate

    def reads(self) -> bool:
        return self._is_reading

    def write(self, data: bytes) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        assert self._is_reading
        self._is_reading = False

    def resume_reading(self) -> None:
        assert not self._is_reading
        self._is_reading = True

    def close(self) -> None:
        self._fate = self._fate or "closed"

    def abort(self) -> None:
        self._fate = self._fate or "aborted"


@dataclass
class Listener:
    """What a connection told whoever speaks over it."""

    heard_messages: list[bytes] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def heard(self, message: bytes, began_s: float) -> None:
        self.heard_messages.append(message)

    def flows(self) -> None:
        self.told.append("flows")

    def lost(self) -> None:
        self.told.append("lost")

    def drain(self) -> None:
        self.told.append("drain")


class Rig:
    """A connection that is open; use it with a loop running."""

    def __init__(self, **settings: Any) -> None:
        self.clock = TestClock()
        self.app = gateway(clock=self.clock, **settings)
        self.talk = Listener()
        self.connections: set[Any] = set()
        self.pipe = Pipe()
        self.connection = Connection(self.app.context, self.talk, self.connections)
        self.connection.connection_made(cast(asyncio.BaseTransport, self.pipe))
        self.peer = Wire(ConnectionType.CLIENT)

    def sends(self, *events: Event) -> None:
        self.receives(b"".join([self.peer.send(event) for event in events]))

    def says(self, text: str) -> None:
        self.sends(TextMessage(text))

    def receives(self, data: bytes) -> None:
        self.connection.data_received(data)

    def passes(self, seconds: float) -> None:
        self.clock.time_s += seconds
        self.connection.check()

    @property
    def heard(self) -> list[Event]:
        """By the peer since it was asked last."""
        data, self.pipe.written = self.pipe.written, b""
        self.peer.receive_data(data)
        return list(self.peer.events())

    @property
    def code(self) -> int | None:
        """That it was closed with."""
        return next((int(event.code) for event in self.heard if isinstance(event, CloseConnection)), None)


class _Model:
    name = "tiny"


class OpeningService(StubService):
    """As the stub, for the endpoints of the product: it knows one model."""

    def model(self, name: str) -> _Model:
        if name != _Model.name:
            raise ModelNotFound("It is not served here.", param="model")
        return _Model()

    async def open(self, order: Order, caller: Caller, stages: StageClock) -> Stream:  # type: ignore[override]
        stream = Stream(order.request_id, caller.tenant, order.dialect, model=order.model)
        self.streams.append(stream)
        return stream


class SocketScene:
    """A socket with streams, without a network: the clock stands still unless the story moves it. `says` is the client;
    `heard` is what it was told since it was asked last."""

    def __init__(self, **settings: Any) -> None:
        self.clock = TestClock()
        self.service = OpeningService()
        self.app = gateway(self.service, clock=self.clock, **settings)
        headers = {"host": "localhost", "authorization": f"Bearer {KEY}"}
        scope = {"method": "GET", "raw_path": b"/v1/stream", "state": {}}
        opened = Exchange(scope, _never, _never_sent, self.app.context, headers, request_id="req_0", began_s=0.0)
        opened.caller = KeyRing(TENANTS).find(KEY)
        self.session = Session(opened)
        self.pipe = Pipe()
        self.connection = Connection(self.app.context, self.session, set())
        self.session.connection = self.connection
        self.connection.connection_made(cast(asyncio.BaseTransport, self.pipe))
        self._peer = Wire(ConnectionType.CLIENT)

    async def says(self, type: str, **fields: Any) -> None:
        self.connection.data_received(self._peer.send(TextMessage(json.dumps({"type": type, **fields}))))
        await turns()

    async def starts(self, id: str = "a", **fields: Any) -> Stream:
        """A stream that said nothing yet."""
        body = {"model": "tiny", "prompt": "Hello"}
        await self.says("start", id=id, api="completions", **{"body": body, **fields})
        (started,) = self.heard
        assert (started["type"], started["id"]) == ("started", id)
        return self.service.streams[-1]

    async def passes(self, seconds: float) -> None:
        """In beats, as the pulse would."""
        end_s = self.clock.time_s + seconds
        while self.clock.time_s < end_s:
            self.clock.time_s = min(self.clock.time_s + 0.25, end_s)
            self.app.context.pulse.tick()
            self.connection.check()
            await turns()

    @property
    def heard(self) -> list[dict[str, Any]]:
        data, self.pipe.written = self.pipe.written, b""
        self._peer.receive_data(data)
        return [json.loads(event.data) for event in self._peer.events() if isinstance(event, TextMessage)]

    @property
    def texts(self) -> str:
        """Of the frames that were heard since."""
        return "".join([frame["chunk"]["choices"][0]["text"] for frame in self.heard if frame["type"] == "frame"])


async def say(stream: Stream, *words: str) -> None:
    for word in words:
        stream.append([Part(0, text=word)])
    await turns()


async def end(stream: Stream, failure: Failure | None = None) -> None:
    stream.end(Ending(Usage(1, 0, 2), failure))
    await turns()


def play(story: Callable[[SocketScene], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        scene = SocketScene(**settings)
        running = asyncio.create_task(scene.session.run())
        await story(scene)
        scene.connection.connection_lost(None)
        for stream in scene.service.streams:
            if not stream.is_ended:
                stream.end(Ending(Usage()))
        await asyncio.wait_for(running, 30)
        assert scene.app.num_open == scene.session.num_open == len(scene.app.context.pulse) == 0
        assert scene.service.calls.count("finished") == len(scene.service.streams)

    asyncio.run(run())


async def _never() -> MutableMapping[str, Any]:
    raise AssertionError("nothing is read of what was upgraded")


async def _never_sent(message: MutableMapping[str, Any]) -> None:
    raise AssertionError("what was upgraded is answered")
