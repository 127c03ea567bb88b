"""What is asked of a renderer in its limited process, and what it tells. Owns the records; needs no Jinja."""

from typing import Any

from msgspec import Raw, Struct

from headrace.text.form import Form

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class TemplateSource(Struct, frozen=True):
    """A template and the special tokens it may write."""

    text: str
    special_ids: dict[str, int] = {}
    bos_token: str = ""
    eos_token: str = ""


class RenderJob(Struct, frozen=True):
    source: TemplateSource
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: dict[str, Any] = {}
    now_s: float = 0.0
    max_chars: int = 4 << 20


class PackedJob(RenderJob, frozen=True, kw_only=True):
    """The same, its template in the form it is sent in: thousands of jobs have the same, and none looks into it."""

    source: Raw  # type: ignore[assignment]


class Formed(Struct, frozen=True, array_like=True):
    """A prompt, and the form of all prompts of its shape, if they have one."""

    pieces: list[str | int]
    form: Form | None = None


class Traits(Struct, frozen=True):
    """What a template can say. `content`: "string", or "parts" where it reads nothing but lists of parts."""

    system: bool
    tools: bool
    tool_calls: bool
    bos: bool
    content: str
