"""What unix and TLS networks share: a dial that waits for a greeting, and a listener that knows its links."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.core.errors import Unreachable
from headrace.transport.link import CLOSED_HERE, PeerName, SocketLink
from headrace.transport.reception import Reception, log
from headrace.transport.wire import Limits

Connect = Callable[[Callable[[], SocketLink]], Awaitable[Any]]


async def dial(address: str, connect: Connect, reception: Reception, limits: Limits, peer: PeerName) -> SocketLink:
    """A link whose other end has answered with its preamble. Messages may reach the receiver before this returns."""
    link = SocketLink(reception, limits, peer)
    try:
        async with asyncio.timeout(limits.greeting_s):
            await connect(lambda: link)
            why = await link.greeted
    except TimeoutError:
        link.abandon("the dial took too long")
        raise Unreachable(f"{address} does not answer within {limits.greeting_s:g} s") from None
    except OSError as error:
        link.abandon("the dial failed")
        raise Unreachable(f"nobody answers at {address}: {error.strerror or error}") from error
    except BaseException:
        link.abandon("the dial was given up")
        raise
    if why:
        raise Unreachable(f"{address} does not answer as it should: {why}")
    return link


class SocketListener:
    """Takes connections up to its bound, and closes them all when it is closed."""

    def __init__(self, reception: Reception, limits: Limits, peer: PeerName, address: str) -> None:
        self._reception = reception
        self._limits = limits
        self._peer = peer
        self._address = address
        self._links: set[SocketLink] = set()
        self._server: asyncio.AbstractServer | None = None
        self._is_closed = False

    @property
    def address(self) -> str:
        return self._address

    def serve(self, server: asyncio.AbstractServer, address: str) -> None:
        self._server = server
        self._address = address

    def accept(self) -> SocketLink:
        return SocketLink(self._reception, self._limits, self._peer, self._admit)

    def _admit(self, link: SocketLink) -> str:
        # Not at `accept`: a connection whose TLS handshake fails is never made, nor lost.
        if self._is_closed:
            return CLOSED_HERE
        if len(self._links) >= self._limits.max_links:
            return f"{self._address} has {len(self._links)} links already"
        self._links.add(link)
        link.gone.add_done_callback(lambda _: self._links.discard(link))
        return ""

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        links = list(self._links)
        for link in links:
            link.close()
        if links:
            await asyncio.wait([link.gone for link in links])
        if self._server is not None:
            await self._server.wait_closed()
        log.debug("%s is closed", self._address)
