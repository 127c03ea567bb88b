"""Runs chat templates, inside a limited process. Owns the Jinja environment and the templates it compiled.

Knows no tokeniser: a rendered prompt is texts and ids of special tokens. Nothing here protects against a template
that loops or grows beyond its output bound; the process it runs in does.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.core.errors import ContextLengthExceeded, InvalidInput, InvalidModel
from headrace.text.marks import Marks, mark_template
from headrace.text.rendering import PackedJob, RenderJob, TemplateSource, Traits

MAX_TEMPLATES = 32
_MAX_MESSAGE = 500


class Raised(Exception):
    """A template called `raise_exception`: what it says is meant for the caller."""


class GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CompiledTemplate:
    """One template, its literals marked."""

    def __init__(self, source: TemplateSource) -> None:
        self.marks = Marks(source.special_ids)
        environment = self.environment()
        try:
            tree = environment.parse(source.text)
            mark_template(tree, self.marks)
            self.rewrite(tree)
            code = environment.compile(tree)
        except (jinja2.TemplateSyntaxError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise InvalidModel(f"the chat template does not compile: {_brief(error)}") from None
        self._template = environment.template_class.from_code(environment, code, environment.globals)
        self._tokens = {"bos_token": self.marks.mark(source.bos_token), "eos_token": self.marks.mark(source.eos_token)}

    def environment(self) -> ImmutableSandboxedEnvironment:
        return as_transformers(ImmutableSandboxedEnvironment)

    def rewrite(self, tree: nodes.Template) -> None:
        """Once its literals are marked."""

    def render(self, job: RenderJob) -> list[str | int]:
        try:
            return self._render(job, job.messages)
        except TypeError:
            # Templates that only know strings fail on the null content that a message with tool calls may have.
            if all(message.get("content", "") is not None for message in job.messages):
                raise
        messages = [{**message, "content": message.get("content") or ""} for message in job.messages]
        return self._render(job, messages)

    def _render(self, job: RenderJob, messages: Sequence[Mapping[str, Any]]) -> list[str | int]:
        parts: list[str] = []
        room = job.max_chars
        for part in self.written(job, messages):
            room -= len(part)
            if room < 0:
                raise ContextLengthExceeded(f"the chat template writes more than {job.max_chars} characters")
            parts.append(part)
        return self.marks.split("".join(parts))

    def written(self, job: RenderJob, messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """What it writes, with marks, piece by piece."""

        def strftime_now(pattern: str) -> str:
            return self.date(job.now_s, pattern)

        context = {
            **job.variables,
            **self._tokens,
            "messages": messages,
            "tools": job.tools,
            "add_generation_prompt": job.add_generation_prompt,
            "strftime_now": strftime_now,
        }
        return self._template.generate(context)

    def date(self, now_s: float, pattern: str) -> str:
        return datetime.fromtimestamp(now_s, UTC).strftime(pattern)


class Renderer:
    """Answers the jobs `render` and `describe`."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[bytes, CompiledTemplate] = OrderedDict()
        self._jobs = msgspec.msgpack.Decoder(PackedJob)
        self._sources = msgspec.msgpack.Decoder(TemplateSource)

    def render(self, payload: msgspec.Raw) -> list[str | int]:
        job = self._jobs.decode(payload)
        return self.rendered(self.template(bytes(job.source)), job)

    def rendered(self, template: CompiledTemplate, job: RenderJob) -> list[str | int]:
        """InvalidInput for whatever goes wrong."""
        try:
            return template.render(job)
        except Raised as error:
            raise InvalidInput(template.marks.restore(_brief(error))) from None
        except (InvalidInput, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - templates are other people's programs
            reason = f"{type(error).__name__}: {template.marks.restore(_brief(error))}"
            raise InvalidInput(f"the chat template cannot render these messages: {reason}") from None

    def describe(self, payload: msgspec.Raw) -> Traits:
        packed = bytes(payload)
        template = self.template(packed)
        source = self._sources.decode(packed)
        bos_id = source.special_ids.get(source.bos_token)
        plain = _try(template, source, [_user("probe-user")])
        parts = _try(template, source, [_user([{"type": "text", "text": "probe-user"}])])
        reads_parts = "probe-user" in parts and "'type'" not in parts and '"type"' not in parts
        content = "parts" if reads_parts and "probe-user" not in plain else "string"
        wrap = _as_parts if content == "parts" else str
        system = _try(template, source, [{"role": "system", "content": wrap("probe-system")}, _user(wrap("probe"))])
        tools = _try(template, source, [_user(wrap("probe"))], [_TOOL])
        called = _try(template, source, [_user(wrap("probe")), *_CALL, {**_RESULT, "content": wrap("probe-result")}])
        first = _first(template, source, [_user(wrap("probe"))])
        return Traits(
            system="probe-system" in system,
            tools="probe_tool" in tools,
            tool_calls="probe_tool" in called and "probe-result" in called,
            bos=bos_id is not None and first == bos_id,
            content=content,
        )

    def template(self, packed: bytes) -> CompiledTemplate:
        found = self._compiled.pop(packed, None) or CompiledTemplate(self._sources.decode(packed))
        self._compiled[packed] = found
        if len(self._compiled) > MAX_TEMPLATES:
            self._compiled.popitem(last=False)
        return found


_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}
_CALL = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "probecall", "type": "function", "function": {"name": "probe_tool", "arguments": {"x": "1"}}}
        ],
    }
]
_RESULT = {"role": "tool", "tool_call_id": "probecall", "name": "probe_tool"}


def _user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _first(template: CompiledTemplate, source: TemplateSource, messages: list[dict[str, Any]]) -> str | int | None:
    pieces = _probe(template, source, messages, None)
    return pieces[0] if pieces else None


def _try(
    template: CompiledTemplate,
    source: TemplateSource,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The texts of a probe, empty where the template refuses it."""
    return " ".join(piece for piece in _probe(template, source, messages, tools) if isinstance(piece, str))


def _probe(
    template: CompiledTemplate,
    source: TemplateSource,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> list[str | int]:
    try:
        return template.render(RenderJob(source, messages, tools, now_s=1e9))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - templates are other people's programs
        return []


def as_transformers(kind: type[ImmutableSandboxedEnvironment]) -> ImmutableSandboxedEnvironment:
    """An environment as the models' authors know it from `transformers`."""
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControlExtension])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["dict"] = _dict
    del environment.globals["lipsum"]
    return environment


def _raise(message: object = "") -> NoReturn:
    raise Raised(str(message))


def _dict(*pairs: Any, **items: Any) -> dict[Any, Any]:
    return dict(*pairs, **items)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _brief(error: BaseException) -> str:
    return str(error)[:_MAX_MESSAGE]
