"""The server around the application: uvicorn on sockets that were opened elsewhere. Owns starting, draining, stopping.

Signals are the caller's: it sets `stop`, and `hurry`.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator, Sequence
from time import monotonic
from typing import Protocol

import uvicorn

from headrace.core.config import GatewayConfig
from headrace.gateway.app import Gateway
from headrace.gateway.certificate import Certificate
from headrace.gateway.protocol import FencedProtocol, fenced
from headrace.gateway.websocket.connection import Connection

KEEP_ALIVE_S = 75
# libuv takes one connection per turn of the loop from a socket that listens. So each listens as often: behind a burst of
# somebody else's connections a newcomer would wait for as many turns.
DOORS = 4
UNSENT_PULSE_S = (0.05, 2.0)
# How long a gateway that is replaced still answers what is asked on connections that it has accepted.
LINGER_S = 3.0
# For an error to reach who cannot read on elsewhere.
LAST_WORDS_S = 2.0
_CLOSE_AGAIN_S = 0.25
_LOG = logging.getLogger("headrace.gateway")


class Face(Protocol):
    """Another server over the same gateway."""

    async def start(self) -> None: ...

    async def finish(self) -> None:
        """The gateway drains. Until the last answer is out, and it does not listen any more."""


class _Server(uvicorn.Server):
    async def watch_connections(self, config: GatewayConfig) -> None:
        """Until cancelled. A connection outlives its answer: it may wait to be closed until its client has read, and to
        be asked again."""
        least_s, most_s = UNSENT_PULSE_S
        while True:
            await asyncio.sleep(min(max(min(config.max_unread_s, config.heartbeat_s) / 4, least_s), most_s))
            now_s = monotonic()
            for connection in tuple(self.server_state.connections):
                try:
                    if isinstance(connection, FencedProtocol):
                        connection.check(now_s)
                    elif isinstance(connection, Connection):
                        connection.check()
                except Exception:  # noqa: BLE001 - a loop of the top: one connection must not keep the others open
                    _LOG.exception("a connection could not be looked at")

    def refuse_more(self) -> None:
        """Connections from now on are somebody else's."""
        for server in self.servers:
            server.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    app: Gateway,
    sockets: Sequence[socket.socket],
    config: GatewayConfig,
    stop: asyncio.Event,
    *,
    retire: asyncio.Event | None = None,
    hurry: asyncio.Event | None = None,
    started: asyncio.Event | None = None,
    faces: Sequence[Face] = (),
) -> None:
    """Until `stop` is set and every answer is out, or `drain_s` after that, or until `hurry` is set as well. The sockets
    are closed then.

    `retire` is for a gateway that is replaced while others listen on the same sockets: nothing that it has accepted is
    refused, and what is kept and not over in time is left for them to go on with.
    """
    certificate = None
    if config.tls_cert is not None and config.tls_key is not None:
        certificate = Certificate(config.tls_cert, config.tls_key)
    _bound_unsent(sockets, config.max_unsent_bytes)
    server = _Server(_uvicorn_config(app, config, certificate))
    tasks = [asyncio.create_task(app.context.pulse.run()), asyncio.create_task(server.watch_connections(config))]
    if certificate is not None:
        tasks.append(asyncio.create_task(certificate.watch()))
    running = asyncio.create_task(server.serve(_doors(sockets)))
    stopping = asyncio.create_task(stop.wait())
    retiring = asyncio.create_task((retire or asyncio.Event()).wait())
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        for face in faces:
            await face.start()
        if started is not None and not running.done():
            started.set()
        await asyncio.wait((running, stopping, retiring), return_when=asyncio.FIRST_COMPLETED)
        if retiring.done() and not stopping.done():
            app.retire()
            server.refuse_more()
            await asyncio.wait((running, stopping), timeout=LINGER_S, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done() or running.done():
            app.drain()
        server.should_exit = True
        ending = (running, *(asyncio.ensure_future(face.finish()) for face in faces))
        is_over = await _are_over(ending, config.drain_s, hurry)
        if stop.is_set():  # maybe only now, of one that is replaced: nobody is left to go on with its streams
            app.drain()
        if is_over or app.context.is_draining:
            await _close(app, ending)
        else:
            app.leave_streams()
            await asyncio.wait(ending, timeout=LAST_WORDS_S)
    finally:
        for task in (*tasks, stopping, retiring):
            task.cancel()
        await asyncio.gather(*tasks, stopping, retiring, return_exceptions=True)


async def _close(app: Gateway, ending: Sequence[asyncio.Future[None]]) -> None:
    """Again and again: a request that was still being prepared opens its stream after the others were told."""
    while not all(each.done() for each in ending):
        app.close_streams()
        await asyncio.wait(ending, timeout=_CLOSE_AGAIN_S)
    await asyncio.gather(*ending)


async def _are_over(ending: Sequence[asyncio.Future[None]], within_s: float, hurry: asyncio.Event | None) -> bool:
    """Whether all are, when that long has passed or somebody is in a hurry."""
    over = asyncio.create_task(asyncio.wait(ending))
    hurrying = asyncio.create_task((hurry or asyncio.Event()).wait())
    try:
        await asyncio.wait((over, hurrying), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        over.cancel()
        hurrying.cancel()
    return all(each.done() for each in ending)


def _doors(sockets: Sequence[socket.socket]) -> list[socket.socket]:
    """Each as often as it listens. Whether a socket waits is one setting for all processes that have it, and a copy is made
    to wait as its original does: while this one starts, another gateway that lost a race for a connection would wait for
    the next, and do nothing else."""
    for one in sockets:
        one.setblocking(False)
    return [*sockets, *(one.dup() for one in sockets for _ in range(1, DOORS))]


def _bound_unsent(sockets: Sequence[socket.socket], size_bytes: int) -> None:
    """Of every connection that is accepted from now on, which takes this over from the socket that listens. Left alone,
    the system holds megabytes for a client that reads nothing, and it looks as if that had read them. What is on its
    way to a client that does read is not counted, so that far ones are served as fast as before."""
    for listening in sockets:
        if listening.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)


def _uvicorn_config(app: Gateway, config: GatewayConfig, certificate: Certificate | None) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        http=fenced(app.context),
        ws="none",
        lifespan="off",
        interface="asgi3",
        workers=1,
        log_config=None,
        # Its warnings are about what clients send: ours to answer, and not to be written once per packet.
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=2048,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=config.closing_s,
    )
    if certificate is not None:
        context = certificate.context
        settings.ssl_context_factory = lambda _config, _default: context
    return settings
