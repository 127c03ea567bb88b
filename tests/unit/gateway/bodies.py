"""Bodies as clients send them, and what becomes of them."""

from typing import Any

import msgspec
import pytest

from headrace.core.errors import InvalidInput
from headrace.core.request import Tier
from headrace.gateway.schemas.asks import chat_asks, completion_asks
from headrace.gateway.schemas.chat import ChatBody
from headrace.gateway.schemas.completion import CompletionBody
from headrace.gateway.schemas.decode import decode
from headrace.gateway.schemas.headers import Targets
from headrace.serving.ask import Ask

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat_body(**fields: Any) -> ChatBody:
    return decode(msgspec.json.encode(CHAT | fields), ChatBody)


def completion_body(**fields: Any) -> CompletionBody:
    return decode(msgspec.json.encode(COMPLETION | fields), CompletionBody)


def chat_ask(tier: Tier = Tier.PLUS, targets: Targets | None = None, /, **fields: Any) -> Ask:
    (ask,) = chat_asks(chat_body(**fields), tier, targets or Targets())
    return ask


def completions_of(tier: Tier = Tier.PLUS, targets: Targets | None = None, /, **fields: Any) -> tuple[Ask, ...]:
    return completion_asks(completion_body(**fields), tier, targets or Targets())


def completion_ask(**fields: Any) -> Ask:
    (ask,) = completions_of(**fields)
    return ask


def refused(make: Any, **fields: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        make(**fields)
    assert caught.value.status == 400
    return caught.value
