"""Reading a stream again, or stopping it, by the id of the request that opened it. For its tenant alone."""

import re

from headrace.core.errors import InvalidInput
from headrace.gateway.exchange import Exchange
from headrace.gateway.routes import Access, Route
from headrace.serving.service import Service

_NUMBER = re.compile(r"[0-9]{1,15}")
_LAST_EVENT_ID = "Last-Event-ID"


async def read(exchange: Exchange, service: Service) -> None:
    """The frames of a streamed reply behind number `after`, or behind `Last-Event-ID`, or all of them: as the first
    connection got or would have got them, while the reply is being made and for a while after. Numbers are the `id` of
    the events; streams are named by the `x-request-id` of their request. Any number of readers. 204 when all was read,
    404 for a stream that is not yours or never was, 410 for one that is not kept any more."""
    await _resume(exchange, exchange.path_params["stream_id"])


async def cancel(exchange: Exchange, service: Service) -> None:
    """Stop making a streamed reply: whoever reads it gets an error frame. 204, also where it was over already."""
    assert exchange.caller is not None
    await exchange.context.finding.cancel(exchange.caller.tenant, exchange.path_params["stream_id"])
    await exchange.send_raw(204, exchange.common_headers(), b"")


def resumes(exchange: Exchange) -> bool:
    """It is sent again by a client that lost its stream, with the id of the last event that arrived."""
    return exchange.last_event_id is not None


async def resume(exchange: Exchange) -> None:
    """Go on with the stream of the first time, which had the same `x-request-id`. The body is not looked at."""
    await exchange.body()
    await _resume(exchange, exchange.request_id)


async def _resume(exchange: Exchange, stream_id: str) -> None:
    assert exchange.caller is not None
    name, text = "after", exchange.query.get("after")
    if text is None:
        name, text = _LAST_EVENT_ID, exchange.last_event_id or "0"
    if not _NUMBER.fullmatch(text):
        raise InvalidInput(f"{name} must be the number of a frame.", param=name)
    after = int(text)
    audience = await exchange.context.finding.find(exchange.caller.tenant, stream_id, after=after)
    if exchange.method == "HEAD":
        return await exchange.send_raw(200, exchange.common_headers(), b"")
    try:
        await exchange.resume(audience, after)
    except InvalidInput as error:
        error.param = name
        raise


ROUTES = (
    Route(
        "GET",
        "/v1/streams/{stream_id}",
        Access.KEY,
        read,
        "Read a streamed reply again, or on",
        query=("after",),
        events=True,
    ),
    Route("DELETE", "/v1/streams/{stream_id}", Access.KEY, cancel, "Stop a streamed reply"),
)
