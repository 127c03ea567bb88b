"""GET /v1/models and /v1/models/{id}: what is served here."""

from headrace.core.messages import WorkerState
from headrace.gateway.exchange import Exchange
from headrace.gateway.routes import Access, Route
from headrace.gateway.schemas.replies import ModelReply, ModelsReply
from headrace.serving.service import ModelCard, Service

# From the nearest to serving to the furthest.
_STATES = (
    WorkerState.READY,
    WorkerState.WARMING,
    WorkerState.VERIFYING,
    WorkerState.LOADING,
    WorkerState.DRAINING,
    WorkerState.FAILED,
    WorkerState.GONE,
)


async def list_models(exchange: Exchange, service: Service) -> None:
    await exchange.reply(ModelsReply([_reply(card) for card in service.models()]))


async def get_model(exchange: Exchange, service: Service) -> None:
    """By name or alias."""
    model = service.model(exchange.path_params["model"])
    exchange.model = model.name
    await exchange.reply(_reply(service.card(model)))


def _reply(card: ModelCard) -> ModelReply:
    state = min(card.states, key=_STATES.index, default=WorkerState.LOADING)
    return ModelReply(
        id=card.name,
        created=int(card.created_s),
        owned_by=card.owned_by,
        max_model_len=card.context_len,
        state=state.value,
        aliases=list(card.aliases),
        root=card.name,
    )


ROUTES = (
    Route("GET", "/v1/models", Access.KEY, list_models, "The models that are served", reply=ModelsReply),
    Route("GET", "/v1/models/{model:path}", Access.KEY, get_model, "One model", reply=ModelReply),
)
