"""POST /v1/completions."""

from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.dialects.envelope import Wants
from headrace.gateway.endpoints.generation import answer, caller_of, heading_of
from headrace.gateway.endpoints.streams import resume, resumes
from headrace.gateway.exchange import Exchange
from headrace.gateway.ids import TEXT_REPLY
from headrace.gateway.routes import Access, Route
from headrace.gateway.schemas.asks import completion_asks
from headrace.gateway.schemas.completion import CompletionBody
from headrace.gateway.schemas.headers import read_targets, wants_metadata
from headrace.gateway.schemas.replies import CompletionReply
from headrace.serving.order import Order
from headrace.serving.service import Service


async def completions(exchange: Exchange, service: Service) -> None:
    """Continue a text, or several: `prompt` is a text, texts, token ids or lists of them. With `echo` the prompt stands
    before the reply, with `logprobs` scored; `max_tokens` may then be 0. Headers are those of chat completions."""
    if resumes(exchange):
        return await resume(exchange)
    body = await exchange.parse(CompletionBody)
    model = service.model(body.model)
    exchange.model = model.name
    asks = completion_asks(body, caller_of(exchange).tier, read_targets(exchange.headers))
    wants = completion_wants(body, metadata=wants_metadata(exchange.headers))
    order = Order(
        request_id=exchange.request_id,
        model=model.name,
        asks=asks,
        dialect=CompletionDialect(heading_of(TEXT_REPLY, exchange, model.name), wants, sum(ask.n for ask in asks)),
        streamed=bool(body.stream),
        counts=wants.running_usage,
        grace_s=exchange.chosen_grace_s,
    )
    await answer(exchange, service, order, body)


def completion_wants(body: CompletionBody, *, metadata: bool) -> Wants:
    options = body.stream_options
    return Wants(
        usage=options is not None and bool(options.include_usage),
        running_usage=options is not None and bool(options.continuous_usage_stats),
        metadata=metadata,
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        echo=bool(body.echo),
    )


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        Access.KEY,
        completions,
        "Continue a text",
        body=CompletionBody,
        reply=CompletionReply,
        events=True,
    ),
)
