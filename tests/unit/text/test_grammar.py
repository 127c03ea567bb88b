"""Grammars before they are used: bounds, hostile ones refused in time, what passed remembered."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.core.errors import HeadraceError, InvalidInput
from headrace.text.grammar import Grammar, GrammarDesk
from headrace.text.limited import LimitedPool
from headrace.text.limited_process import Limits


@pytest.fixture(scope="module")
def pool() -> Iterator[LimitedPool]:
    with LimitedPool(Limits(memory_bytes=300 << 20)) as pool:
        yield pool


@pytest.fixture(scope="module")
def desk(pool: LimitedPool) -> GrammarDesk:
    return GrammarDesk(pool)


def nested(depth: int) -> str:
    """As text: a schema this deep cannot even be built up by every encoder."""
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


def doubling(keyword: str, count: int = 60) -> dict[str, Any]:
    """Each definition names the next one twice."""
    definitions: dict[str, Any] = {f"d{count}": {"type": "integer"}}
    for number in range(count):
        reference = {"$ref": f"#/$defs/d{number + 1}"}
        two = {"x": reference, "y": reference} if keyword == "properties" else [reference, reference]
        definitions[f"d{number}"] = {keyword: two}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def integers(count: int, first: int = 0) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{first + at}": {"type": "integer"} for at in range(count)}}


HOSTILE: dict[str, object] = {
    "other document": {"$ref": "http://example.com/schema.json"},
    "itself": {"$ref": "#"},
    "nothing": False,
    "unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 1},
    "unknown type": {"type": "intger"},
    "not implemented": {"not": {"type": "string"}},
    "its own options": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
    "doubling oneOf": doubling("oneOf"),
    "products of anyOf": {"allOf": [{"anyOf": [integers(1, 9 * a + b) for b in range(4)]} for a in range(16)]},
    "wide object": integers(300),
    "wide when merged": {"allOf": [integers(250, 250 * at) for at in range(3)]},
    "many properties": {"anyOf": [integers(200, at) for at in range(6)]},
    "many enum values": {"enum": list(range(6_000))},
    "many references": {"anyOf": [{"$ref": "#/$defs/x"}] * 1_001, "$defs": {"x": {}}},
    "many values": {"anyOf": [{"const": number} for number in range(20_000)]},
    "long": {"const": "x" * 300_000},
    "patterns of gigabytes": {
        "type": "string",
        "allOf": [{"pattern": f".*{chr(97 + at)}.{{{at * 7}}}"} for at in range(20)],
    },
    "multiples": {"type": "integer", "multipleOf": 999_983, "minimum": 0, "maximum": 10**30},
    "a list": [1],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_while_others_are_checked(desk: GrammarDesk, pool: LimitedPool, name: str) -> None:
    async def story() -> object:
        hostile = asyncio.gather(desk.check(Grammar.json_schema(HOSTILE[name])), return_exceptions=True)
        await GrammarDesk(pool).check(Grammar.json_schema({"type": "integer"}))
        return (await hostile)[0]

    error = asyncio.run(story())
    assert isinstance(error, HeadraceError) and error.code in ("invalid_request", "timed_out")
    assert error.param == "response_format" or error.code == "timed_out"


@pytest.mark.parametrize("source", [nested(1_000), "[" * 100_000, nested(33), "{", "nonsense", '{"type": "integer"'])
def test_a_schema_that_nests_too_deeply_or_is_no_json_is_refused(desk: GrammarDesk, source: str) -> None:
    with pytest.raises(InvalidInput, match="the JSON schema"):
        desk.check_sync(Grammar("json_schema", source))


def test_brackets_inside_texts_do_not_nest(desk: GrammarDesk) -> None:
    desk.check_sync(Grammar.json_schema({"const": '{["\\' * 100}))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        integers(250),
        {"enum": [f"value {number}" for number in range(4_000)]},
        {
            "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}},
            "$ref": "#/$defs/n",
        },
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "pattern": "^(a|aa)+$", "minLength": 2},
        {"type": "string", "maxLength": 1_000_000},
        {"type": "string", "minLength": 1, "maxLength": 2**31 - 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2**53 - 1},
    ],
)
def test_an_honest_schema_passes(desk: GrammarDesk, schema: object) -> None:
    desk.check_sync(Grammar.json_schema(schema))


@pytest.mark.parametrize("keyword", ["properties", "allOf"])
def test_references_that_double_are_refused(desk: GrammarDesk, keyword: str) -> None:
    with pytest.raises(InvalidInput, match="with its references written out"):
        desk.check_sync(Grammar.json_schema(doubling(keyword)))


def test_repeats_of_repeats_are_refused_in_a_schema_as_well(desk: GrammarDesk) -> None:
    with pytest.raises(InvalidInput, match="a pattern of the JSON schema repeats"):
        desk.check_sync(Grammar.json_schema({"type": "string", "pattern": "(a{1,900}){1,900}"}))


@pytest.mark.parametrize("keyword", ["minLength", "minItems", "minProperties"])
def test_what_no_reply_is_long_enough_for_is_refused_by_its_keyword(desk: GrammarDesk, keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["string", "array", "object"], keyword: 10**9}}}
    with pytest.raises(InvalidInput, match=keyword) as refused:
        desk.check_sync(Grammar.json_schema(schema))
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    "pattern", ["(a", "(?=a)b", r"(a)\1", r"\bword\b", "[z-a]", "a" * 20_000, "(((a{0,99}){0,99}){0,99}){0,99}(?!x)"]
)
def test_a_regular_expression_that_cannot_be_used_is_refused(desk: GrammarDesk, pattern: str) -> None:
    with pytest.raises(InvalidInput, match="the regular expression"):
        desk.check_sync(Grammar("regex", pattern))


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|aa)+$", "(x+x+)+y", "a{1,9000}", "^[0-9]{3}$"])
def test_a_pattern_that_is_catastrophic_elsewhere_is_harmless_here(desk: GrammarDesk, pattern: str) -> None:
    desk.check_sync(Grammar("regex", pattern))


def test_choices_are_a_list_of_some_texts(desk: GrammarDesk) -> None:
    desk.check_sync(Grammar.choice(["", 'a"b\\', "\n\t", "日本", "<|im_end|>"]))
    for source in ("[]", "[1]", "{}", "[", json.dumps([str(number) for number in range(6_000)])):
        with pytest.raises(InvalidInput, match="the choice"):
            desk.check_sync(Grammar("choice", source))


def test_a_lark_grammar_is_compiled_too(desk: GrammarDesk) -> None:
    desk.check_sync(Grammar("lark", 'start: "(" start ")" | "x"'))
    with pytest.raises(InvalidInput, match="the grammar cannot be used"):
        desk.check_sync(Grammar("lark", "start: unheard"))


def test_what_passed_is_not_compiled_again() -> None:
    with LimitedPool(Limits(processes=1)) as pool:
        desk = GrammarDesk(pool, remembered=1)
        desk.check_sync(Grammar("regex", "a"))
    desk.check_sync(Grammar("regex", "a"))
    with pytest.raises(HeadraceError):
        desk.check_sync(Grammar("regex", "b"))


def test_a_schema_that_no_json_can_hold_is_refused() -> None:
    with pytest.raises(InvalidInput):
        Grammar.json_schema({"const": object()})
