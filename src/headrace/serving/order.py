"""One request of a client, as every face hands it over: several asks of one model, answered in one stream."""

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.serving.ask import Ask
from headrace.streams.record import Dialect

MAX_ORDER_CHOICES = 1024


class Order(Struct, frozen=True):
    """Choices are numbered through: those of the first ask, then those of the second, and so on.

    `streamed` is whether the client reads along. `counts`: every record says what was used up to it.
    """

    request_id: str
    model: str
    asks: tuple[Ask, ...]
    dialect: Dialect
    streamed: bool = False
    counts: bool = False


def check_order(order: Order) -> None:
    """Before anything is allocated for it."""
    num_choices = sum(ask.n for ask in order.asks)
    if not order.asks:
        raise InvalidInput("at least one prompt is needed", param="prompt")
    if num_choices > MAX_ORDER_CHOICES:
        raise InvalidInput(f"a request has at most {MAX_ORDER_CHOICES} choices over all its prompts", param="n")
