"""GET /v1/stream: the request that becomes a socket."""

from headrace.gateway.errors import UpgradeRequired
from headrace.gateway.exchange import Exchange
from headrace.gateway.peer import ClientGone
from headrace.gateway.routes import Access, Route
from headrace.gateway.websocket.connection import Connection
from headrace.gateway.websocket.handshake import PATH, accept
from headrace.gateway.websocket.session import Session
from headrace.serving.service import Service


async def socket(exchange: Exchange, service: Service) -> None:
    """A WebSocket over which several replies are streamed at once. Messages are JSON texts. You say `start`, `ack`,
    `window`, `cancel` and `resume`, and hear `started`, `frame`, `end` and `error`. Pages in a browser give their key as
    the subprotocol `headrace.key.KEY` beside `headrace.v1`. 426 for a request that does not offer to upgrade."""
    offer = exchange.offer
    if offer is None:
        raise UpgradeRequired("This path is a WebSocket.")
    head = accept(exchange.headers)
    session = Session(exchange)
    session.connection = Connection(exchange.context, session, offer.connections)
    if not offer.become(head, session.connection):
        raise ClientGone
    exchange.status = 101
    await session.run()


ROUTES = (Route("GET", PATH, Access.KEY, socket, "Stream over a WebSocket"),)
