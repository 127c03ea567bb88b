"""The text of one choice: whole characters, nothing of a stop string, nothing of the ids that end it."""

from headrace.serving.choice import Choice
from headrace.text.stop import StopWindow
from headrace.text.tokenizer import Tokenizer
from tests.unit.text.small_vocabularies import byte_level

TOKENIZER = Tokenizer(byte_level("gpt-2"))
END = TOKENIZER.special_ids["<|end|>"]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode_text(text)


def test_a_character_of_several_tokens_comes_whole() -> None:
    choice = Choice(TOKENIZER.table)
    deltas = [choice.push([token]) for token in ids("a漢b")]
    assert deltas == ["a", "", "", "漢", "b"]


def test_what_was_held_back_comes_at_the_end() -> None:
    choice = Choice(TOKENIZER.table, StopWindow(["END"]))
    assert choice.push(ids("one EN")) == "one "
    assert choice.finish() == "EN"


def test_nothing_of_a_stop_string_or_after_it_is_said() -> None:
    choice = Choice(TOKENIZER.table, StopWindow(["END"]))
    assert choice.push(ids("one ENDtwo")) == "one "
    assert choice.stopped
    assert choice.num_tokens == len("one END"), "what comes after it is not counted either"
    assert choice.push(ids("three")) + choice.finish() == ""


def test_an_id_that_ends_the_reply_is_no_part_of_it() -> None:
    (letter,) = ids("x")
    choice = Choice(TOKENIZER.table, ends=[END, letter])
    assert choice.push([*ids("ab"), letter, END]) + choice.finish() == "ab"
    assert choice.num_tokens == 4


def test_half_a_character_at_the_end_is_shown_as_broken() -> None:
    choice = Choice(TOKENIZER.table)
    assert choice.push(ids("漢")[:2]) == ""
    assert choice.finish() == "\N{REPLACEMENT CHARACTER}"


def test_choices_that_share_their_stop_strings_are_apart() -> None:
    window = StopWindow(["END"])
    first, second = Choice(TOKENIZER.table, window), Choice(TOKENIZER.table, window)
    assert first.push(ids("one EN")) == "one "
    assert second.push(ids("D END")) == "D "
    assert second.stopped and not first.stopped
    assert first.finish() == "EN"
