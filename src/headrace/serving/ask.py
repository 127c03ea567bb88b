"""What somebody wants generated, before any model has looked at it. Owns the fields and what they mean together."""

from typing import Any

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.core.request import SamplingParams

MAX_CHOICES = 128
_SOURCES = ("prompt", "messages", "raw", "ids")


class Ask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `prompt` (a user's message), `messages` (a conversation), `raw` (text to continue as it
    stands) and `ids`. At most one of `json_schema`, `json_object`, `regex` and `choices` constrains the reply."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    raw: str | None = None
    ids: list[int] | None = None
    tools: list[dict[str, Any]] = []
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

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


def check_ask(ask: Ask) -> None:
    """Refuse what contradicts itself; ranges of numbers are checked where they are used."""
    given = [name for name in _SOURCES if getattr(ask, name) is not None]
    if len(given) != 1:
        names = ", ".join(_SOURCES)
        raise InvalidInput(f"exactly one of {names} is needed, not {len(given)}", param=given[1] if given else "prompt")
    if not 1 <= ask.n <= MAX_CHOICES:
        raise InvalidInput(f"n must be a number from 1 to {MAX_CHOICES}", param="n")
    if ask.ignore_eos and (ask.json_schema is not None or ask.json_object or ask.regex is not None or ask.choices):
        raise InvalidInput("ignore_eos: a reply that must have a shape ends when it has it", param="ignore_eos")
    if ask.ids is not None and any(not 0 <= token < 2**31 for token in ask.ids):
        raise InvalidInput("ids holds what is no token id", param="ids")
    if ask.tools and ask.messages is None and ask.prompt is None:
        raise InvalidInput("tools need a conversation: prompt or messages", param="tools")


def sampling_of(ask: Ask, *, seed: int, masked: bool) -> SamplingParams:
    """How the engine is to sample. `seed` stands in where the ask names none."""
    return SamplingParams(
        temperature=ask.temperature,
        top_k=ask.top_k,
        top_p=ask.top_p,
        min_p=ask.min_p,
        repetition_penalty=ask.repetition_penalty,
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        seed=seed if ask.seed is None else ask.seed,
        logprobs=ask.logprobs,
        prompt_logprobs=ask.prompt_logprobs,
        min_tokens=ask.min_tokens,
        stop_ids=tuple(ask.stop_ids),
        ignore_eos=ask.ignore_eos,
        logit_bias=_biases(ask.logit_bias),
        allowed_ids=tuple(ask.allowed_ids),
        masked=masked,
    )


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """JSON has no other keys than text."""
    if not all(token.isdecimal() and len(token) < 10 for token in biases):
        raise InvalidInput("logit_bias maps token ids to numbers", param="logit_bias")
    return tuple((int(token), bias) for token, bias in biases.items())
