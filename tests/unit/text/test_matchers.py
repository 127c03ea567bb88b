"""Matchers: whatever is drawn under their masks follows the grammar, and what fails fails alone."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import InvalidInput, InvalidModel, RowFailed
from headrace.core.plan import Masks
from headrace.core.ports import MaskSource
from headrace.text.grammar import Grammar
from headrace.text.lexicon import Lexicon
from headrace.text.matchers import Matchers
from headrace.text.tokenizer import Tokenizer
from tests.unit.text.small_vocabularies import byte_level, sentencepiece

MERGES = ('{ "', '" :', '" ,', "a b", "t r", "tr u", "tru e", 'Ġ "', '" }', "1 2", "12 3", "Ċ Ġ")
PADDING = 77
LETTERS = st.text("ab{", max_size=3)


class World:
    """A vocabulary, its matchers, and a dice player who writes what the masks allow."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.vocab_size = tokenizer.vocab_size + PADDING
        self.matchers = Matchers(Lexicon(tokenizer, self.vocab_size, eos_ids))
        self._numbers = iter(range(10**9))

    def add(self, grammar: Grammar, emitted_ids: Sequence[int] = ()) -> int:
        number = next(self._numbers)
        self.matchers.add(number, grammar, emitted_ids).result()
        return number

    def allowed(self, number: int) -> list[int]:
        masks = self.matchers.masks([5], [number])
        return [] if not len(masks.rows) else bits(masks, 0)

    def write(self, grammar: Grammar, seed: int, patience: int = 40) -> str:
        """Random tokens; when patience ends, those that close something or are short."""
        dice = random.Random(seed)
        number = self.add(grammar)
        ids: list[int] = []
        for step in range(600):
            allowed = self.allowed(number)
            assert allowed, f"stuck after {self.spell(ids)!r}"
            hasty = step >= patience
            token = min(allowed, key=lambda token: self._rank(token, dice)) if hasty else dice.choice(allowed)
            self.matchers.advance(number, token)
            if token in self.eos_ids:
                self.matchers.remove(number)
                return self.spell(ids).decode()
            ids.append(token)
        raise AssertionError(f"no end in sight: {self.spell(ids)!r}")

    def token(self, text: str) -> int:
        return next(token for token in range(self.vocab_size) if self.spell([token]) == text.encode())

    def spell(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self.tokenizer.token_bytes, ids))

    def _rank(self, token: int, dice: random.Random) -> tuple[int, float]:
        if token in self.eos_ids:
            return -1, 0.0
        text = self.tokenizer.token_bytes(token)
        order = (b'"', b"}", b"]")
        return order.index(text) if text in order else 9 + (text.strip() == b""), dice.random()


def bits(masks: Masks, row: int) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(masks.words[row].view(np.uint8), bitorder="little")).tolist()
    return found


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    vocabulary = byte_level("gpt-2", merges=MERGES) if request.param == "byte-level" else sentencepiece()
    tokenizer = Tokenizer(vocabulary)
    eos_ids = (tokenizer.vocab_size - 1,) if request.param == "byte-level" else (2, 1)
    world = World(tokenizer, eos_ids)
    yield world
    world.matchers.close()


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(LETTERS, inner, max_size=3)
    return properties.flatmap(
        lambda found: (
            st.lists(st.sampled_from(sorted(found)), unique=True).map(
                lambda required: {
                    "type": "object",
                    "properties": found,
                    "required": required,
                    "additionalProperties": False,
                }
            )
            if found
            else st.just({"type": "object", "maxProperties": 2, "additionalProperties": {"type": "boolean"}})
        )
    )


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    either = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return st.one_of(arrays, objects(inner), either)


LEAVES = st.one_of(
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"type": "integer"}, {"type": "number"}, {"type": "string"}]
    ),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-50, 50),
        st.integers(0, 99),
    ),
    st.builds(lambda low: {"type": "number", "minimum": low, "exclusiveMaximum": low + 1.5}, st.integers(-5, 5)),
    st.builds(lambda least: {"type": "string", "minLength": least, "maxLength": least + 4}, st.integers(0, 3)),
    st.just({"type": "string", "pattern": "^[a-f]{2}(-[0-9]+)?$"}),
    st.lists(st.one_of(LETTERS, st.integers(-9, 9), st.none()), min_size=1, max_size=4, unique_by=repr).map(
        lambda v: {"enum": v}
    ),
)
SCHEMAS = st.recursive(LEAVES, containers, max_leaves=6)


def test_matchers_are_a_source_of_masks(world: World) -> None:
    source: MaskSource = world.matchers
    assert len(source.masks([], []).rows) == 0


@settings(max_examples=100)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_documents_written_under_a_schema_validate(world: World, schema: dict[str, Any], seed: int) -> None:
    document = json.loads(world.write(Grammar.json_schema(schema), seed))
    jsonschema.validate(document, schema)


@pytest.mark.parametrize("seed", range(8))
def test_any_json_object_is_an_object(world: World, seed: int) -> None:
    assert isinstance(json.loads(world.write(Grammar("json_object"), seed, patience=15)), dict)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "pattern", ["(a|bc)*d?", "[0-9]{4}-[0-9]{2}", "(é|漢)+x", "^ab$", "(a*)*b", '("x": [0-9]{1,3},? ?){1,3}']
)
def test_texts_written_under_a_pattern_match_it(world: World, pattern: str, seed: int) -> None:
    assert re.fullmatch(pattern, world.write(Grammar("regex", pattern), seed))


@settings(max_examples=50)
@given(choices=st.lists(st.text(max_size=6), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_a_choice_is_one_of_the_texts(world: World, choices: list[str], seed: int) -> None:
    assert world.write(Grammar.choice(choices), seed) in choices


def test_every_choice_can_be_made(world: World) -> None:
    choices = ["", "a", "ab", "abc", "true", "日本"]
    assert {world.write(Grammar.choice(choices), seed) for seed in range(200)} == set(choices)


def test_the_end_is_allowed_exactly_when_the_text_is_complete(world: World) -> None:
    number = world.add(Grammar("regex", "a(bb)?"))
    letter_a, letter_b = world.token("a"), world.token("b")
    ends = []
    for token in (letter_a, letter_b, letter_b):
        world.matchers.advance(number, token)
        ends.append(set(world.eos_ids) <= set(world.allowed(number)))
        assert ends[-1] == world.matchers.can_end(number)
    assert ends == [True, False, True]
    assert set(world.allowed(number)) == set(world.eos_ids)


def test_padding_and_special_tokens_are_never_allowed(world: World) -> None:
    allowed = set(world.allowed(world.add(Grammar("regex", "(?s:.*)"))))
    assert set(world.eos_ids) < allowed
    assert max(allowed) < world.tokenizer.vocab_size
    special = set(world.tokenizer.special_ids.values()) - set(world.eos_ids)
    assert not special & allowed
    named = Grammar("lark", "start: <[0]> | <[1]> | /x/")
    if special:
        assert not special & set(world.allowed(world.add(named)))


def test_masks_have_a_bit_per_token_of_the_model(world: World) -> None:
    masks = world.matchers.masks([9], [world.add(Grammar("regex", "x"))])
    assert masks.rows.tolist() == [9] and masks.rows.dtype == np.int32
    assert masks.words.shape == (1, -(-world.vocab_size // 32)) and masks.words.dtype == np.uint32


def test_many_rows_are_filled_as_each_alone(world: World) -> None:
    numbers = [world.add(Grammar("regex", f"[a-{chr(97 + at)}]+")) for at in range(24)]
    masks = world.matchers.masks(range(100, 124), numbers)
    assert masks.rows.tolist() == list(range(100, 124))
    assert [bits(masks, row) for row in range(24)] == [world.allowed(number) for number in numbers]


def test_a_row_whose_matcher_erred_is_left_out_alone(world: World) -> None:
    numbers = [world.add(Grammar("regex", "a+")) for _ in range(20)]
    world.matchers.advance(numbers[3], world.eos_ids[0])
    world.matchers.advance(numbers[7], -1)
    world.matchers.advance(numbers[9], world.vocab_size)
    world.matchers.advance(10**9, 1)  # unknown: nothing happens
    masks = world.matchers.masks(range(21), [*numbers, 10**9])
    assert masks.rows.tolist() == [row for row in range(20) if row not in (3, 7, 9)]


def test_a_sequence_that_ended_may_still_be_asked_once(world: World) -> None:
    number = world.add(Grammar("regex", "a?"))
    world.matchers.advance(number, world.eos_ids[0])
    assert set(world.allowed(number)) == set(world.eos_ids)


def test_a_replayed_sequence_goes_on_where_it_was(world: World) -> None:
    grammar = Grammar.json_schema({"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]})
    number, dice = world.add(grammar), random.Random(7)
    ids: list[int] = []
    for _ in range(12):
        expected = world.allowed(number)
        assert world.allowed(world.add(grammar, ids)) == expected
        assert world.matchers.rebuild(number, ids) and world.allowed(number) == expected
        ids.append(dice.choice([token for token in expected if token not in world.eos_ids] or expected))
        world.matchers.advance(number, ids[-1])


def test_ids_that_the_grammar_forbids_fail_the_sequence_that_brings_them(world: World) -> None:
    with pytest.raises(RowFailed):
        world.add(Grammar("regex", "a"), world.tokenizer.encode_text("b"))
    number = world.add(Grammar("regex", "a"))
    assert not world.matchers.rebuild(number, world.tokenizer.encode_text("bb"))
    assert world.allowed(number) == []
    assert not world.matchers.rebuild(10**9, [])


@pytest.mark.parametrize(
    "grammar",
    [Grammar("regex", "("), Grammar("json_schema", "{"), Grammar("lark", "x"), Grammar("choice", "[]")],
)
def test_a_grammar_that_does_not_compile_is_told_to_who_added_it(world: World, grammar: Grammar) -> None:
    with pytest.raises(InvalidInput):
        world.add(grammar)


def test_a_grammar_that_explodes_as_it_is_written_ends_that_row_within_its_limits(world: World) -> None:
    number = world.add(Grammar("lark", 'start: a\na: a a | "x" |'))
    other = world.add(Grammar("regex", "x+"))
    letter = world.token("x")
    for _ in range(400):
        world.matchers.advance(number, letter)
    assert world.matchers.masks([0, 1], [number, other]).rows.tolist() == [1]


def test_a_sequence_that_drives_its_automaton_to_the_limit_leaves_others_of_the_same_grammar_alone(
    world: World,
) -> None:
    grammar = Grammar("regex", "(.*a.*b.*c|.*c.*b.{50}a|.*(ab|ba){2}.{9,80}c)+")
    first, second = world.add(grammar), world.add(grammar)
    dice = random.Random(3)
    letters = [world.token(letter) for letter in "abc"]
    for _ in range(5_000):
        world.matchers.advance(first, dice.choice(letters))
    assert world.allowed(first) == []
    assert world.allowed(second) and world.allowed(world.add(grammar))


def test_a_sequence_removed_while_its_matcher_is_built_has_none(world: World) -> None:
    first = world.matchers.add(10**8, Grammar("regex", "a"))
    world.matchers.remove(10**8)
    first.result()
    if world.allowed(10**8):  # the build won the race, so this removal ends it
        world.matchers.remove(10**8)
    assert world.allowed(10**8) == []


def test_a_model_without_an_end_cannot_be_held_to_a_grammar(world: World) -> None:
    with pytest.raises(InvalidModel):
        Lexicon(world.tokenizer, world.vocab_size, [])
    with pytest.raises(InvalidModel):
        Lexicon(world.tokenizer, world.vocab_size, [world.vocab_size])


def test_a_matcher_may_be_built_before_its_sequence_has_a_number(world: World) -> None:
    grammar = Grammar.choice(["ab", "ac"])
    matcher = world.matchers.build(grammar).result()
    world.matchers.put(77, matcher)
    world.matchers.add(78, grammar).result()
    built, added = world.matchers.masks([0], [77]), world.matchers.masks([0], [78])
    assert built.words.any() and np.array_equal(built.words, added.words)
    for number in (77, 78):
        world.matchers.remove(number)
    with pytest.raises(InvalidInput):
        world.matchers.build(Grammar("regex", "(")).result()
