"""The conversation of a chat request. Owns its messages, what must follow what, and how a template is to see them.

Only text is read: parts of other kinds are known by name, so that they are refused with a reason.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from headrace.core.errors import InvalidInput
from headrace.gateway.schemas.bounds import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, Name


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class RefusalPart(Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class ImagePart(Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: Any = None


class AudioPart(Struct, frozen=True, tag_field="type", tag="input_audio"):
    input_audio: Any = None


class VideoPart(Struct, frozen=True, tag_field="type", tag="video_url"):
    video_url: Any = None


class FilePart(Struct, frozen=True, tag_field="type", tag="file"):
    file: Any = None


AnyPart = TextPart | RefusalPart | ImagePart | AudioPart | VideoPart | FilePart
Parts = Annotated[list[AnyPart], Meta(min_length=1, max_length=MAX_PARTS)]
Content = str | Parts


class CalledFunction(Struct, frozen=True):
    name: Name
    arguments: str = ""


class ToolCall(Struct, frozen=True):
    """`type` may be missing: some clients leave it out."""

    id: Name
    function: CalledFunction | None = None
    type: str = "function"


class SystemMessage(Struct, frozen=True, tag_field="role", tag="system"):
    content: Content
    name: Name | None = None


class DeveloperMessage(Struct, frozen=True, tag_field="role", tag="developer"):
    content: Content
    name: Name | None = None


class UserMessage(Struct, frozen=True, tag_field="role", tag="user"):
    content: Content
    name: Name | None = None


class AssistantMessage(Struct, frozen=True, tag_field="role", tag="assistant"):
    """`content` may be missing where there are calls or a refusal."""

    content: str | Parts | None = None
    name: Name | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(Struct, frozen=True, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: Name
    name: Name | None = None


class FunctionMessage(Struct, frozen=True, tag_field="role", tag="function"):
    """The deprecated form of a tool's answer: it names the function, and answers its last call."""

    name: Name
    content: str | None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Rendered = dict[str, Any]
# Of messages that are a text and nothing else.
_ROLES = {SystemMessage: "system", DeveloperMessage: "developer", UserMessage: "user"}


def render_messages(messages: Sequence[Message]) -> list[Rendered]:
    """The messages as a template reads them. InvalidInput for what is no text and for answers to no call."""
    conversation = _Conversation()
    for place, message in enumerate(messages):
        conversation.add(message, f"messages[{place}]")
    return conversation.rendered


class _Conversation:
    """Calls that were made and not yet answered, by id; and of the deprecated kind, by name."""

    def __init__(self) -> None:
        self.rendered: list[Rendered] = []
        self._calls: set[str] = set()
        self._functions: dict[str, str] = {}

    def add(self, message: Message, where: str) -> None:
        match message:
            case AssistantMessage():
                self.rendered.append(self._assistant(message, where))
            case ToolMessage():
                if message.tool_call_id not in self._calls:
                    raise InvalidInput(
                        f"{where}.tool_call_id answers no tool call of an assistant message before it",
                        param=f"{where}.tool_call_id",
                    )
                self.rendered.append(
                    _named("tool", message.name, _content(message.content, where))
                    | {"tool_call_id": message.tool_call_id}
                )
            case FunctionMessage():
                self.rendered.append(self._function(message, where))
            case _:
                self.rendered.append(_named(_ROLES[type(message)], message.name, _content(message.content, where)))

    def _assistant(self, message: AssistantMessage, where: str) -> Rendered:
        calls = [
            self._call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(message.tool_calls or ())
        ]
        if message.function_call is not None:
            name = message.function_call.name
            made_id = f"call_{len(self.rendered)}"
            self._functions[name] = made_id
            calls.append(_rendered_call(made_id, message.function_call))
        content = message.refusal if message.content is None else _content(message.content, where, refusals=True)
        if content is None and not calls:
            raise InvalidInput(f"{where}.content is required where there are no tool_calls", param=f"{where}.content")
        rendered = _named("assistant", message.name, content)
        if calls:
            rendered["tool_calls"] = calls
        reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        if reasoning is not None:
            rendered["reasoning_content"] = reasoning
        return rendered

    def _call(self, call: ToolCall, where: str) -> Rendered:
        if call.type != "function":
            raise InvalidInput(f"{where}.type must be function", param=f"{where}.type")
        if call.function is None:
            raise InvalidInput(f"{where}.function is required", param=f"{where}.function")
        self._calls.add(call.id)
        return _rendered_call(call.id, call.function)

    def _function(self, message: FunctionMessage, where: str) -> Rendered:
        made_id = self._functions.get(message.name)
        if made_id is None:
            raise InvalidInput(
                f"{where}.name answers no function_call of an assistant message before it", param=f"{where}.name"
            )
        return _named("tool", message.name, message.content or "") | {"tool_call_id": made_id}


def _named(role: str, name: str | None, content: object) -> Rendered:
    rendered: Rendered = {"role": role, "content": content}
    if name is not None:
        rendered["name"] = name
    return rendered


def _rendered_call(id: str, function: CalledFunction) -> Rendered:
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": function.arguments}}


def _content(content: str | Iterable[AnyPart], where: str, *, refusals: bool = False) -> object:
    if isinstance(content, str):
        return content
    texts: list[Rendered] = []
    for place, part in enumerate(content):
        if isinstance(part, TextPart):
            texts.append({"type": "text", "text": part.text})
        elif isinstance(part, RefusalPart) and refusals:
            texts.append({"type": "text", "text": part.refusal})
        else:
            kind = str(part.__struct_config__.tag)
            raise InvalidInput(
                f"{where}.content[{place}] is of type {kind}; only text is read here",
                param=f"{where}.content[{place}].type",
            )
    # One text needs no list: every template can read it, and a reply can go on from it.
    return texts[0]["text"] if len(texts) == 1 else texts
