"""Bodies to asks: what a request wants generated, in the service's own words. Pure; owns the mapping.

A limit on output beyond the context is not clamped: the engine refuses it (context_length_exceeded).
"""

from typing import Any

import msgspec

from headrace.core.errors import HeadraceError, InvalidInput
from headrace.core.request import Tier
from headrace.gateway.schemas.bounds import MAX_VARIABLE_DEPTH, check_depth, check_product
from headrace.gateway.schemas.chat import ChatBody
from headrace.gateway.schemas.completion import CompletionBody, prompts_of
from headrace.gateway.schemas.formats import Shape, shape_of
from headrace.gateway.schemas.headers import TARGET_HEADERS, Targets, lowered_tier
from headrace.gateway.schemas.messages import render_messages
from headrace.gateway.schemas.sampling import GenerationFields, check_lengths, check_stream, sampling_fields
from headrace.gateway.schemas.tools import ToolRules, function_rules, tool_rules
from headrace.serving.ask import Ask

# As OpenAI's and vLLM's.
DEFAULT_COMPLETION_TOKENS = 16

_PROMPTS = ("prompt", "raw", "ids", "prompt_ids")
_SHAPES = ("json_schema", "json_object", "regex", "choices", "grammar", "response_format")
# Fields of asks that clients know by another name.
_NAMES = {
    "stop_ids": "stop_token_ids",
    "allowed_ids": "allowed_token_ids",
    "include_stop": "include_stop_str_in_output",
    **TARGET_HEADERS,
}
# Complaints name these as fields; in others the word may be part of a sentence.
_TOLD = ("stop_ids", "allowed_ids", "max_tokens")


def chat_asks(body: ChatBody, tier: Tier, targets: Targets) -> tuple[Ask, ...]:
    """One ask: a conversation. InvalidInput for fields that contradict each other."""
    check_stream(body)
    _check_chat(body)
    limit, param = (
        (body.max_tokens, "max_tokens")
        if body.max_completion_tokens is None
        else (body.max_completion_tokens, "max_completion_tokens")
    )
    if limit == 0:
        raise InvalidInput(f"{param} must be at least 1", param=param)
    check_lengths(body.min_tokens, limit, param)
    logprobs = _chat_logprobs(body)
    check_product(body.n or 1, 1, max(logprobs or 0, body.prompt_logprobs or 0))
    rules, shape = _tools(body), shape_of(body)
    if shape.fields and rules.choice not in ("auto", "none"):
        raise InvalidInput(f"tool_choice and {shape.param} cannot both shape the reply", param="tool_choice")
    return (
        Ask(
            messages=render_messages(body.messages),
            tools=rules.tools,
            tool_choice=rules.choice,
            parallel_tool_calls=rules.is_parallel,
            chat_template_kwargs=_variables(body),
            add_generation_prompt=not body.continue_final_message
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            max_tokens=limit,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            **_shared(body, shape, tier, targets),
        ),
    )


def completion_asks(body: CompletionBody, tier: Tier, targets: Targets) -> tuple[Ask, ...]:
    """An ask for each prompt."""
    check_stream(body)
    _check_completion(body)
    limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    score_only = limit == 0
    if score_only and not body.echo:
        raise InvalidInput("max_tokens must be at least 1, or 0 with echo", param="max_tokens")
    check_lengths(body.min_tokens, limit, "max_tokens")
    prompts = prompts_of(body.prompt)
    prompt_logprobs = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
    check_product(
        body.n or 1,
        len(prompts),
        max(body.logprobs or 0, prompt_logprobs or 0),
        n_param="n" if len(prompts) == 1 else "prompt",
    )
    shared = _shared(body, shape_of(body), tier, targets)
    first = Ask(
        raw="",
        max_tokens=1 if score_only else limit,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=bool(body.echo),
        score_only=score_only,
        **shared,
    )
    return tuple(
        msgspec.structs.replace(first, raw=prompt)
        if isinstance(prompt, str)
        else msgspec.structs.replace(first, raw=None, ids=prompt)
        for prompt in prompts
    )


def blame(error: HeadraceError, body: ChatBody | CompletionBody) -> None:
    """Reword what is wrong with a body's asks for who wrote the body."""
    if error.param is None:
        return
    name = blamed(error.param, body)
    if error.param in _TOLD:
        error.message = error.message.replace(error.param, name)
    error.param = name


def blamed(param: str, body: ChatBody | CompletionBody) -> str:
    """The field of the body, or the header, that a field of its asks came from."""
    if param in _SHAPES:
        return shape_of(body).param or param
    if isinstance(body, ChatBody):
        if param in _PROMPTS:
            return "messages"
        if param == "max_tokens" and body.max_completion_tokens is not None:
            return "max_completion_tokens"
    elif param in _PROMPTS:
        return "prompt"
    return _NAMES.get(param, param)


def _shared(body: GenerationFields, shape: Shape, tier: Tier, targets: Targets) -> dict[str, Any]:
    return {
        **sampling_fields(body),
        **shape.fields,
        **msgspec.structs.asdict(targets),
        "priority": lowered_tier(body.priority, tier),
    }


def _check_chat(body: ChatBody) -> None:
    if body.chat_template is not None:
        raise InvalidInput("chat_template is not accepted: a model is spoken to by its own", param="chat_template")
    if body.modalities is not None and "audio" in body.modalities:
        raise InvalidInput("modalities: only text is written here", param="modalities")
    if (body.tools is not None or body.tool_choice is not None) and (body.functions or body.function_call is not None):
        raise InvalidInput("functions and function_call are the old form of tools: give one of them", param="functions")
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidInput(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )


def _check_completion(body: CompletionBody) -> None:
    if body.suffix:
        raise InvalidInput("suffix is not supported: text is written at the end only", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidInput("best_of other than n is not supported", param="best_of")


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidInput("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None


def _tools(body: ChatBody) -> ToolRules:
    if body.functions is not None or body.function_call is not None:
        return function_rules(body.functions, body.function_call)
    return tool_rules(body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls is not False)


def _variables(body: ChatBody) -> dict[str, Any]:
    variables = body.chat_template_kwargs or {}
    if variables:
        check_depth(variables, MAX_VARIABLE_DEPTH, "chat_template_kwargs")
    if body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort} | variables
    return variables
