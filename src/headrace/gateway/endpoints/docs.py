"""The OpenAPI document, and the static pages: the chat page at /, the readable documentation at /docs."""

from headrace.gateway.exchange import Exchange
from headrace.gateway.pages import PAGES, page_response
from headrace.gateway.routes import Access, Route
from headrace.serving.service import Service


async def openapi(exchange: Exchange, service: Service) -> None:
    await exchange.reply(exchange.context.document)


async def page(exchange: Exchange, service: Service) -> None:
    answer = page_response(exchange.raw_path.decode("ascii"), exchange.headers)
    assert answer is not None, "a route without its page"
    await exchange.send_raw(answer.status, answer.headers, answer.body)


ROUTES = (
    Route("GET", "/openapi.json", Access.PUBLIC, openapi, "This interface, as an OpenAPI document"),
    *(
        Route("GET", path, Access.PUBLIC, page, "A static page", listed=False, media="text/html")
        for path in sorted(PAGES)
    ),
)
