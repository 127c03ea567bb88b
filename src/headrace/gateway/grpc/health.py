"""grpc.health.v1: whether a model is ready and the server takes requests. Owns the state that probes are told.

Asked without a key, so that those who watch are counted.
"""

import asyncio
from collections.abc import Callable

import grpc
from grpc.aio import Server, ServicerContext
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from headrace.gateway.grpc.call import SERVICE

POLL_S = 0.25
MAX_WATCHERS = 64
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health(aio.HealthServicer):  # type: ignore[misc]
    """`is_ready` is asked a few times a second."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        super().__init__()
        self._is_ready = is_ready
        self._num_watchers = 0
        self._told: bool | None = None
        self._closing = asyncio.Event()

    def add_to(self, server: Server) -> None:
        add_HealthServicer_to_server(self, server)

    async def look(self) -> None:
        is_ready = self._is_ready()
        if is_ready is not self._told:
            self._told = is_ready
            for service in ("", SERVICE):
                await self.set(service, _SERVING if is_ready else _NOT_SERVING)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Whoever watches is to watch another: nobody waits here for those who never end."""
        self._closing.set()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: ServicerContext) -> None:  # noqa: N802
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many watch already: ask by Check.")
        self._num_watchers += 1
        tasks = [asyncio.ensure_future(each) for each in (super().Watch(request, context), self._closing.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._num_watchers -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "This server is being replaced.")
