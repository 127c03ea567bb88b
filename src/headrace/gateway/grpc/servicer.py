"""The methods of the service. Owns what is checked of a call before it is listened to, and the answers that go on.

Whoever has no key is refused before a message of theirs is read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote
from weakref import WeakValueDictionary

import grpc
import msgspec
from grpc.aio import EOF, ServicerContext

from headrace.core.errors import HeadraceError, InvalidInput, TimedOut
from headrace.gateway.app import Gateway
from headrace.gateway.credit import Credit
from headrace.gateway.door import plain_headers
from headrace.gateway.errors import ReceiveTimeout, failure_of
from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.gateway.grpc.asking import Said, read, read_first
from headrace.gateway.grpc.call import BURST_MESSAGES, MESSAGES_PER_S, SERVICE, Call, CallExchange
from headrace.gateway.schemas.headers import MAX_MS, TARGET_HEADERS
from headrace.gateway.websocket.messages import Resume, Start

_DEADLINE = TARGET_HEADERS["deadline_s"]
_TAKEN = frozenset({"authorization", "x-api-key", "x-request-id", "x-client-request-id"})
# Pages in a browser cannot speak this protocol: there is no name that one of them could have made point here.
_HOST = {"host": "localhost"}
# Stands for what a call asked that was refused before it was read.
_NOTHING = Resume("-")

Method = Callable[[Any, ServicerContext], Awaitable[None]]


class Servicer:
    def __init__(self, app: Gateway) -> None:
        self._app = app
        self._answers: set[asyncio.Task[None]] = set()
        # Of connections with a call: what they may still say.
        self._credits: WeakValueDictionary[str, Credit] = WeakValueDictionary()

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        """Messages come and go as bytes: what cannot be read is ours to answer."""
        methods = {"Predict": self._method(pb.PredictRequest), "ResumePredict": self._method(pb.ResumeRequest)}
        return grpc.method_handlers_generic_handler(
            SERVICE, {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        )

    @property
    def is_draining(self) -> bool:
        return self._app.context.is_draining

    async def idle(self) -> None:
        """Until every answer is out, and every stream that was begun here has ended."""
        while self._answers:
            await asyncio.wait(self._answers)

    def _method(self, kind: type[Said]) -> Method:
        async def serve(_: Any, rpc: ServicerContext) -> None:
            await self._serve(kind, rpc)

        return serve

    async def _serve(self, kind: type[Said], rpc: ServicerContext) -> None:
        context = self._app.context
        began_s = context.clock.now_s()
        call = Call(rpc, context, kind, self._credit_of(rpc.peer(), began_s))
        headers: Mapping[str, str] = {}
        asked: Start | Resume = _NOTHING
        error: HeadraceError | None = None
        try:
            headers = _headers(rpc)
            self._app.authenticate(headers)
            asked = await self._first(kind, rpc)
            if isinstance(asked, Start):
                asked = _with_deadline(asked, headers, rpc.time_remaining())
        except HeadraceError as refused:
            error = refused.with_traceback(None)  # which holds this frame
        exchange = CallExchange(asked, call, context, headers, _address(rpc.peer()), began_s=began_s)
        self._answer(exchange, call, error)
        await call.run(exchange)

    def _credit_of(self, peer: str, now_s: float) -> Credit:
        """Of the connection, which its address names."""
        credit = self._credits.get(peer)
        if credit is None:
            credit = self._credits[peer] = Credit(BURST_MESSAGES, MESSAGES_PER_S, now_s)
        return credit

    def _answer(self, exchange: CallExchange, call: Call, error: HeadraceError | None) -> None:
        """Beside the call: it goes on while the stream does."""

        def over(task: "asyncio.Task[None]") -> None:
            self._answers.discard(task)
            call.close(failure_of(RuntimeError()) if task.cancelled() or task.exception() else None)

        task = asyncio.get_running_loop().create_task(self._app.context.answer(exchange, error))
        self._answers.add(task)
        task.add_done_callback(over)

    async def _first(self, kind: type[Said], rpc: ServicerContext) -> Start | Resume:
        try:
            data = await asyncio.wait_for(rpc.read(), self._app.context.config.receive_s)
        except TimeoutError:
            raise ReceiveTimeout("The first message did not arrive in time.") from None
        if data is EOF:
            raise InvalidInput("The call ended before it asked for anything.")
        return read_first(read(data, kind))


def _headers(rpc: ServicerContext) -> dict[str, str]:
    """Of the metadata, what HTTP would look at."""
    found = [
        (name.encode("ascii"), value.encode("latin-1", errors="replace"))
        for name, value in rpc.invocation_metadata() or ()
        if isinstance(value, str) and (name in _TAKEN or name.startswith("x-headrace-"))
    ]
    return plain_headers(found) | _HOST


def _with_deadline(asked: Start, headers: Mapping[str, str], left_s: float | None) -> Start:
    """A call that is over at some time need not be computed beyond it. What the client says besides may be sooner."""
    if left_s is None or left_s * 1e3 > MAX_MS:
        return asked
    left_ms = f"{left_s * 1e3:.3f}"
    if float(left_ms) <= 0.0:
        raise TimedOut("The deadline of the call has passed.")
    said = asked.headers.get(_DEADLINE, headers.get(_DEADLINE))
    if said is not None and _is_sooner(said, left_s * 1e3):
        return asked
    return msgspec.structs.replace(asked, headers={**asked.headers, _DEADLINE: left_ms})


def _is_sooner(text: str, left_ms: float) -> bool:
    try:
        return float(text) <= left_ms
    except ValueError:
        # Refused where headers are read.
        return True


def _address(peer: str) -> str:
    """Of `ipv4:127.0.0.1:4711` and `ipv6:%5B::1%5D:4711`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
