"""The body of /v1/chat/completions. Owns its fields; those without effect here are there for their types."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from headrace.gateway.schemas.bounds import Count, Flag, Label, Metadata, Name, TopLogprobs, Variables
from headrace.gateway.schemas.messages import Messages
from headrace.gateway.schemas.sampling import GenerationFields
from headrace.gateway.schemas.tools import FunctionChoice, Functions, ToolChoice, Tools


class ChatBody(GenerationFields, frozen=True, kw_only=True):
    """Null is a field that was not given; fields that are not listed are ignored. What is out of its bounds is refused
    and not clamped: `max_completion_tokens` (before it, `max_tokens`) beyond what the context has left is
    `context_length_exceeded`. `functions` and `function_call` are the old form of `tools`. Content is text only."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: Flag = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag = None
    functions: Functions | None = None
    function_call: FunctionChoice | None = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: Variables | None = None
    # Not accepted: a template is the model's.
    chat_template: Any = None
    reasoning_effort: Name | None = None
    modalities: Annotated[list[Literal["text", "audio"]], Meta(max_length=2)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    # From here on nothing has an effect.
    store: Flag = None
    metadata: Metadata | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
