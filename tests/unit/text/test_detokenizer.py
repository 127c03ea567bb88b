"""A stream's text appears character by character and is the decoded text in the end."""

import pytest

from headrace.core.errors import InvalidModel
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokens import Spelling, TokenTable
from tests.unit.text.real_vocabularies import tokenizer
from tests.unit.text.small_vocabularies import sentencepiece


def bytes_of(text: str) -> list[int]:
    """Ids of SentencePiece's single bytes."""
    return [3 + byte for byte in text.encode()]


def test_a_character_of_several_tokens_appears_when_it_is_whole() -> None:
    smollm2 = tokenizer("smollm2")
    ids = smollm2.encode_text("🪿")
    stream = Detokenizer(smollm2.table)
    deltas = [stream.push([token]) for token in ids]
    assert len(ids) > 1
    assert deltas == [""] * (len(ids) - 1) + ["🪿"]
    assert stream.finish() == ""


def test_a_character_cut_off_by_the_end_becomes_one_mark() -> None:
    smollm2 = tokenizer("smollm2")
    stream = Detokenizer(smollm2.table)
    assert stream.push(smollm2.encode_text("ok 🪿")[:-1]) == "ok "
    assert stream.finish() == "\ufffd"


def test_control_tokens_are_silent_unless_asked_for() -> None:
    smollm2 = tokenizer("smollm2")
    ids = [1, *smollm2.encode_text("hi"), 2]
    assert Detokenizer(smollm2.table).push(ids) == "hi"
    assert Detokenizer(smollm2.table, show=[2]).push(ids) == "hi<|im_end|>"


def test_ids_outside_the_vocabulary_are_silent() -> None:
    assert Detokenizer(tokenizer("smollm2").table).push([-1, 49_152, 10**9]) == ""


def test_a_stream_rebuilt_from_its_ids_goes_on_where_it_was() -> None:
    smollm2 = tokenizer("smollm2")
    ids = smollm2.encode_text("a 🪿 b")
    for cut in range(len(ids)):
        lost, rebuilt = Detokenizer(smollm2.table), Detokenizer(smollm2.table)
        shown = "".join(lost.push([token]) for token in ids[:cut])
        assert rebuilt.push(ids[:cut]) == shown
        assert shown + rebuilt.push(ids[cut:]) + rebuilt.finish() == "a 🪿 b"


def test_sentencepiece_bytes_appear_when_they_are_a_character() -> None:
    stream = Detokenizer(Tokenizer(sentencepiece()).table)
    assert [stream.push([token]) for token in bytes_of("😀é")] == ["", "", "", "😀", "", "é"]


def test_sentencepiece_bytes_that_are_no_character_become_a_mark_each() -> None:
    tokens = Tokenizer(sentencepiece())
    broken = [3 + 0xF0, 3 + 0x9F, *tokens.encode_text("the")]
    assert tokens.decode(broken) == "\ufffd\ufffd the"
    stream = Detokenizer(tokens.table)
    assert stream.push([3 + 0xF0, 3 + 0x9F]) + stream.finish() == "\ufffd\ufffd"
    assert tokens.decode([3 + 0xE2, *bytes_of("é")]) == "\ufffdé"


def test_the_space_that_encoding_put_in_front_goes_once() -> None:
    tokens = Tokenizer(sentencepiece())
    ids = tokens.encode_text("the") * 2
    stream = Detokenizer(tokens.table)
    assert [stream.push([]), stream.push([1]), *(stream.push([token]) for token in ids)] == ["", "", "the", " the"]


def test_a_text_that_is_carried_on_keeps_its_space() -> None:
    tokens = Tokenizer(sentencepiece())
    assert Detokenizer(tokens.table, continues=True).push(tokens.encode_text("the")) == " the"


def test_word_pieces_are_refused() -> None:
    table = TokenTable({0: "to", 1: "##ken"}, size=2, spelling=Spelling.OPAQUE)
    with pytest.raises(InvalidModel, match="token by token"):
        Detokenizer(table)
