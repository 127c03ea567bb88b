"""What answers each route. A module holds its endpoints and a tuple ROUTES."""

from headrace.gateway.endpoints import (
    chat,
    completions,
    docs,
    explain,
    health,
    metrics,
    models,
    socket,
    streams,
    tokens,
)
from headrace.gateway.routes import Route

ROUTES: tuple[Route, ...] = (
    *chat.ROUTES,
    *completions.ROUTES,
    *streams.ROUTES,
    *socket.ROUTES,
    *models.ROUTES,
    *tokens.ROUTES,
    *health.ROUTES,
    *metrics.ROUTES,
    *explain.ROUTES,
    *docs.ROUTES,
)
