"""From an order to its answer, streamed or whole: what the generating endpoints have in common."""

from collections.abc import Sequence
from typing import Protocol, cast

from headrace.core.caller import Caller
from headrace.core.errors import HeadraceError
from headrace.gateway.dialects.envelope import Heading
from headrace.gateway.dialects.parts import encode_in_parts
from headrace.gateway.exchange import Exchange
from headrace.gateway.ids import reply_id
from headrace.gateway.schemas.asks import blame
from headrace.gateway.schemas.chat import ChatBody
from headrace.gateway.schemas.completion import CompletionBody
from headrace.serving.order import Order
from headrace.serving.service import Service
from headrace.streams.record import Dialect, Record, Usage
from headrace.streams.stream import Stream

# Tokens and alternatives that are worded within a millisecond or two; more are in a thread.
LARGE_REPLY = 1000


class WholeDialect(Dialect, Protocol):
    """One that can also say everything at once, as those of the orders here can."""

    def reply(self, records: Sequence[Record]) -> object: ...


def heading_of(prefix: str, exchange: Exchange, model: str, service_tier: str | None = None) -> Heading:
    """Of a request that no worker has yet."""
    request_id = exchange.request_id
    return Heading(
        id=reply_id(prefix, request_id),
        request_id=request_id,
        created=0,
        model=model,
        service_tier=service_tier,
    )


def caller_of(exchange: Exchange) -> Caller:
    assert exchange.caller is not None, "a route that generates asks for a key"
    return exchange.caller


async def answer(exchange: Exchange, service: Service, order: Order, body: ChatBody | CompletionBody) -> None:
    """Open the order and answer with its stream."""
    try:
        stream = await service.open(order, caller_of(exchange), exchange.stages)
    except HeadraceError as error:
        blame(error, body)
        raise
    if order.streamed:
        return await exchange.stream(stream, is_scored=order.asks[0].logprobs is not None)
    records = await exchange.collect(stream)
    dialect = cast(WholeDialect, stream.dialect)
    if _num_told(order, stream) <= LARGE_REPLY:
        await exchange.reply(dialect.reply(records))
    else:
        await exchange.reply(await exchange.context.beside(_worded, dialect, records))


def _num_told(order: Order, stream: Stream) -> int:
    """Tokens in the reply, and the alternatives to them."""
    ask = order.asks[0]
    usage = stream.ending.usage if stream.ending is not None else Usage()
    prompt_logprobs = ask.logprobs if ask.echo and ask.prompt_logprobs is None else ask.prompt_logprobs
    per_prompt_token = int(ask.return_token_ids) if prompt_logprobs is None else prompt_logprobs + 1
    return usage.completion_tokens * ((ask.logprobs or 0) + 1) + usage.prompt_tokens * ask.n * per_prompt_token


def _worded(dialect: WholeDialect, records: Sequence[Record]) -> bytes:
    return encode_in_parts(dialect.reply(records))
