"""The ASGI application: every request comes in here and is answered exactly once. Owns the order of the checks.

Name and origin, then the route, then the key that the route asks for, then the method, then the endpoint. A request
that is refused has cost nothing but its headers.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.accounts.keys import KeyRing
from headrace.core.caller import Caller
from headrace.core.config import GatewayConfig
from headrace.core.errors import Forbidden, HeadraceError, NotFound
from headrace.core.ports import Clock
from headrace.core.stages import Stage
from headrace.gateway.context import Context, bounds_of
from headrace.gateway.courtesy import Courtesy
from headrace.gateway.door import Door, is_loopback_peer, plain_headers
from headrace.gateway.earlier import Earlier
from headrace.gateway.endpoints import ROUTES
from headrace.gateway.errors import MethodNotAllowed, failure_of, shutting_down, too_many_open
from headrace.gateway.exchange import Exchange
from headrace.gateway.finding import Finding
from headrace.gateway.ids import new_id
from headrace.gateway.logbook import log_failure, log_request
from headrace.gateway.openapi import document
from headrace.gateway.peer import ClientGone, Receive, Send
from headrace.gateway.pulse import Pulse
from headrace.gateway.routes import Access, Resource, Route, RouteTable
from headrace.gateway.wakeful import Wakeful
from headrace.streams.journal import Journal, SharedJournal
from headrace.streams.shelf import Shelf
from headrace.streams.stream import Stream
from headrace.telemetry.metrics import Metrics, Sample

# What the path of a request may hold.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@+~-]{1,128}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9, _-]{1,1000}")
# Any of them: a proxy sent this.
_FORWARDED = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"})
_METRICS_SCOPE = "metrics"
_CLOSE: Mapping[str, str] = {"connection": "close"}
_NONE: Mapping[str, str] = {}
# What nobody waited for.
CLIENT_GONE = 499
_EXPOSED = b"x-request-id, server-timing, retry-after, retry-after-ms, openai-processing-ms"


def build_app(
    service: Any,
    keys: KeyRing,
    config: GatewayConfig,
    metrics: Metrics,
    clock: Clock,
    *,
    inject: Mapping[str, float] | None = None,
    routes: Iterable[Route] = ROUTES,
    journal: SharedJournal | None = None,
    own_journal: Journal | None = None,
    wakeful: Wakeful | None = None,
) -> "Gateway":
    """`service` is the serving.Service behind it, or a double of it; `inject` is Config.inject; `journal` is the
    service's where other gateways write it too, `own_journal` where none does."""
    table = RouteTable(routes)
    shelf = Shelf(clock.now_s, bounds_of(config))

    def beat(now_s: float) -> None:
        gateway.rest()
        shelf.tick(now_s)

    pulse = Pulse(clock, metrics.observe_lag, beat)

    def adopt(stream: Stream, grace_s: float | None) -> None:
        gateway.adopt(stream, grace_s)

    earlier = None if own_journal is None else Earlier(shelf, service, adopt, own_journal)
    finding = Finding(shelf, service, adopt, clock.now_s, journal, earlier)
    context = Context(
        config, clock, service, metrics, pulse, shelf, finding, dict(inject or {}), document(table.routes)
    )
    metrics.watch_loop(lambda: pulse.lag_s)
    metrics.watch_open(lambda: len(pulse))
    gateway = Gateway(context, table, Door(keys, config), wakeful or Wakeful())
    return gateway


class Gateway:
    """One per process. `reconfigure` takes new limits and names for the requests that come after it."""

    __slots__ = ("_adopted", "_courtesy", "_door", "_num_open", "_wakeful", "context", "table")

    def __init__(self, context: Context, table: RouteTable, door: Door, wakeful: Wakeful) -> None:
        self.context = context
        self.table = table
        context.answer = self._answer
        self._door = door
        self._num_open = 0
        self._courtesy = Courtesy()
        self._wakeful = wakeful
        wakeful.configure(context.config.keep_awake)
        self._adopted: set[asyncio.Task[None]] = set()

    def reconfigure(self, config: GatewayConfig) -> None:
        self._door.configure(config)
        self.context.config = config
        self.context.shelf.bounds = bounds_of(config)
        self._wakeful.configure(config.keep_awake)

    def rest(self) -> None:
        """Told with every beat: processors may halt, or may not, by whether somebody waits for something."""
        self._wakeful.rest()

    @property
    def num_open(self) -> int:
        return self._num_open

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """For a face that asks for a key before it listens."""
        return self._door.authenticate(headers)

    def drain(self) -> None:
        """From now on new requests are sent elsewhere; those that are open go on."""
        self.context.is_draining = True

    def retire(self) -> None:
        """Another gateway takes the place of this one: what is still asked here is answered, on connections that end."""
        self.context.is_retiring = True

    def leave_streams(self) -> None:
        """The time to finish is over, for one that is being replaced: what is kept is read on elsewhere, and is left
        as it is; the rest ends with an error."""
        finding = self.context.finding
        failure = failure_of(shutting_down())
        self.context.pulse.fail(failure, lambda stream: stream.is_kept or finding.is_mirrored(stream))

    def adopt(self, stream: Stream, grace_s: float | None = None) -> None:
        """One that an earlier life of this gateway left: it can be read on here, and goes on for its grace, which its
        client may have chosen. Its readers did not leave it: all get the time that anybody has to come back."""
        context = self.context
        common_s = context.config.disconnect_grace_s
        grace_s = common_s if grace_s is None else grace_s
        audience = context.shelf.put(stream, context.service, grace_s=grace_s)
        audience.wait(context.clock.now_s() + max(0.0, common_s - grace_s))
        if not stream.is_ended:
            task = asyncio.get_running_loop().create_task(self._outlive(stream))
            self._adopted.add(task)
            task.add_done_callback(self._adopted.discard)

    async def _outlive(self, stream: Stream) -> None:
        await stream.ended()
        self.context.service.finished(stream)

    def _free_id(self, exchange: Exchange) -> None:
        """Whoever asks again may do so by the same id."""
        if exchange.has_taken_id and exchange.caller is not None:
            self.context.shelf.free_id(exchange.caller.tenant, exchange.request_id)

    async def _part(self, stream: Stream) -> None:
        """One that was cut off: its workers are asked where its time went before it is entered into the books."""
        parting = self.context.service.parting(stream)
        if parting is not None:
            await parting

    def close_streams(self) -> None:
        """The time to finish is over: what is still open ends with an error, whether somebody reads it or not."""
        failure = failure_of(shutting_down())
        self.context.pulse.fail(failure)
        self.context.shelf.close(failure.code)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        exchange, error = self._open(scope, receive, send)
        await self._answer(exchange, error)

    async def _answer(self, exchange: Exchange, error: HeadraceError | None = None) -> None:
        """A request of any face: checked, answered or refused, and entered into the books. `error`: it is refused."""
        exchange.request_id = exchange.request_id or _request_id(exchange.headers)
        self._num_open += 1
        route: Route | None = None
        try:
            if error is not None:
                raise error
            route = await self._admit(exchange)
            await route.endpoint(exchange, self.context.service)
        except ClientGone:
            exchange.status = exchange.status or CLIENT_GONE
        except HeadraceError as refused:
            await self._refuse(exchange, refused)
        except Preflight as preflight:
            await exchange.send_raw(204, preflight.headers, b"")
        except Exception as failed:  # noqa: BLE001 - the top: one request ends, the others do not notice
            log_failure(exchange, failed)
            await self._refuse(exchange, failed)
        finally:
            over_s = exchange.over_s(self.context.clock.now_s())
            self._free_id(exchange)
            try:
                if exchange.answered is not None:
                    await self._part(exchange.answered)
            finally:
                self._num_open -= 1
                if exchange.is_awaited:
                    self._wakeful.done()
                if not self._num_open:
                    self._courtesy.step_aside(exchange.peer_address)
                self._finish(exchange, route, over_s)
                del error  # its traceback holds this frame

    def _open(self, scope: Any, receive: Receive, send: Send) -> tuple[Exchange, HeadraceError | None]:
        now_s = self.context.clock.now_s()
        error: HeadraceError | None = None
        try:
            headers = plain_headers(scope["headers"])
        except HeadraceError as refused:
            headers, error = {}, refused.with_traceback(None)  # which holds this frame
        # They are read: an answer that takes long need not keep them twice.
        scope["headers"] = ()
        began_s = scope.get("state", _NONE).get("began_s", now_s)
        exchange = Exchange(
            scope, receive, send, self.context, headers, request_id=_request_id(headers), began_s=began_s
        )
        exchange.stages.enter(Stage.AUTHENTICATE, now_s)
        return exchange, error

    async def _admit(self, exchange: Exchange) -> Route:
        """Everything that is checked before an endpoint runs."""
        context, headers, method = self.context, exchange.headers, exchange.method
        if context.inject:
            await context.delay(Stage.AUTHENTICATE)
        resource, exchange.path_params = self.table.find(exchange.raw_path)
        if resource is not None:
            exchange.route = resource.path
        if resource is None or not resource.is_probe:
            self._door.check_host(headers)
            if "origin" in headers:
                self._check_origin(exchange, resource)
        self._authenticate(exchange, resource)
        if resource is None:
            raise NotFound("There is nothing at this path. The API is under /v1; /docs tells of every route.")
        route = resource.routes.get(method)
        if route is None:
            raise MethodNotAllowed(f"This path answers {resource.allow}.", allow=resource.allow)
        if not resource.is_probe:
            if context.is_draining:
                raise shutting_down()
            if self._num_open > context.config.max_open_requests:
                raise too_many_open()
        if resource.access is Access.KEY and exchange.offer is None:
            # What is asked through a socket comes here by itself: one that is merely open waits for nothing.
            exchange.is_awaited = True
            self._wakeful.stir()
        if route.events and route.body is not None:
            await _take_id(exchange)
        return route

    def _check_origin(self, exchange: Exchange, resource: Resource | None) -> None:
        headers, method = exchange.headers, exchange.method
        # Whoever opens a socket may do more with it than read.
        if self._door.check_origin("POST" if exchange.offer is not None else method, headers):
            exchange.cors = _cors_headers(headers["origin"])
            if method == "OPTIONS" and "access-control-request-method" in headers:
                raise Preflight(headers, resource)

    def _authenticate(self, exchange: Exchange, resource: Resource | None) -> None:
        access = Access.KEY if resource is None else resource.access
        if access is Access.PUBLIC:
            return
        if access is Access.METRICS and is_loopback_peer(exchange.peer_address) and not _is_forwarded(exchange.headers):
            return
        caller = self._door.authenticate(exchange.headers)
        if access is Access.METRICS and _METRICS_SCOPE not in caller.scopes:
            raise Forbidden("This key may not read metrics.")
        exchange.caller = caller

    async def _refuse(self, exchange: Exchange, error: BaseException) -> None:
        exchange.error_code = failure_of(error).code
        if exchange.status:
            # The answer has begun: a stream has said its last words itself, anything else can only be cut.
            return
        await exchange.refuse(error, _CLOSE if self.context.is_draining else _NONE)

    def _finish(self, exchange: Exchange, route: Route | None, over_s: float) -> None:
        """The books: stages, counts, one line in the log."""
        context = self.context
        exchange.stages.close(over_s)
        stream, caller = exchange.answered, exchange.caller
        told = context.service.finished(stream, exchange.stages) if stream is not None else None
        ending = stream.ending if stream is not None else None
        sample = Sample(
            route=exchange.route,
            tenant=caller.tenant if caller is not None else "",
            model=stream.model if stream is not None else exchange.model,
            status=exchange.status or CLIENT_GONE,
            wall_s=over_s - exchange.began_s,
            stages=exchange.stages.seconds if stream is not None else {},
            prompt_tokens=ending.usage.prompt_tokens if ending is not None else 0,
            completion_tokens=ending.usage.completion_tokens if ending is not None else 0,
            first_s=None if exchange.first_s is None else exchange.first_s - exchange.began_s,
            last_s=None if exchange.last_s is None else exchange.last_s - exchange.began_s,
            has_stream=stream is not None,
        )
        context.metrics.observe(sample)
        if route is None or not route.is_probe:
            failure = ending.failure if ending is not None else None
            error_code = exchange.error_code or (failure.code if failure is not None else "")
            log_request(exchange, sample, worker=told.replica if told is not None else "", error_code=error_code)


class Preflight(Exception):
    """A browser asks whether a page of an allowed origin may send a request."""

    def __init__(self, headers: Mapping[str, str], resource: Resource | None) -> None:
        super().__init__("preflight")
        wanted = headers.get("access-control-request-headers", "")
        self.headers = [
            *_cors_headers(headers["origin"]),
            (b"access-control-allow-methods", (resource.allow if resource is not None else "GET").encode()),
            (b"access-control-allow-headers", (wanted if _HEADER_NAMES.fullmatch(wanted) else "").encode()),
            (b"access-control-max-age", b"600"),
            (b"content-length", b"0"),
        ]


def _request_id(headers: Mapping[str, str]) -> str:
    wanted = headers.get("x-request-id") or headers.get("x-client-request-id")
    return wanted if wanted and _REQUEST_ID.fullmatch(wanted) else new_id()


async def _take_id(exchange: Exchange) -> None:
    """A request that may become a stream gets an id that no other of its tenant's has, whatever it asked for. One that
    resumes a stream means that stream's."""
    if exchange.caller is None or exchange.last_event_id is not None:
        return
    shelf, tenant, headers = exchange.context.shelf, exchange.caller.tenant, exchange.headers
    # One that was made here is not elsewhere.
    is_wanted = exchange.request_id in (headers.get("x-request-id"), headers.get("x-client-request-id"))
    if is_wanted and await exchange.context.finding.is_elsewhere(tenant, exchange.request_id):
        exchange.request_id = new_id()
    while not shelf.take_id(tenant, exchange.request_id):
        exchange.request_id = new_id()
    exchange.has_taken_id = True


def _cors_headers(origin: str) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"origin"),
    ]


def _is_forwarded(headers: Mapping[str, str]) -> bool:
    """A proxy on this machine speaks for somebody who may be anywhere."""
    return not _FORWARDED.isdisjoint(headers)
