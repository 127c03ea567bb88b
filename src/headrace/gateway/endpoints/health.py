"""Whether the process lives, whether it can serve, and which version it is: for probes and people, without a key."""

from msgspec import Struct

from headrace import __version__
from headrace.gateway.exchange import Exchange
from headrace.gateway.routes import Access, Endpoint, Route
from headrace.serving.service import Service


class Health(Struct, frozen=True):
    """`status` is ok, starting (some model has no ready worker) or draining."""

    status: str


class Version(Struct, frozen=True):
    version: str


async def live(exchange: Exchange, service: Service) -> None:
    await exchange.reply(Health("ok"))


async def ready(exchange: Exchange, service: Service) -> None:
    """503 until every model has a worker that is ready, and from the moment the server is told to stop."""
    if exchange.context.is_draining:
        status = "draining"
    else:
        status = "ok" if all(card.is_ready for card in service.models()) else "starting"
    await exchange.reply(Health(status), status=200 if status == "ok" else 503)


async def version(exchange: Exchange, service: Service) -> None:
    await exchange.reply(Version(__version__))


def _probe(path: str, endpoint: Endpoint, summary: str, reply: type = Health) -> Route:
    return Route("GET", path, Access.PUBLIC, endpoint, summary, reply=reply, is_probe=True)


ROUTES = (
    _probe("/live", live, "The process answers"),
    _probe("/ready", ready, "Every model has a ready worker"),
    _probe("/health", ready, "The same as /ready"),
    _probe("/ping", live, "The same as /live"),
    _probe("/version", version, "The version of this server", Version),
)
