"""The body of /v1/completions. Owns its fields and the four forms of a prompt."""

from typing import Annotated, cast

from msgspec import Meta

from headrace.core.errors import InvalidInput
from headrace.gateway.schemas.bounds import MAX_PROMPTS, Choices, TokenId, TopLogprobs
from headrace.gateway.schemas.sampling import GenerationFields

Prompt = str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]


class CompletionBody(GenerationFields, frozen=True, kw_only=True):
    """`max_tokens` is 16 unless it is given; 0 with `echo` scores the prompt and writes nothing. `best_of` must equal
    `n`, and `suffix` be empty. Otherwise as in chat."""

    prompt: Prompt
    logprobs: TopLogprobs | None = None
    best_of: Choices | None = None
    suffix: str | None = None


def prompts_of(prompt: Prompt) -> list[str | list[int]]:
    """Each prompt: a text or ids. InvalidInput for a list of mixed kinds, and for too many."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidInput(f"prompt must hold at most {MAX_PROMPTS} prompts", param="prompt")
    if kinds in ({str}, {list}):
        return cast("list[str | list[int]]", prompt)
    raise InvalidInput(
        "prompt must be a text, texts, token ids, or lists of token ids, and not a mixture", param="prompt"
    )
