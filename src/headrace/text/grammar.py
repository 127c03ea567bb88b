"""What an answer must look like: a JSON schema, any JSON object, a regular expression, a choice, a Lark grammar.

Owns the record, the bounds that hold before anything is compiled, and the check that a gateway makes. Compiling
is tried in a limited process first (`grammar_check`): some small schemas take gigabytes or minutes, and nothing in
a compiler's own limits stops them all.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.text.grammar_bounds import (
    MAX_EXPANDED_REGEX,
    MAX_EXPANDED_VALUES,
    excess,
    is_regex_too_large,
    is_schema_too_large,
)
from headrace.text.limited import LimitedPool

MAX_SOURCE_BYTES = 256 << 10
MAX_REGEX_BYTES = 16 << 10
MAX_DEPTH = 64
MAX_VALUES = 20_000
MAX_PROPERTIES = 1_000
# Of one object: a mask looks at all that may come next.
MAX_OWN_PROPERTIES = 256
MAX_ENUM_VALUES = 5_000
MAX_CHOICES = 5_000
MAX_REFERENCES = 1_000

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])', re.DOTALL)

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "calls"]

SUBJECTS: dict[Kind, str] = {
    "json_schema": "the JSON schema",
    "json_object": "the JSON object",
    "regex": "the regular expression",
    "choice": "the choice",
    "lark": "the grammar",
    "calls": "the tools' schema",
}


class CallForm(Struct, frozen=True, omit_defaults=True):
    """One to `most` tool calls, each an object of this schema between these tags; or, where there is one, an `answer` of
    that schema instead."""

    schema: dict[str, Any]
    open_tag: str = ""
    close_tag: str = ""
    most: int = 1
    answer: Any = None


class Grammar(Struct, frozen=True):
    """`source`: the schema as JSON, the expression, a JSON list of strings, the Lark text, or a `CallForm` as JSON."""

    kind: Kind
    source: str = ""

    @staticmethod
    def json_schema(schema: object) -> "Grammar":
        """Of a schema that was parsed already. Key order is kept: it is the order that properties are written in."""
        try:
            return Grammar("json_schema", msgspec.json.encode(schema).decode())
        except (TypeError, UnicodeEncodeError, RecursionError):
            raise InvalidInput("the JSON schema is not JSON, or nests too deeply", param="response_format") from None

    @staticmethod
    def calls(form: CallForm) -> "Grammar":
        try:
            return Grammar("calls", msgspec.json.encode(form).decode())
        except (TypeError, UnicodeEncodeError, RecursionError):
            raise InvalidInput("the tools are not JSON, or nest too deeply", param="tools") from None

    @staticmethod
    def choice(choices: Sequence[str]) -> "Grammar":
        try:
            return Grammar("choice", msgspec.json.encode(list(choices)).decode())
        except (TypeError, UnicodeEncodeError):
            raise InvalidInput("the choice is not a list of texts", param="response_format") from None


class GrammarDesk:
    """Where a gateway has grammars checked. It remembers what passed, since clients repeat themselves."""

    def __init__(self, pool: LimitedPool, *, limit_s: float = 1.5, remembered: int = 4_096) -> None:
        self._pool = pool
        self._limit_s = limit_s
        self._remembered = remembered
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, grammar: Grammar, param: str = "response_format") -> None:
        """InvalidInput, naming `param`, unless the grammar compiles within the limits."""
        check_size(grammar, param)
        key = self._recall(grammar)
        if key is None:
            return
        await self._pool.call(
            "validate", grammar, bool, subject=SUBJECTS[grammar.kind], param=param, limit_s=self._limit_s
        )
        self._remember(key)

    def check_sync(self, grammar: Grammar, param: str = "response_format") -> None:
        check_size(grammar, param)
        key = self._recall(grammar)
        if key is None:
            return
        self._pool.call_sync(
            "validate", grammar, bool, subject=SUBJECTS[grammar.kind], param=param, limit_s=self._limit_s
        )
        self._remember(key)

    def _recall(self, grammar: Grammar) -> bytes | None:
        """None if it passed before, else the key to remember it by."""
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        if key not in self._passed:
            return key
        self._passed.move_to_end(key)
        return None

    def _remember(self, key: bytes) -> None:
        self._passed[key] = None
        if len(self._passed) > self._remembered:
            self._passed.popitem(last=False)


def check_size(grammar: Grammar, param: str = "response_format") -> None:
    """The bounds that cost nothing to check, before the grammar goes anywhere."""
    most = MAX_REGEX_BYTES if grammar.kind == "regex" else MAX_SOURCE_BYTES
    if len(grammar.source) > most or len(grammar.source.encode(errors="replace")) > most:
        raise InvalidInput(f"{SUBJECTS[grammar.kind]} is longer than {most} bytes", param=param)
    if grammar.kind in ("json_schema", "choice", "calls") and _depth(grammar.source) > MAX_DEPTH:
        raise InvalidInput(f"{SUBJECTS[grammar.kind]} nests deeper than {MAX_DEPTH} levels", param=param)


def read_choices(source: str) -> list[str]:
    choices = msgspec.json.decode(source, type=list[str])
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidInput(f"the choice must be among 1 to {MAX_CHOICES} texts")
    return choices


def read_schema(source: str) -> Any:
    """The schema, within bounds on everything that a compiler multiplies."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        raise InvalidInput("the JSON schema is not valid JSON") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidInput("the JSON schema must be an object")
    counts = {"values": 0, "properties": 0, "enum": 0, "$ref": 0}
    waiting: list[object] = [schema]
    while waiting:
        value = waiting.pop()
        counts["values"] += 1
        if isinstance(value, dict):
            _count_keywords(value, counts)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    bounds = (("values", MAX_VALUES), ("properties", MAX_PROPERTIES), ("enum", MAX_ENUM_VALUES))
    for name, most in (*bounds, ("$ref", MAX_REFERENCES)):
        if counts[name] > most:
            raise InvalidInput(f"the JSON schema holds more than {most} {_PLURALS[name]}")
    if is_schema_too_large(schema):
        raise InvalidInput(
            f"the JSON schema holds more than {MAX_EXPANDED_VALUES} values with its references written out"
        )
    return schema


_PLURALS = {"values": "values", "properties": "properties", "enum": "enum values", "$ref": "references"}


def _count_keywords(value: dict[str, object], counts: dict[str, int]) -> None:
    for name in ("properties", "patternProperties"):
        properties = value.get(name)
        own = len(properties) if isinstance(properties, dict) else 0
        if own > MAX_OWN_PROPERTIES:
            raise InvalidInput(f"the JSON schema has an object with more than {MAX_OWN_PROPERTIES} properties")
        counts["properties"] += own
    enum = value.get("enum")
    counts["enum"] += len(enum) if isinstance(enum, list) else 0
    if found := excess(value):
        raise InvalidInput(f"{found[0]} in the JSON schema must be at most {found[1]}")
    pattern = value.get("pattern")
    if isinstance(pattern, str):
        check_repeats(pattern, "a pattern of the JSON schema")
    reference = value.get("$ref")
    if isinstance(reference, str):
        counts["$ref"] += 1
        if not reference.startswith("#"):
            raise InvalidInput("the JSON schema refers to another document, which is not fetched")


def check_repeats(pattern: str, subject: str) -> None:
    if is_regex_too_large(pattern):
        raise InvalidInput(f"{subject} repeats more than {MAX_EXPANDED_REGEX} times when it is written out")


def _depth(source: str) -> int:
    """Of JSON text, without parsing it: a parser may recurse."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(source):
        if found[1]:
            depth += 1
            deepest = max(deepest, depth)
        elif found[2]:
            depth -= 1
    return deepest
