"""One request of a client, as every face hands it over: several asks of one model, answered in one stream."""

from collections.abc import Sequence

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.serving.ask import Ask
from headrace.serving.preparation import Prepared
from headrace.streams.record import Dialect

MAX_ORDER_CHOICES = 1024
# Of all choices together, each with its whole prompt. One choice alone may have as long a prompt as its model takes.
MAX_ORDER_TOKENS = 1 << 20


class Order(Struct, frozen=True):
    """Choices are numbered through: those of the first ask, then those of the second, and so on.

    `streamed` is whether the client reads along. `counts`: every record says what was used up to it. `grace_s` is how
    long it goes on without a reader, where the client said so.
    """

    request_id: str
    model: str
    asks: tuple[Ask, ...]
    dialect: Dialect
    streamed: bool = False
    counts: bool = False
    grace_s: float | None = None


def check_order(order: Order) -> None:
    """Before anything is allocated for it."""
    num_choices = sum([ask.n for ask in order.asks])
    if not order.asks:
        raise InvalidInput("at least one prompt is needed", param="prompt")
    if num_choices > MAX_ORDER_CHOICES:
        raise InvalidInput(f"a request has at most {MAX_ORDER_CHOICES} choices over all its prompts", param="n")


def check_prompts(prepared: Sequence[Prepared]) -> None:
    """What an order comes to is choices times prompt tokens: bounded before anything of it is sent."""
    num_choices = sum([each.ask.n for each in prepared])
    if num_choices == 1:
        return
    num_tokens = sum([each.ask.n * len(each.prompt_ids) for each in prepared])
    if num_tokens > MAX_ORDER_TOKENS:
        has_choices = any(each.ask.n > 1 for each in prepared)
        raise InvalidInput(
            f"{num_choices} choices with their prompts have {num_tokens} tokens; a request has at most "
            f"{MAX_ORDER_TOKENS}",
            param="n" if has_choices else "prompt",
        )
