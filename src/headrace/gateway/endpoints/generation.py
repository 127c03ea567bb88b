"""From an order to its answer, streamed or whole: what the generating endpoints have in common."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.core.caller import Caller
from headrace.core.errors import HeadraceError
from headrace.gateway.dialects.envelope import Heading
from headrace.gateway.exchange import Exchange
from headrace.gateway.schemas.asks import blamed
from headrace.gateway.schemas.chat import ChatBody
from headrace.gateway.schemas.completion import CompletionBody
from headrace.serving.order import Order
from headrace.serving.service import Service
from headrace.streams.record import Record


class WholeDialect(Protocol):
    """A dialect that can also say everything at once. `rebound` is the same one under another heading."""

    @property
    def heading(self) -> Heading: ...

    def frame(self, record: Record) -> bytes: ...

    def reply(self, records: Sequence[Record]) -> object: ...

    def rebound(self, heading: Heading) -> "WholeDialect": ...


def heading_of(prefix: str, exchange: Exchange, model: str, service_tier: str | None = None) -> Heading:
    """Of a request that no worker has yet."""
    request_id = exchange.request_id
    return Heading(
        id=prefix + request_id.removeprefix("req_"),
        request_id=request_id,
        created=0,
        model=model,
        service_tier=service_tier,
    )


def caller_of(exchange: Exchange) -> Caller:
    assert exchange.caller is not None, "a route that generates asks for a key"
    return exchange.caller


async def answer(
    exchange: Exchange, service: Service, order: Order, dialect: WholeDialect, body: ChatBody | CompletionBody
) -> None:
    """Open the order and answer with its stream. Who computes it is known once it is open, and nothing of it was read."""
    try:
        stream = await service.open(order, caller_of(exchange), exchange.stages)
    except HeadraceError as error:
        error.param = None if error.param is None else blamed(error.param, body)
        raise
    dialect = dialect.rebound(
        msgspec.structs.replace(dialect.heading, created=int(stream.created_s), fingerprint=stream.fingerprint)
    )
    stream.dialect = dialect
    if order.streamed:
        await exchange.stream(stream)
    else:
        await exchange.reply(dialect.reply(await exchange.collect(stream)))
