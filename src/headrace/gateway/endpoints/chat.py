"""POST /v1/chat/completions."""

from headrace.gateway.dialects.chat import ChatDialect
from headrace.gateway.dialects.envelope import Wants
from headrace.gateway.endpoints.generation import answer, caller_of, heading_of
from headrace.gateway.endpoints.streams import resume, resumes
from headrace.gateway.exchange import Exchange
from headrace.gateway.ids import CHAT_REPLY
from headrace.gateway.routes import Access, Route
from headrace.gateway.schemas.asks import chat_asks
from headrace.gateway.schemas.chat import ChatBody
from headrace.gateway.schemas.headers import read_targets, wants_metadata
from headrace.gateway.schemas.replies import ChatReply
from headrace.serving.ask import Ask
from headrace.serving.order import Order
from headrace.serving.service import Service


async def chat(exchange: Exchange, service: Service) -> None:
    """Say the next message of a conversation. With `stream` the reply comes as server-sent events, each with an `id`;
    the last is `[DONE]`. `x-headrace-ttft-target-ms`, `x-headrace-itl-target-ms`, `x-headrace-deadline-ms` and
    `x-headrace-queue-timeout-ms` say what time matters; `x-headrace-metadata: 1` tells more in each chunk."""
    if resumes(exchange):
        return await resume(exchange)
    body = await exchange.parse(ChatBody)
    model = service.model(body.model)
    exchange.model = model.name
    asks = chat_asks(body, caller_of(exchange).tier, read_targets(exchange.headers))
    wants = chat_wants(body, asks[0], metadata=wants_metadata(exchange.headers))
    tier = None if body.service_tier is None else "default"
    order = Order(
        request_id=exchange.request_id,
        model=model.name,
        asks=asks,
        dialect=ChatDialect(heading_of(CHAT_REPLY, exchange, model.name, tier), wants, asks[0].n),
        streamed=bool(body.stream),
        counts=wants.running_usage,
        grace_s=exchange.chosen_grace_s,
    )
    await answer(exchange, service, order, body)


def chat_wants(body: ChatBody, ask: Ask, *, metadata: bool) -> Wants:
    options = body.stream_options
    return Wants(
        usage=options is not None and bool(options.include_usage),
        running_usage=options is not None and bool(options.continuous_usage_stats),
        metadata=metadata,
        logprobs=bool(body.logprobs),
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        legacy_calls=body.functions is not None or body.function_call is not None,
        opening=_opening(ask) if body.echo else "",
    )


def _opening(ask: Ask) -> str:
    """As vLLM's `echo`: an assistant's message that the reply continues stands before it."""
    last = ask.messages[-1] if ask.messages else {}
    content = last.get("content")
    return content if last.get("role") == "assistant" and isinstance(content, str) else ""


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        Access.KEY,
        chat,
        "Continue a conversation",
        body=ChatBody,
        reply=ChatReply,
        events=True,
    ),
)
