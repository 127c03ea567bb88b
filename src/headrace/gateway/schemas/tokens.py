"""Bodies and replies of /tokenize, /detokenize and /tokenizer_info, shaped as vLLM's. Owns the fields."""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.core.errors import InvalidInput
from headrace.gateway.schemas.bounds import (
    MAX_BODY_COMMAS,
    MAX_VARIABLE_DEPTH,
    Flag,
    Name,
    TokenId,
    Variables,
    check_depth,
)
from headrace.gateway.schemas.messages import Messages, render_messages
from headrace.gateway.schemas.tools import Tools, tool_rules
from headrace.serving.ask import Ask

# More commas are refused in any body, whatever its fields take.
MAX_IDS = MAX_BODY_COMMAS


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """A text (`prompt`) or a conversation (`messages`). `model` may be left out: it is the first one then."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Flag = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: Variables | None = None
    tools: Tools | None = None
    return_token_strs: Flag = None


class TokenizeReply(Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]


class DetokenizeReply(Struct, frozen=True):
    prompt: str


class TokenizerReply(Struct, frozen=True):
    """`hash` names the vocabulary: equal hashes, equal ids. `tool_syntax` is how the model writes tool calls."""

    model: str
    hash: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    special_tokens: dict[str, int]
    has_chat_template: bool
    tool_syntax: str
    tokenizer_class: str = "headrace"


def tokenize_ask(body: TokenizeBody) -> Ask:
    """What would be generated from, had it been asked."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("one of prompt and messages is needed", param="prompt")
    if body.messages is None:
        return Ask(raw=body.prompt)
    variables = body.chat_template_kwargs or {}
    check_depth(variables, MAX_VARIABLE_DEPTH, "chat_template_kwargs")
    is_continued = bool(body.continue_final_message)
    if is_continued and body.add_generation_prompt:
        raise InvalidInput(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    return Ask(
        messages=render_messages(body.messages),
        tools=tool_rules(body.tools, None, is_parallel=True).tools,
        chat_template_kwargs=variables,
        add_generation_prompt=not is_continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=is_continued,
    )
