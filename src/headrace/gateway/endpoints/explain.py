"""Where each millisecond of a past request went, for its tenant alone."""

from contextlib import suppress

from msgspec import Struct

from headrace.core.caller import Caller
from headrace.core.errors import NotFound
from headrace.gateway.exchange import Exchange
from headrace.gateway.ids import requests_of
from headrace.gateway.routes import Access, Route
from headrace.serving.explanation import Explanation
from headrace.serving.service import Service


class ExplainUsage(Struct, frozen=True):
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Explained(Struct, frozen=True):
    """`stages` are seconds by stage, in the order they were entered; they sum to `total_s`, but for what rounding
    to microseconds takes."""

    request_id: str
    model: str
    replica: str
    stages: dict[str, float]
    total_s: float
    usage: ExplainUsage
    finish_reasons: tuple[str, ...] = ()
    ttft_s: float | None = None
    itl_s: float | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    overrun_tokens: int = 0
    attempts: int = 1
    replayed_tokens: int = 0
    error: str | None = None
    object: str = "request.explanation"


async def explain(exchange: Exchange, service: Service) -> None:
    """By the `x-request-id` of the answer, or by the `id` of the reply."""
    assert exchange.caller is not None
    found = _find(exchange.path_params["request_id"], exchange.caller, service)
    usage = found.usage
    await exchange.reply(
        Explained(
            request_id=found.request_id,
            model=found.model,
            replica=found.replica,
            stages={stage: _told_s(seconds) for stage, seconds in found.stages.items()},
            total_s=_told_s(found.wall_s),
            usage=ExplainUsage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
            finish_reasons=found.finish,
            ttft_s=None if found.ttft_s is None else _told_s(found.ttft_s),
            itl_s=None if found.itl_s is None else _told_s(found.itl_s),
            preemptions=found.preemptions,
            recomputed_tokens=found.recomputed_tokens,
            overrun_tokens=found.overrun_tokens,
            attempts=found.attempts,
            replayed_tokens=found.replayed_tokens,
            error=found.error,
        )
    )


def _told_s(seconds: float) -> float:
    return round(seconds, 6)


def _find(id: str, caller: Caller, service: Service) -> Explanation:
    *others, last = requests_of(id)
    for request_id in others:
        with suppress(NotFound):
            return service.explain(request_id, caller)
    return service.explain(last, caller)


ROUTES = (
    Route(
        "GET",
        "/v1/requests/{request_id}/explain",
        Access.KEY,
        explain,
        "Where the time of a past request went",
        reply=Explained,
    ),
)
