"""Sizes of schemas and expressions written out: doubling is seen, recursion and plain repeats are not feared."""

from typing import Any

import pytest

from headrace.text.grammar_bounds import excess, is_regex_too_large, is_schema_too_large


def doubling(levels: int) -> dict[str, Any]:
    pair = [{"$ref": "#/$defs/d{0}"}, {"$ref": "#/$defs/d{0}"}]
    defs = {f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"} for _ in pair]} for level in range(levels)}
    return {"$defs": defs | {f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(("levels", "too_large"), [(3, False), (12, False), (16, True), (40, True), (600, True)])
def test_references_that_double_are_counted_out(levels: int, too_large: bool) -> None:
    assert is_schema_too_large(doubling(levels)) is too_large


def test_a_schema_may_refer_to_itself() -> None:
    node = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    assert not is_schema_too_large(node)


def test_a_reference_into_a_list_or_to_nothing_is_followed_or_left() -> None:
    assert not is_schema_too_large({"anyOf": [{"type": "string"}, {"$ref": "#/anyOf/0"}, {"$ref": "#/nowhere/7"}]})


@pytest.mark.parametrize(
    "pattern",
    [
        "[0-9]{3}-[0-9]{4}",
        "(a*)*b",
        "(a|aa)+",
        "a{1,5000}",
        r"\{1,9\}{2}",
        "[{}]{3}",
        "(ab{2}){100}",
        "{",
        "a{x}",
        "",
        "[]a]{9}",
    ],
)
def test_ordinary_expressions_are_small(pattern: str) -> None:
    assert not is_regex_too_large(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "((a{1,500}){1,500}){1,500}b",
        "a{1,1000000}",
        "(a{400}){400}",
        "((((a{20}){20}){20}){20}){20}",
        "([a-z]{1000}b){200}",
    ],
)
def test_repeats_of_repeats_are_multiplied(pattern: str) -> None:
    assert is_regex_too_large(pattern)


@pytest.mark.parametrize(
    ("keyword", "most"),
    [("minLength", 10_000), ("minItems", 100_000), ("minProperties", 100_000), ("maxLength", 2**32 - 1)],
)
def test_a_keyword_that_no_reply_can_meet_is_named(keyword: str, most: int) -> None:
    assert excess({"type": "string", keyword: most}) is None
    for value in (most + 1, 2**63, 1e30):
        assert excess({"type": "string", keyword: value}) == (keyword, most)


def test_a_property_may_be_called_like_a_keyword() -> None:
    assert excess({"minItems": {"type": "integer"}, "minLength": True, "maxItems": 2**63}) is None
