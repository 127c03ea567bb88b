"""Tools of a request: what the model is told of them, and the grammar that forces a call. Pure.

A model's own template words tools where it can. For one that cannot, they are described here, in plain text before
the conversation, and calls and results of earlier turns are written out as text: the only place where Headrace
words anything for a model.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.serving.ask import NO_ARGUMENTS, TOOL_CHOICES, Ask, shape_of
from headrace.text.grammar import CallForm, Grammar
from headrace.text.rendering import Traits
from headrace.text.tools.syntax import DIALECTS

# Calls in one reply, where a grammar makes them.
MAX_FORCED_CALLS = 16
# Shapes of a reply that are JSON: tags can be told from them.
_ANSWERS = ("json_schema", "json_object")
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
# Keywords whose values are data: a "$ref" there refers to nothing.
_DATA = frozenset(("const", "enum", "default", "examples"))


class ToolPlan(Struct, frozen=True):
    """`syntax` reads calls of the tools called `names` from the reply; empty: the reply is text. `grammar` leaves nothing but
    calls, where they are forced, or calls and an answer of a given schema."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    syntax: str = ""
    names: frozenset[str] = frozenset()
    grammar: Grammar | None = None
    is_forced: bool = False
    is_named: bool = False


def plan_tools(ask: Ask, messages: Sequence[Mapping[str, Any]], syntax: str, traits: Traits) -> ToolPlan:
    """With `tool_choice` none the model is not told of its tools at all."""
    names = frozenset(_names(ask.tools) if ask.tools else ())
    if not traits.tool_calls:
        messages = _written_out(messages, syntax)
    if ask.tool_choice not in TOOL_CHOICES and ask.tool_choice not in names:
        raise InvalidInput(f"tool_choice names no tool: {ask.tool_choice[:64]}", param="tool_choice")
    if ask.tool_choice == "required" and not names:
        raise InvalidInput("tool_choice requires a call, and there are no tools", param="tool_choice")
    if not names or ask.tool_choice == "none":
        return ToolPlan(messages)
    tools: Sequence[Mapping[str, Any]] = ask.tools
    if not traits.tools:
        messages, tools = _described(messages, tools, syntax, traits), ()
    shape = shape_of(ask)
    if ask.tool_choice == "auto":
        if not shape:
            return ToolPlan(messages, tools, syntax, names)
        if shape not in _ANSWERS or not DIALECTS[syntax].close_tag:
            # Without tags, an answer may look like a call without being one, or hold what looks like several.
            return ToolPlan(messages, tools)
        answer = ask.json_schema if shape == "json_schema" else {"type": "object"}
        grammar = _grammar(call_schema(ask.tools), syntax, many=ask.parallel_tool_calls, answer=answer)
        return ToolPlan(messages, tools, syntax, names, grammar)
    if shape:
        raise InvalidInput(f"tool_choice forces a call, and {shape} another reply", param=shape)
    is_named = ask.tool_choice != "required"
    chosen = [tool for tool in ask.tools if not is_named or tool["function"]["name"] == ask.tool_choice]
    grammar = _grammar(call_schema(chosen), syntax, many=ask.parallel_tool_calls and not is_named)
    return ToolPlan(messages, tools, syntax, names, grammar, is_forced=True, is_named=is_named)


def call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of one call of any of these: its name, and arguments under that tool's own schema.

    Each schema is kept whole under `$defs`, its references rewritten to where it now is.
    """
    calls, definitions = [], {}
    for place, tool in enumerate(tools):
        function = tool["function"]
        root = f"#/$defs/tool{place}"
        definitions[f"tool{place}"] = _moved(function.get("parameters") or NO_ARGUMENTS, root)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": root}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def _grammar(schema: dict[str, Any], syntax: str, *, many: bool, answer: Any = None) -> Grammar:
    """Where calls have tags: one call, or up to MAX_FORCED_CALLS. Bare ones: exactly one, since nothing but the next
    call would tell a model that may go on from one that may not. Or an `answer` of that schema, where there is one."""
    dialect = DIALECTS[syntax]
    if not dialect.close_tag:
        return Grammar.calls(CallForm(schema, answer=answer))
    most = MAX_FORCED_CALLS if many else 1
    return Grammar.calls(CallForm(schema, dialect.open_tag, dialect.close_tag, most, answer))


def _names(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    names: set[str] = set()
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise InvalidInput(f"{where} is not a function", param=where)
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in TOOL_CHOICES:
            raise InvalidInput(f"{where}.function.name is no name for a tool", param=f"{where}.function.name")
        if name in names:
            raise InvalidInput(f"{where}.function.name is taken already", param=f"{where}.function.name")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise InvalidInput(f"{where}.function.parameters is no JSON schema", param=f"{where}.function.parameters")
        names.add(name)
    return names


def _moved(schema: Any, root: str, depth: int = 0) -> Any:
    if depth > 64:
        raise InvalidInput("a tool's parameters nest deeper than 64 levels", param="tools")
    if isinstance(schema, list):
        return [_moved(item, root, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        name: value if name in _DATA else _moved(value, root, depth + 1)
        for name, value in schema.items()
        if name not in ("$schema", "$id")
    }
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], syntax: str, traits: Traits
) -> list[Mapping[str, Any]]:
    functions = "\n".join(_encode(tool["function"]) for tool in tools)
    form = _call_text(syntax, '{"name": <name of the function>, "arguments": <object with its arguments>}')
    text = (
        f"You can call these functions, each given by its name, its purpose and the JSON schema of its arguments:\n"
        f"{functions}\n\nTo call one, reply with nothing but this:\n{form}\n"
        f"If none is needed, answer in plain words."
    )
    first, rest = (messages[0], list(messages[1:])) if messages else ({}, [])
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    if traits.system:
        return [{"role": "system", "content": text}, *messages]
    if isinstance(first.get("content"), str):
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": "user", "content": text}, *messages]


def _written_out(messages: Sequence[Mapping[str, Any]], syntax: str) -> list[Mapping[str, Any]]:
    """Calls and results of earlier turns as text, for a template that would leave them out."""
    written: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") in ("tool", "function"):
            written.append({"role": "user", "content": f"<tool_response>\n{_text(message)}\n</tool_response>"})
        elif message.get("role") == "assistant" and message.get("tool_calls"):
            calls = [_call_text(syntax, _call_json(call)) for call in message["tool_calls"]]
            said = [_text(message)] if _text(message) else []
            written.append({"role": "assistant", "content": "\n".join([*said, *calls])})
        else:
            written.append(message)
    return written


def _call_text(syntax: str, call: str) -> str:
    dialect = DIALECTS[syntax]
    return f"{dialect.open_tag}\n{call}\n{dialect.close_tag}" if dialect.close_tag else call


def _call_json(call: object) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidInput("a tool call has no function", param="messages")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = _encode(arguments or {})
    return f'{{"name": {_encode(function.get("name"))}, "arguments": {arguments or "{}"}}}'


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def _encode(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError, RecursionError):
        raise InvalidInput("a tool is not JSON, or nests too deeply", param="tools") from None
