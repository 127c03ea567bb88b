"""grpc.health.v1: whether a model is ready and the server takes requests. Owns the state that probes are told.

Asked without a key, so that those who watch are counted. Who watches is sent away between two messages, never inside
one: no status can follow a message that is still on its way.
"""

import asyncio
from collections.abc import Callable

import grpc
from grpc.aio import Server, ServicerContext
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

from headrace.gateway.grpc.call import SERVICE

POLL_S = 0.25
MAX_WATCHERS = 64
_SERVICES = ("", SERVICE)


class Health(HealthServicer):  # type: ignore[misc]
    """`is_ready` is asked a few times a second."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._num_watchers = 0
        self._told: bool | None = None
        self._is_closing = False
        # Set when there is news, and then replaced.
        self._news = asyncio.Event()

    def add_to(self, server: Server) -> None:
        add_HealthServicer_to_server(self, server)

    def look(self) -> None:
        is_ready = self._is_ready()
        if is_ready is not self._told:
            self._told = is_ready
            self._tell()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Whoever watches is to watch another: nobody waits here for those who never end."""
        self._is_closing = True
        self._tell()

    async def Check(self, request: HealthCheckRequest, context: ServicerContext) -> HealthCheckResponse:  # noqa: N802
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service here.")
        return self._response(request.service)

    async def List(self, _: HealthListRequest, __: ServicerContext) -> HealthListResponse:  # noqa: N802
        return HealthListResponse(statuses={service: self._response(service) for service in _SERVICES})

    async def Watch(self, request: HealthCheckRequest, context: ServicerContext) -> None:  # noqa: N802
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many watch already: ask by Check.")
        self._num_watchers += 1
        told: HealthCheckResponse | None = None
        try:
            while not self._is_closing:
                news, response = self._news, self._response(request.service)
                if response != told:
                    told = response
                    await context.write(response)
                await news.wait()
        finally:
            self._num_watchers -= 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "This server is being replaced.")

    def _response(self, service: str) -> HealthCheckResponse:
        if service not in _SERVICES:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if self._told else HealthCheckResponse.NOT_SERVING
        )

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
