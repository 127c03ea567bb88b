"""The fields that chat and text completions share: how to sample, when to end, what to tell. Owns their meaning.

Null is a field that was not given. Everything else that is of the wrong type or out of bounds is refused while it is
decoded; what is left to check here is what bounds cannot say.
"""

from functools import partial
from itertools import compress
from operator import attrgetter, is_not
from typing import Any

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.gateway.schemas.bounds import (
    AllowedIds,
    BadWords,
    Biases,
    Choices,
    Count,
    Flag,
    Label,
    Name,
    Penalty,
    Repetition,
    Seed,
    Share,
    Stop,
    StopIds,
    Stops,
    Temperature,
    TopK,
    TopLogprobs,
    Truncation,
    check_float,
)
from headrace.gateway.schemas.formats import ShapeFields

# Fields of an Ask, and what the body calls each.
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "allowed_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "seed": "seed",
    "stop": "stop",
    "stop_ids": "stop_token_ids",
    "include_stop": "include_stop_str_in_output",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",
    "skip_special_tokens": "skip_special_tokens",
    "truncate_prompt_tokens": "truncate_prompt_tokens",
    "return_token_ids": "return_token_ids",
    "n": "n",
}
_values = attrgetter(*_FIELDS.values())
_is_given = partial(is_not, None)


class StreamOptions(Struct, frozen=True):
    include_usage: Flag = None
    continuous_usage_stats: Flag = None
    include_obfuscation: Flag = None


class GenerationFields(ShapeFields, frozen=True, kw_only=True):
    model: Name
    stream: Flag = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: AllowedIds | None = None
    bad_words: BadWords | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: StopIds | None = None
    include_stop_str_in_output: Flag = None
    ignore_eos: Flag = None
    skip_special_tokens: Flag = None
    prompt_logprobs: TopLogprobs | None = None
    truncate_prompt_tokens: Truncation | None = None
    echo: Flag = None
    return_token_ids: Flag = None
    # An integer as vLLM has it, larger is later; or the name of a tier. It can only lower the tenant's own.
    priority: int | Name | None = None
    # Accepted without effect: a tenant's cache is its own whatever it is salted with.
    cache_salt: Label | None = None
    session_id: Label | None = None
    user: Label | None = None


def sampling_fields(body: GenerationFields) -> dict[str, Any]:
    """The fields of an Ask that sampling needs, where they were given."""
    values = _values(body)
    given: dict[str, Any] = dict(compress(zip(_FIELDS, values, strict=True), map(_is_given, values)))
    for name, value in given.items():
        if type(value) is float:
            check_float(value, name)
    given.setdefault("temperature", 1.0)
    if body.logit_bias:
        _check_biases(body.logit_bias)
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    if body.top_k == -1:
        given["top_k"] = 0
    if body.truncate_prompt_tokens == 0:
        raise InvalidInput("truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens")
    return given


def _check_biases(biases: Biases) -> None:
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal()):
            raise InvalidInput("logit_bias maps token ids to numbers", param="logit_bias")
        check_float(bias, "logit_bias")


def check_lengths(min_tokens: int | None, max_tokens: int | None, max_param: str) -> None:
    if max_tokens is not None and (min_tokens or 0) > max_tokens:
        raise InvalidInput(f"min_tokens must be at most {max_param}", param="min_tokens")


def check_stream(body: GenerationFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream and not body.echo:
        raise InvalidInput("prompt_logprobs is not told in a stream", param="prompt_logprobs")
