"""The vocabulary without a model: bytes in, bytes and words out, a template that knows tools."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidModel
from headrace.text.byte_vocabulary import END, byte_vocabulary
from headrace.text.detokenizer import Detokenizer
from headrace.text.limited import LimitedPool
from headrace.text.template import ChatTemplate, Conversation
from headrace.text.tokenizer import Tokenizer

pytestmark = pytest.mark.unit
TOKENIZER = Tokenizer(byte_vocabulary())


def test_text_becomes_its_bytes_and_comes_back() -> None:
    text = "a ba\n漢<|im_end|>\x00"
    assert TOKENIZER.encode_text(text) == list(text.encode())
    assert TOKENIZER.decode(text.encode()) == text
    assert TOKENIZER.vocab_size == 512


@given(st.lists(st.integers(-1, 513), max_size=40))
def test_ids_one_by_one_are_the_ids_together(ids: list[int]) -> None:
    together, apart = Detokenizer(TOKENIZER.table), Detokenizer(TOKENIZER.table)
    text = together.push(ids) + together.finish()
    assert "".join([apart.push_one(token) for token in ids]) + apart.finish() == text


def test_every_other_id_is_a_word_of_its_own_or_special() -> None:
    rest = [TOKENIZER.token_bytes(token) for token in range(256, 512)]
    assert len(set(rest)) == len(rest)
    assert all(data.startswith(b" ") for data in rest[3:])
    assert TOKENIZER.special_ids[END] == byte_vocabulary().eos_id


@pytest.mark.parametrize("size", [259, 300, 4000])
def test_it_has_the_size_that_is_asked(size: int) -> None:
    assert Tokenizer(byte_vocabulary(size)).vocab_size == size


def test_too_few_ids_are_refused() -> None:
    with pytest.raises(InvalidModel, match="259"):
        byte_vocabulary(258)


def test_the_template_knows_system_tools_and_calls() -> None:
    with LimitedPool() as pool:
        template = ChatTemplate(byte_vocabulary().chat_template, TOKENIZER.special_ids, pool)
        traits = template.describe_sync()
        assert traits.system and traits.tools and traits.tool_calls and traits.content == "string"
        pieces = template.render_sync(Conversation(messages=[{"role": "user", "content": "hi"}]))
    start, end = TOKENIZER.special_ids["<|im_start|>"], TOKENIZER.special_ids[END]
    assert pieces == [start, "user\nhi", end, "\n", start, "assistant\n"]
