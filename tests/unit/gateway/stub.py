"""A service that says what a test tells it to, an ASGI client without sockets, and an app around both."""

import asyncio
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headrace.accounts.keys import KeyRing, hash_key
from headrace.core.caller import Caller
from headrace.core.clock import SystemClock
from headrace.core.config import GatewayConfig, TenantEntry
from headrace.core.errors import NotFound
from headrace.core.messages import WorkerState
from headrace.core.ports import Clock
from headrace.core.stages import Stage, StageClock
from headrace.gateway.app import Gateway, build_app
from headrace.gateway.endpoints import ROUTES
from headrace.gateway.errors import error_body
from headrace.gateway.exchange import Exchange
from headrace.gateway.routes import Access, Route
from headrace.gateway.wakeful import Wakeful
from headrace.serving.explanation import Explanation
from headrace.serving.service import ModelCard
from headrace.streams.record import Ending, Failure, Part, Record, Usage
from headrace.streams.stream import Stream
from headrace.telemetry.metrics import Metrics

KEY = "sk-first-0123456789"
METRICS_KEY = "sk-second-0123456789"
TENANTS = (
    TenantEntry("first", keys=(hash_key(KEY),)),
    TenantEntry("second", keys=(hash_key(METRICS_KEY),), scopes=("metrics",), tier="free"),
)
AUTH = {"host": "localhost", "authorization": f"Bearer {KEY}"}
JSON = {**AUTH, "content-type": "application/json"}


class PlainDialect:
    """`id: 3`, the text, and at the end `[DONE]`."""

    def bound(self, created_s: float, fingerprint: str) -> "PlainDialect":
        return self

    def frame(self, record: Record) -> bytes:
        text = "".join(part.text for part in record.parts)
        lines = [b"id: %d\ndata: %s\n\n" % (record.number, msgspec.json.encode(text))] if record.parts else []
        if record.ending is not None:
            if record.ending.failure is not None:
                lines.append(b"data: " + error_body(record.ending.failure) + b"\n\n")
            lines.append(b"data: [DONE]\n\n")
        return b"".join(lines)


class StubService:
    """`streams` are those that were opened; a test appends to them. Records what the face asked of it."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.calls: list[str] = []
        self.finished_stages: list[dict[Stage, float]] = []
        self.is_served = True

    def models(self) -> list[ModelCard]:
        return [ModelCard("tiny", states=(WorkerState.READY if self.is_served else WorkerState.LOADING,))]

    def open(self, request_id: str, tenant: str) -> Stream:
        stream = Stream(request_id, tenant, PlainDialect(), model="tiny")
        self.streams.append(stream)
        return stream

    def cancel(self, stream: Stream, why: str) -> None:
        self.calls.append(f"cancel {why}")
        if not stream.is_ended:
            stream.end(Ending(Usage(), Failure("cancelled", why, 499)))

    def pause(self, stream: Stream) -> None:
        self.calls.append("pause")

    def resume(self, stream: Stream) -> None:
        self.calls.append("resume")

    def parting(self, stream: Stream) -> None:
        return None

    def finished(self, stream: Stream, stages: StageClock) -> None:
        self.calls.append("finished")
        self.finished_stages.append(dict(stages.seconds))

    def explain(self, request_id: str, caller: Caller) -> Explanation:
        if (request_id, caller.tenant) != ("known", "first"):
            raise NotFound("no such request")
        stages = {"receive": 0.25, "decode": 0.75}
        return Explanation("known", "first", "tiny", "tiny-0", stages, 1.0, Usage(3, 0, 2))


class Said(Struct, frozen=True):
    text: str = ""


async def say(exchange: Exchange, service: Any) -> None:
    """A stream."""
    said = await exchange.parse(Said)
    assert exchange.caller is not None
    stream = service.open(exchange.request_id, exchange.caller.tenant)
    for word in said.text.split():
        stream.append([Part(0, text=word + " ")])
    if said.text:
        stream.end(Ending(Usage(2, 0, len(said.text.split()))))
    await exchange.stream(stream, is_scored="x-scored" in exchange.headers)


async def whole(exchange: Exchange, service: Any) -> None:
    """The same in one piece."""
    said = await exchange.parse(Said)
    assert exchange.caller is not None
    stream = service.open(exchange.request_id, exchange.caller.tenant)
    for word in said.text.split():
        stream.append([Part(0, text=word + " ")])
    if said.text:
        stream.end(Ending(Usage(2, 0, len(said.text.split()))))
    records = await exchange.collect(stream)
    await exchange.reply(Said("".join(part.text for record in records for part in record.parts)))


async def burst(exchange: Exchange, service: Any) -> None:
    """What nobody foresaw."""
    raise ZeroDivisionError("secret /etc/passwd 10.0.0.1")


async def thing(exchange: Exchange, service: Any) -> None:
    await exchange.reply(exchange.path_params)


TEST_ROUTES = (
    Route("POST", "/say", Access.KEY, say, "Say", body=Said, reply=Said, events=True),
    Route("POST", "/whole", Access.KEY, whole, "Say it whole", body=Said, reply=Said),
    Route("POST", "/burst", Access.KEY, burst, "Burst"),
    Route("GET", "/things/{name:path}", Access.KEY, thing, "A thing"),
)


def gateway(
    service: StubService | None = None,
    *,
    clock: Clock | None = None,
    inject: Any = None,
    wakeful: Wakeful | None = None,
    **settings: Any,
) -> Gateway:
    config = replace(GatewayConfig(), **settings)
    metrics = Metrics(["tiny"], [tenant.name for tenant in TENANTS])
    return build_app(
        service or StubService(),
        KeyRing(TENANTS),
        config,
        metrics,
        clock or SystemClock(),
        inject=inject,
        routes=(*(route for route in ROUTES if route.path not in {r.path for r in TEST_ROUTES}), *TEST_ROUTES),
        wakeful=wakeful,
    )


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


class Call:
    """One request without a socket. `leave` is the client going away; `hold` lets `send` block, as a full pipe does."""

    def __init__(
        self,
        app: Gateway,
        method: str = "GET",
        path: str = "/live",
        headers: Mapping[str, str] | list[tuple[str, str]] | None = None,
        body: bytes | list[bytes] = b"",
        *,
        query: str = "",
        client: str = "203.0.113.7",
    ) -> None:
        given = {"host": "localhost"} if headers is None else headers
        items = list(given.items()) if isinstance(given, Mapping) else given
        self.answer = Answer()
        self.aborted = False
        # When the connection was given its last bytes; None: when it is asked.
        self.given_s: float | None = None
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode("latin-1"),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in items],
            "client": (client, 1234),
            "state": {"abort": self._abort, "given_s": self._when},
        }
        self._app = app
        self._pieces = [body] if isinstance(body, bytes) else list(body)
        self._gone = asyncio.Event()
        self._open_pipe = asyncio.Event()
        self._open_pipe.set()

    def _when(self) -> float:
        return self._app.context.clock.now_s() if self.given_s is None else self.given_s

    def _abort(self) -> None:
        self.aborted = True
        self.leave()

    async def run(self) -> Answer:
        await self._app(self.scope, self._receive, self._send)
        return self.answer

    def leave(self) -> None:
        self._gone.set()
        self._open_pipe.set()

    def hold(self) -> None:
        self._open_pipe.clear()

    def release(self) -> None:
        self._open_pipe.set()

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self._open_pipe.wait()
        if message["type"] == "http.response.start":
            assert self.answer.status == 0, "answered twice"
            self.answer.status = message["status"]
            self.answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert not self.answer.is_complete, "more after the end"
            self.answer.parts.append(message["body"])
            self.answer.is_complete = not message.get("more_body", False)


def ask(app: Gateway, *args: Any, **kwargs: Any) -> Answer:
    """The answer to one request."""

    async def run() -> Answer:
        return await asyncio.wait_for(Call(app, *args, **kwargs).run(), 60)

    return asyncio.run(run())


async def turns(count: int = 10) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)
