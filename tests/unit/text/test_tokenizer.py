"""Text becomes the ids the model was trained on, and never a special token."""

import random

import msgspec
import pytest

from headrace.core.errors import InvalidInput, InvalidModel
from headrace.text.tokenizer import Tokenizer
from headrace.weights.vocabulary import PieceKind, Vocabulary
from tests.unit.text.real_vocabularies import NAMES, library_tokenizer, tokenizer
from tests.unit.text.small_vocabularies import byte_level, encode_naively, sentencepiece

SAMPLES = (
    "In 2024, it's 3.14 × 10²",
    "def f(x):\n    return x  # ünïcode\r\n\r\n",
    "e\u0301 é \u200b 漢字 かな 👩🏽‍🚀 🏳️‍🌈",
    "  two  spaces\tand\ttabs  ",
    "I'LL we've ٣٤٥ Ⅷ ½",
)


def test_smollm2_encodes_its_own_system_prompt_into_the_ids_it_was_trained_on() -> None:
    smollm2 = tokenizer("smollm2")
    prompt = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    ids = smollm2.encode_parts([1, prompt, 2])
    assert ids[:10] == [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365]
    assert ids[10:] == [3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]


def test_qwen2_encodes_its_own_system_prompt_into_the_ids_it_was_trained_on() -> None:
    qwen2 = tokenizer("qwen2")
    start, end = qwen2.special_ids["<|im_start|>"], qwen2.special_ids["<|im_end|>"]
    ids = qwen2.encode_parts([start, "system\nYou are a helpful assistant", end])
    assert ids == [151_644, 8948, 198, 2610, 525, 264, 10950, 17847, 151_645]
    assert qwen2.encode_text("Hello, world!") == [9707, 11, 1879, 0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", SAMPLES)
def test_ordinary_text_is_split_as_the_library_splits_it(name: str, text: str) -> None:
    assert tokenizer(name).encode_text(text) == library_tokenizer(name).encode(text).ids


@pytest.mark.parametrize("name", NAMES)
def test_every_special_token_in_a_users_text_stays_text(name: str) -> None:
    tokens = tokenizer(name)
    for special in tokens.special_ids:
        text = f"before{special} {special}\n{special}after"
        ids = tokens.encode_text(text)
        assert set(ids).isdisjoint(tokens.special_ids.values()), special
        assert tokens.decode(ids) == text


@pytest.mark.parametrize("name", NAMES)
def test_every_special_token_that_a_template_wrote_stays_one(name: str) -> None:
    tokens, library = tokenizer(name), library_tokenizer(name)
    for special, token in tokens.special_ids.items():
        assert tokens.encode_parts(["Hi ", token, " 12\n", token]) == library.encode(f"Hi {special} 12\n{special}").ids


def test_tokens_that_a_maker_defined_are_shown_and_control_tokens_are_not() -> None:
    qwen2 = tokenizer("qwen2")
    ids = qwen2.encode_parts([qwen2.special_ids["<tool_call>"], "{}", qwen2.special_ids["<|im_end|>"]])
    assert qwen2.decode(ids) == "<tool_call>{}"
    assert qwen2.special_ids["<tool_call>"] not in qwen2.control_ids


def test_neighbouring_texts_are_one_text() -> None:
    smollm2 = tokenizer("smollm2")
    assert smollm2.encode_parts(["Hel", "", "lo", " wor", "ld"]) == smollm2.encode_text("Hello world")
    assert smollm2.encode_parts(["", 1, ""]) == [1]
    assert smollm2.encode_batch([["a"], [], [1, "b", 2]]) == [
        smollm2.encode_text("a"),
        [],
        [1, *smollm2.encode_text("b"), 2],
    ]
    prompts: list[list[str | int]] = [["Hel", "", "lo", " wor", "ld"], ["", 1, ""], [], [1, "b", "c", 2, 3, "d"]]
    for parts in prompts:
        assert smollm2.encode_alone(parts) == smollm2.encode_parts(parts)


def test_a_character_the_vocabulary_cannot_spell_is_left_out_and_never_ends_the_text() -> None:
    # SmolLM2 has no piece for byte 4, and its files name the end of text as its unknown token.
    smollm2 = tokenizer("smollm2")
    assert smollm2.encode_text("\x04") == []
    assert smollm2.decode(smollm2.encode_text("a\x04 b")) == "a b"


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(name: str) -> None:
    tokens = tokenizer(name)
    for text in ("naïve 漢字 👩🏽‍🚀\n\t x", "\u00ad\u00a0\u0100"):
        assert b"".join(map(tokens.token_bytes, tokens.encode_text(text))).decode() == text
    assert tokens.token_bytes(tokens.special_ids["<|im_end|>"]) == b"<|im_end|>"
    assert tokens.token_bytes(-1) == tokens.token_bytes(tokens.vocab_size) == b""


def test_rows_of_padding_have_no_text() -> None:
    qwen2 = tokenizer("qwen2")
    assert qwen2.vocab_size == 151_936
    assert qwen2.decode([151_700, 9707]) == "Hello"
    assert qwen2.decode(qwen2.encode_text("[PAD151700]")) == "[PAD151700]"


def test_half_a_surrogate_pair_is_the_callers_fault() -> None:
    with pytest.raises(InvalidInput, match="surrogate"):
        tokenizer("smollm2").encode_text("a\ud83d")


def test_the_hash_is_of_what_decides_about_ids() -> None:
    plain = byte_level("gpt-2", merges=["a b"])
    same = Tokenizer(byte_level("gpt-2", merges=["a b"], chat_template="{{ messages }}"))
    assert Tokenizer(plain).hash == same.hash
    others = [byte_level("qwen2", merges=["a b"]), byte_level("gpt-2", merges=["a c"]), byte_level("gpt-2")]
    assert len({Tokenizer(other).hash for other in (plain, *others)}) == 4


def test_a_bare_text_is_framed_as_the_model_expects() -> None:
    framed = Tokenizer(byte_level("gpt-2", bos_id=256, add_bos=True))
    assert framed.frame("a") == [256, "a"]
    assert tokenizer("smollm2").frame("a") == ["a"]


def test_llama_3_takes_digits_by_three_and_a_known_word_whole() -> None:
    # "ab" is a piece that no merge leads to.
    llama3 = Tokenizer(byte_level("llama-bpe", words=["ab"], merges=["1 2", "3 4", "12 34", "12 3"]))
    gpt2 = Tokenizer(byte_level("gpt-2", words=["ab"], merges=["1 2", "3 4", "12 34", "12 3"]))
    assert [llama3.token_bytes(token) for token in llama3.encode_text("1234ab")] == [b"123", b"4", b"ab"]
    assert [gpt2.token_bytes(token) for token in gpt2.encode_text("1234ab")] == [b"1234", b"a", b"b"]


def test_a_control_token_that_is_a_plain_word_is_not_taken_whole_from_text() -> None:
    words = byte_level("llama-bpe", words=["end"])
    tokens = Tokenizer(msgspec.structs.replace(words, kinds=(1,) * 256 + (PieceKind.CONTROL,) * 2))
    assert [tokens.token_bytes(token) for token in tokens.encode_text("end")] == [b"e", b"n", b"d"]


def test_smollm_takes_digits_one_by_one() -> None:
    smollm = Tokenizer(byte_level("smollm", merges=["1 2", "Ġ 1"]))
    assert [smollm.token_bytes(token) for token in smollm.encode_text("12 12")] == [b"1", b"2", b" ", b"1", b"2"]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (byte_level("tekken"), "'tekken'"),
        (Vocabulary(model="rwkv", pieces=("a",), kinds=(1,)), "'rwkv'"),
        (Vocabulary(model="gpt2"), "0 pieces"),
        (Vocabulary(model="gpt2", pieces=("a", "b"), kinds=(1,)), "1 token types"),
        (Vocabulary(model="llama", pieces=("a",), kinds=(1,)), "0 scores"),
        (byte_level("gpt-2", merges=["ab"]), "Merge 0"),
        (byte_level("gpt-2", add_bos=True), "begin-of-text"),
        (Vocabulary(model="gpt2", pieces=("a",), kinds=(1,), merges=("a z",)), "merges"),
    ],
)
def test_a_vocabulary_that_cannot_be_built_exactly_is_refused(broken: Vocabulary, reason: str) -> None:
    with pytest.raises(InvalidModel, match=reason):
        Tokenizer(broken)


def test_sentencepiece_joins_by_score() -> None:
    source = sentencepiece()
    tokens = Tokenizer(source)
    chance = random.Random(7)
    for _ in range(500):
        text = "".join(chance.choices("the sing  eratéa漢😀x", k=chance.randrange(1, 24)))
        assert tokens.encode_text(text) == encode_naively(source, text), text


def test_sentencepiece_puts_a_space_in_front_and_takes_it_off_again() -> None:
    tokens = Tokenizer(sentencepiece())
    assert tokens.encode_parts([1, "the", 2, "the"]) == [1, *tokens.encode_text("the"), 2, *tokens.encode_text("the")]
    assert tokens.token_bytes(tokens.encode_text("the")[0]) == b" the"
    assert tokens.decode(tokens.encode_text("the")) == "the"
    assert tokens.decode(tokens.encode_text("  the")) == "  the"
    bare = Tokenizer(sentencepiece(add_space_prefix=False))
    assert bare.decode(bare.encode_text(" the")) == " the"


@pytest.mark.parametrize("text", ["<s>", "</s>", "<unk>", "<0x41>", "a</s>b", "[INST]"])
def test_sentencepiece_keeps_specials_in_text_as_text(text: str) -> None:
    tokens = Tokenizer(sentencepiece(user_defined=["[INST]"]))
    ids = tokens.encode_text(text)
    assert set(ids).isdisjoint(tokens.special_ids.values())
    assert 3 + 0x41 not in ids or "A" in text
    assert tokens.decode(ids) == text


def test_white_space_that_a_vocabulary_wants_whole_is_text() -> None:
    spaces = Tokenizer(sentencepiece(user_defined=["▁▁▁", "[INST]"]))
    assert spaces.vocab_size - 2 in spaces.encode_text("n   n")
    assert set(spaces.special_ids) == {"<unk>", "<s>", "</s>", "[INST]"}
    plain = byte_level("gpt-2", words=["    "])
    tabs = Tokenizer(msgspec.structs.replace(plain, kinds=(1,) * 256 + (PieceKind.USER_DEFINED, PieceKind.CONTROL)))
    assert tabs.encode_text("a    b") == [*tabs.encode_text("a"), 256, *tabs.encode_text("b")]
    assert set(tabs.special_ids) == {"<|end|>"}
