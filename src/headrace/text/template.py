"""A model's chat template: conversations in, prompts out as texts and special-token ids.

Owns what a conversation may hold and how it is put before a template. The template itself runs in a limited
process (`renderer`). Of the tokeniser it is told how short texts between special tokens are encoded; a model's first
token (`bos`) is the caller's to add where the template did not write it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidInput, InvalidModel
from headrace.text.form import Forms, Shape, contents_of, shape_of
from headrace.text.limited import LimitedPool
from headrace.text.rendering import ROLES, Formed, PackedJob, TemplateSource, Traits

MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
_OWN_NAMES = frozenset(
    ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "strftime_now", "raise_exception")
).union(("namespace", "range", "dict", "cycler", "joiner", "loop", "self", "true", "false", "none"))


class Conversation(Struct, frozen=True):
    """What a template renders. `variables` are names of the template's own, such as `enable_thinking`.

    `now_s` is the wall-clock time that templates may print; it is the caller's, so that a prompt can be repeated.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = {}
    now_s: float = 0.0


class ChatTemplate:
    """`special_ids` are the texts a tokeniser knows as single special tokens: prompts are split at those that the
    template wrote, and only there. `encode` gives the ids of what stands behind one; with it, prompts of a known form have
    ids where the template wrote the same few words into all of them."""

    def __init__(
        self,
        text: str,
        special_ids: Mapping[str, int],
        pool: LimitedPool,
        *,
        bos_token: str = "",
        eos_token: str = "",
        max_chars: int = 4 << 20,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        if not text.strip():
            raise InvalidModel("the model has no chat template")
        self._source = TemplateSource(text, dict(special_ids), bos_token, eos_token)
        self._packed: msgspec.Raw | None = None
        self._developer = "developer" if "developer" in text else "system"
        self._pool = pool
        self._max_chars = max_chars
        self._encode = encode
        self._traits: Traits | None = None
        self._forms = Forms()

    async def describe(self) -> Traits:
        """What the template can say, found out by trying. InvalidModel: it does not compile, or does not end."""
        if self._traits is None:
            try:
                self._traits = await self._pool.call("describe", self._source, Traits, subject="the chat template")
            except InvalidInput as error:
                raise InvalidModel(error.message) from None
        return self._traits

    def describe_sync(self) -> Traits:
        if self._traits is None:
            try:
                self._traits = self._pool.call_sync("describe", self._source, Traits, subject="the chat template")
            except InvalidInput as error:
                raise InvalidModel(error.message) from None
        return self._traits

    async def render(self, conversation: Conversation) -> list[str | int]:
        """By the template's own process, unless the form of such conversations is known."""
        messages = self._messages(conversation, self._traits or await self.describe())
        contents = None if conversation.tools or conversation.variables else contents_of(messages)
        if contents is not None:
            shape = shape_of(messages, add_generation_prompt=conversation.add_generation_prompt)
            form = self._forms.find(shape)
            if form is not None and form.fits(contents):
                return form.fill(contents)
            if shape not in self._forms:
                return await self._learn(shape, self._job(conversation, messages))
        return await self._render(self._job(conversation, messages))

    async def _learn(self, shape: Shape, job: PackedJob) -> list[str | int]:
        """Whoever comes meanwhile does not ask for it again. A form takes more time than a prompt, which may be too much:
        then there is none."""
        self._forms.file(shape, None)
        try:
            formed = await self._pool.call("form", job, Formed, subject="rendering the messages", param="messages")
        except InvalidInput:
            return await self._render(job)
        except BaseException:
            self._forms.forget(shape)
            raise
        form = formed.form
        self._forms.file(shape, form if form is None or self._encode is None else form.settled(self._encode))
        return formed.pieces

    async def _render(self, job: PackedJob) -> list[str | int]:
        return await self._pool.call(
            "render", job, list[str | int], subject="rendering the messages", param="messages", is_quick=True
        )

    def render_sync(self, conversation: Conversation) -> list[str | int]:
        job = self._job(conversation, self._messages(conversation, self.describe_sync()))
        return self._pool.call_sync("render", job, list[str | int], subject="rendering the messages", param="messages")

    def _messages(self, conversation: Conversation, traits: Traits) -> list[dict[str, Any]]:
        """As the template expects them."""
        _check_bounds(conversation)
        return [
            _prepare(message, f"messages[{place}]", traits.content, self._developer)
            for place, message in enumerate(conversation.messages)
        ]

    def _job(self, conversation: Conversation, messages: list[dict[str, Any]]) -> PackedJob:
        if self._packed is None:
            self._packed = msgspec.Raw(msgspec.msgpack.encode(self._source))
        return PackedJob(
            source=self._packed,
            messages=messages,
            tools=[dict(tool) for tool in conversation.tools] or None,
            add_generation_prompt=conversation.add_generation_prompt,
            variables=dict(conversation.variables),
            now_s=conversation.now_s,
            max_chars=self._max_chars,
        )


def _check_bounds(conversation: Conversation) -> None:
    if not 0 < len(conversation.messages) <= MAX_MESSAGES:
        raise InvalidInput(f"messages must hold from 1 to {MAX_MESSAGES} messages", param="messages")
    if len(conversation.tools) > MAX_TOOLS:
        raise InvalidInput(f"tools holds more than {MAX_TOOLS} tools", param="tools")
    for name in conversation.variables:
        if not name.isidentifier() or name.startswith("_") or name in _OWN_NAMES:
            raise InvalidInput(f"{name[:64]!r} cannot be set for a chat template", param="chat_template_kwargs")


def _prepare(message: Mapping[str, Any], where: str, content: str, developer: str) -> dict[str, Any]:
    """The message as templates expect it: a known role, content in the template's form, arguments as objects."""
    prepared = dict(message)
    role = prepared.get("role")
    if role not in ROLES:
        raise InvalidInput(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if role == "developer":
        prepared["role"] = developer
    prepared["content"] = _content(prepared.get("content"), where, content)
    if "tool_calls" in prepared:
        if prepared["tool_calls"] is None:
            del prepared["tool_calls"]
        else:
            prepared["tool_calls"] = _tool_calls(prepared["tool_calls"], f"{where}.tool_calls")
    return prepared


def _content(value: object, where: str, form: str) -> object:
    if value is None:
        return None
    if isinstance(value, str):
        return [{"type": "text", "text": value}] if form == "parts" else value
    texts = []
    for place, part in enumerate(value if isinstance(value, Sequence) else [None]):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidInput(
                f"{where}.content[{place}] is not a text part, and this model reads nothing else",
                param=f"{where}.content",
            )
        texts.append(text)
    return [{"type": "text", "text": text} for text in texts] if form == "parts" else "\n".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Clients send arguments as JSON text; templates were written for objects and would quote the text again."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidInput(f"{where} must be a list", param=where)
    prepared = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidInput(f"{where}[{place}].function.name is missing", param=f"{where}[{place}]")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parse_arguments(arguments)
        prepared.append({**call, "function": {**function, "arguments": arguments}})
    return prepared


def _parse_arguments(text: str) -> object:
    if not text.strip():
        return {}
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text
