"""What this gateway measured, in the text form that Prometheus reads."""

from headrace.gateway.exchange import Exchange
from headrace.gateway.routes import Access, Route
from headrace.serving.service import Service
from headrace.telemetry.metrics import CONTENT_TYPE


async def metrics(exchange: Exchange, service: Service) -> None:
    await exchange.reply(exchange.context.metrics.text(), headers={"content-type": CONTENT_TYPE})


ROUTES = (
    Route("GET", "/metrics", Access.METRICS, metrics, "Counts and histograms for Prometheus", media="text/plain"),
)
