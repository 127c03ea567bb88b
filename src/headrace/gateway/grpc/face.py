"""The gRPC server beside the HTTP one, over the same gateway. Owns its port, its limits, and how it starts and ends.

It listens by itself: grpc takes no socket that was opened elsewhere. The port is shared (SO_REUSEPORT), so that
a gateway that follows another need not wait for it.
"""

import asyncio
from contextlib import suppress

import grpc

from headrace.core.config import GatewayConfig
from headrace.core.errors import HeadraceError
from headrace.gateway.app import Gateway
from headrace.gateway.grpc.credentials import Credentials
from headrace.gateway.grpc.health import MAX_WATCHERS, Health
from headrace.gateway.grpc.servicer import Servicer

MAX_METADATA_BYTES = 16 << 10
# Of one connection.
MAX_STREAMS = 128
# Beside the body in a message: headers, and what says where each begins.
ENVELOPE_BYTES = 16 << 10
# A client that pings more often than this, with nothing to say, is sent away after a few of them.
LEAST_PING_MS = 10_000
MAX_PING_STRIKES = 3
KEEPALIVE_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
# As over HTTP: a connection without a call is a descriptor that nobody needs.
IDLE_MS = 75_000
# For what was said last to leave.
CLOSING_S = 0.5


class GrpcFace:
    """`gateway.server.serve` starts and finishes it."""

    def __init__(self, app: Gateway, config: GatewayConfig) -> None:
        self._config = config
        self._servicer = Servicer(app)
        self._health = Health(lambda: _is_ready(app))
        self._server: grpc.aio.Server | None = None
        self._looking: asyncio.Task[None] | None = None
        # Where it listens, once it does.
        self.port = 0

    async def start(self) -> None:
        config = self._config
        server = grpc.aio.server(
            options=_options(config), maximum_concurrent_rpcs=config.max_open_requests + MAX_WATCHERS
        )
        server.add_generic_rpc_handlers((self._servicer.handlers,))
        self._health.add_to(server)
        where = f"[{config.host}]:{config.grpc_port}" if ":" in config.host else f"{config.host}:{config.grpc_port}"
        try:
            if config.tls_cert is not None and config.tls_key is not None:
                self.port = server.add_secure_port(where, Credentials(config.tls_cert, config.tls_key).server)
            else:
                self.port = server.add_insecure_port(where)
        except RuntimeError:
            raise HeadraceError(f"cannot listen on {where} for gRPC; --grpc-port takes another") from None
        self._health.look()
        await server.start()
        self._server = server
        self._looking = asyncio.create_task(self._health.run())

    async def finish(self) -> None:
        """The gateway drains: calls are refused by it. Until the last answer is out. One that is replaced sends its
        clients away first: they call the next one."""
        if self._server is None:
            return
        if not self._servicer.is_draining:
            self._health.close()
            await self._server.stop(self._config.drain_s)
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking
        self._health.look()
        await self._servicer.idle()
        await self._server.stop(CLOSING_S)


def _is_ready(app: Gateway) -> bool:
    context = app.context
    return not context.is_draining and any(card.is_ready for card in context.service.models())


def _options(config: GatewayConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", config.max_body_bytes + ENVELOPE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_MS),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.server_handshake_timeout_ms", max(1, round(config.receive_s * 1e3))),
    ]
