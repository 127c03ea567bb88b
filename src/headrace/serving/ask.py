"""What somebody wants generated, before any model has looked at it. Owns the fields and what they mean together."""

import math
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.core.request import SamplingParams, Tier

MAX_CHOICES = 128
# Of the prompt's tokens.
ALL_THAT_FIT = -1
# Of all stop strings of an ask together: what looks for them grows with their characters.
MAX_ALL_STOP_CHARS = 2048
_SOURCES = ("prompt", "messages", "raw", "ids")
_SHAPES = ("json_schema", "json_object", "regex", "choices", "grammar")
_TIMES = ("ttft_target_s", "itl_target_s", "deadline_s", "queue_timeout_s")
# What `tool_choice` says besides the name of a tool; so no tool can have these names.
TOOL_CHOICES = ("auto", "none", "required")
# Of a tool that names no parameters: without the last word a model may make some up.
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Ask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `prompt` (a user's message), `messages` (a conversation), `raw` (text to continue as it
    stands) and `ids`. At most one of `json_schema`, `json_object`, `regex`, `choices` and `grammar` (Lark) constrains
    the reply. `tool_choice` is auto, none, required, or the name of the tool to call. `priority` may lower the
    caller's tier, never raise it. `deadline_s` runs from the request's first byte. `score_only`: the prompt's log-probabilities are wanted and no reply."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    raw: str | None = None
    ids: list[int] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    # The last message, an assistant's, is a beginning to go on from.
    continue_final_message: bool = False
    # Keep only the last so many tokens of the prompt; -1: as many as the context takes beside `max_tokens`.
    truncate_prompt_tokens: int | None = None
    max_tokens: int | None = None
    n: int = 1
    stop: list[str] | str = []
    seed: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_ids: list[int] = []
    allowed_ids: list[int] = []
    json_schema: dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choices: list[str] | None = None
    grammar: str | None = None
    bad_words: list[str] = []
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    score_only: bool = False
    # The ids of the prompt are told before the reply; those of the reply always are.
    return_token_ids: bool = False
    priority: Tier | None = None
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    deadline_s: float | None = None
    queue_timeout_s: float | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


def check_ask(ask: Ask) -> None:
    """Refuse what contradicts itself; ranges of numbers are checked where they are used."""
    if (ask.prompt, ask.messages, ask.raw, ask.ids).count(None) != len(_SOURCES) - 1:
        given = [name for name in _SOURCES if getattr(ask, name) is not None]
        names = ", ".join(_SOURCES)
        raise InvalidInput(f"exactly one of {names} is needed, not {len(given)}", param=given[1] if given else "prompt")
    if not 1 <= ask.n <= MAX_CHOICES:
        raise InvalidInput(f"n must be a number from 1 to {MAX_CHOICES}", param="n")
    if ask.ids and not (min(ask.ids) >= 0 and max(ask.ids) < 2**31):
        raise InvalidInput("ids holds what is no token id", param="ids")
    if ask.tools and ask.messages is None and ask.prompt is None:
        raise InvalidInput("tools need a conversation: prompt or messages", param="tools")
    if ask.stop and sum(map(len, ask.stops)) > MAX_ALL_STOP_CHARS:
        raise InvalidInput(f"the stop strings have at most {MAX_ALL_STOP_CHARS} characters together", param="stop")
    if ask.bad_words:
        raise InvalidInput("bad_words is not supported: logit_bias and stop are", param="bad_words")
    kept = ask.truncate_prompt_tokens
    if kept is not None and kept < 1 and kept != ALL_THAT_FIT:
        raise InvalidInput("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")
    if (ask.ttft_target_s, ask.itl_target_s, ask.deadline_s, ask.queue_timeout_s).count(None) != len(_TIMES):
        _check_times(ask)
    if ask.continue_final_message:
        _check_continuation(ask)


def check_free(ask: Ask) -> None:
    """Refuse what would not let a grammar have its way: it may need any id, and its end. One token it always has."""
    for name, is_given in (("ignore_eos", ask.ignore_eos), ("min_tokens", ask.min_tokens > 1)):
        if is_given:
            raise InvalidInput(f"{name}: a reply that must have a shape ends when it has it", param=name)
    if ask.allowed_ids:
        raise InvalidInput("allowed_ids: a reply that must have a shape may need any id", param="allowed_ids")


def shape_of(ask: Ask) -> str:
    """The field that shapes the reply, or "". InvalidInput when several do."""
    if not ask.json_object and (ask.json_schema, ask.regex, ask.choices, ask.grammar).count(None) == len(_SHAPES) - 1:
        return ""
    found = [name for name in _SHAPES if getattr(ask, name) is not None]
    if not ask.json_object:
        found.remove("json_object")
    if len(found) > 1:
        raise InvalidInput(f"{found[0]} and {found[1]} cannot both shape the reply", param=found[1])
    return found[0] if found else ""


def _check_times(ask: Ask) -> None:
    for name in _TIMES:
        seconds = getattr(ask, name)
        if seconds is not None and not (math.isfinite(seconds) and 0.0 < seconds <= 1e6):
            raise InvalidInput(f"{name} must be a positive number of seconds", param=name)


def _check_continuation(ask: Ask) -> None:
    last = ask.messages[-1] if ask.messages else {}
    content = last.get("content")
    is_text = isinstance(content, str) and bool(content.strip())
    if last.get("role") != "assistant" or not is_text or last.get("tool_calls"):
        raise InvalidInput(
            "continue_final_message needs an assistant's text as the last message", param="continue_final_message"
        )


def sampling_of(ask: Ask, *, seeds: Callable[[], int], masked: bool) -> SamplingParams:
    """How the engine is to sample. `seeds` is asked where the ask names none."""
    return SamplingParams(
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        min_p=ask.min_p,
        repetition_penalty=ask.repetition_penalty,
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        seed=seeds() if ask.seed is None else ask.seed,
        logprobs=ask.logprobs,
        # A prompt that is repeated is scored like the reply, as whoever asks for both expects.
        prompt_logprobs=ask.logprobs if ask.echo and ask.prompt_logprobs is None else ask.prompt_logprobs,
        min_tokens=ask.min_tokens,
        stop_ids=tuple(ask.stop_ids),
        ignore_eos=ask.ignore_eos,
        logit_bias=_biases(ask.logit_bias) if ask.logit_bias else (),
        allowed_ids=tuple(ask.allowed_ids),
        masked=masked,
    )


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """JSON has no other keys than text."""
    if not all(token.isdecimal() and len(token) < 10 for token in biases):
        raise InvalidInput("logit_bias maps token ids to numbers", param="logit_bias")
    return tuple((int(token), bias) for token, bias in biases.items())
