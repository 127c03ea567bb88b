"""What a reply must look like, in the words of the several servers that have a field for it. Owns those fields.

`response_format` is OpenAI's, `guided_*` and `structured_outputs` are vLLM's, `regex`, `ebnf`, `json_schema` and
`grammar` SGLang's and llama.cpp's. Grammars are read as Lark. At most one may be given.
"""

from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct, field

from headrace.core.errors import InvalidInput
from headrace.gateway.schemas.bounds import (
    MAX_DEPTH,
    GuidedChoices,
    Name,
    Regex,
    Source,
    check_depth,
)

Schema = dict[str, Any] | bool
SchemaText = dict[str, Any] | bool | Source


class TextFormat(Struct, frozen=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    pass


class NamedSchema(Struct, frozen=True):
    """`strict` changes nothing: a schema always holds."""

    name: Name
    schema: Schema | None = None
    strict: bool | None = None
    description: str | None = None


class JsonSchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class RegexFormat(Struct, frozen=True, tag_field="type", tag="regex"):
    """TGI puts the expression under `value`, others under `regex`."""

    regex: Regex | None = None
    value: Regex | None = None


class GrammarFormat(Struct, frozen=True, tag_field="type", tag="grammar"):
    grammar: Source


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat


class StructuredOutputs(Struct, frozen=True):
    json: SchemaText | None = None
    regex: Regex | None = None
    choice: GuidedChoices | None = None
    grammar: Source | None = None
    json_object: bool | None = None


class ShapeFields(Struct, frozen=True, kw_only=True):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText | None = None
    guided_regex: Regex | None = None
    guided_choice: GuidedChoices | None = None
    guided_grammar: Source | None = None
    json_schema: SchemaText | None = None
    regex: Regex | None = None
    ebnf: Source | None = None
    grammar: Source | None = None


class Shape(Struct, frozen=True):
    """The fields of an Ask that shape its reply; `param` is the field of the body that said so."""

    param: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


# Fields that shape a reply by their value alone, and what of an Ask each is.
_KINDS = (
    ("guided_json", "json_schema"),
    ("guided_regex", "regex"),
    ("guided_choice", "choices"),
    ("guided_grammar", "grammar"),
    ("json_schema", "json_schema"),
    ("regex", "regex"),
    ("ebnf", "grammar"),
    ("grammar", "grammar"),
)
_values = attrgetter("response_format", "structured_outputs", *(param for param, _ in _KINDS))
# Of a reply that nothing shapes.
FREE = Shape()


def shape_of(body: ShapeFields) -> Shape:
    """InvalidInput when several fields shape the reply, or a schema is no schema."""
    values = _values(body)
    if values.count(None) == len(values):
        return FREE
    found: list[tuple[str, str, Any]] = []
    if body.response_format is not None:
        found += _from_format(body.response_format)
    if body.structured_outputs is not None:
        found += _from_outputs(body.structured_outputs)
    for param, kind in _KINDS:
        value = getattr(body, param)
        if value is not None:
            found.append((param, kind, value))
    if not found:
        return FREE
    if len(found) > 1:
        raise InvalidInput(f"{found[0][0]} and {found[1][0]} cannot both shape the reply", param=found[1][0])
    param, kind, value = found[0]
    return Shape(param, {kind: _schema(value, param) if kind == "json_schema" else value})


def _from_format(format: ResponseFormat) -> list[tuple[str, str, Any]]:
    match format:
        case JsonObjectFormat():
            return [("response_format", "json_object", True)]
        case JsonSchemaFormat():
            schema = format.json_schema.schema
            return [("response_format.json_schema.schema", "json_schema", {} if schema is None else schema)]
        case RegexFormat():
            expression = format.regex or format.value
            if expression is None:
                raise InvalidInput("response_format.regex is required", param="response_format.regex")
            return [("response_format.regex", "regex", expression)]
        case GrammarFormat():
            return [("response_format.grammar", "grammar", format.grammar)]
    return []


def _from_outputs(outputs: StructuredOutputs) -> list[tuple[str, str, Any]]:
    given = (
        ("structured_outputs.json", "json_schema", outputs.json),
        ("structured_outputs.regex", "regex", outputs.regex),
        ("structured_outputs.choice", "choices", outputs.choice),
        ("structured_outputs.grammar", "grammar", outputs.grammar),
        ("structured_outputs.json_object", "json_object", outputs.json_object or None),
    )
    return [entry for entry in given if entry[2] is not None]


def _schema(schema: SchemaText, param: str) -> Schema:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any] | bool)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raise InvalidInput(f"{param} is not a JSON schema", param=param) from None
    check_depth(schema, MAX_DEPTH, param)
    assert not isinstance(schema, str), "the text was decoded"
    return schema
