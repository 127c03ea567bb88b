"""A tokenizer.json gives the same tokeniser as a GGUF of the same model, and nothing it asks for gets past the rules."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from headrace.core.errors import InvalidModel
from headrace.text.tokenizer import Tokenizer
from headrace.weights.vocabulary import Vocabulary
from tests.unit.text.real_vocabularies import library_tokenizer, tokenizer
from tests.unit.text.small_vocabularies import ALPHABET, sentencepiece


def load(library: tokenizers.Tokenizer | dict[str, Any], **more: Any) -> Tokenizer:
    text = json.dumps(library) if isinstance(library, dict) else library.to_str()
    return Tokenizer(Vocabulary(tokenizer_json=text.encode(), **more))


def byte_level(added: list[AddedToken], **options: Any) -> tokenizers.Tokenizer:
    ids = {piece: token for token, piece in enumerate(ALPHABET)}
    library = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[], **options))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens(added)
    return library


def words(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([piece for piece in vocab if piece.startswith("[")])
    return library


def test_smollm2_from_either_file_is_the_same() -> None:
    from_file, from_gguf = load(library_tokenizer("smollm2")), tokenizer("smollm2")
    text = "It's 2024: <|im_end|> 👩🏽‍🚀\x04 ok"
    assert from_file.encode_text(text) == from_gguf.encode_text(text)
    assert from_file.special_ids == from_gguf.special_ids
    assert from_file.control_ids == from_gguf.control_ids
    assert from_file.table.shown == from_gguf.table.shown


def test_added_tokens_of_either_kind_stay_text() -> None:
    tokens = load(byte_level([AddedToken("<|end|>", special=True), AddedToken("<｜tool｜>", special=False)]))
    assert tokens.special_ids == {"<|end|>": 256, "<｜tool｜>": 257}
    ids = tokens.encode_text("<|end|><｜tool｜>")
    assert max(ids) < 256 and tokens.decode(ids) == "<|end|><｜tool｜>"
    assert tokens.decode([257, 256]) == "<｜tool｜>"


def test_runs_of_white_space_keep_their_tokens() -> None:
    tokens = load(byte_level([AddedToken("<|end|>", special=True), AddedToken("    ", special=False)]))
    assert tokens.encode_text("a    b") == [*tokens.encode_text("a"), 257, *tokens.encode_text("b")]
    assert tokens.decode([257]) == "    "


def test_a_special_token_that_merges_could_spell_is_not_spelt() -> None:
    raw = json.loads(byte_level([]).to_str())
    raw["model"]["vocab"] |= {"<s": 256, "<s>": 257}
    raw["model"]["merges"] = [["<", "s"], ["<s", ">"]]
    raw["model"]["ignore_merges"] = True
    raw["pre_tokenizer"]["use_regex"] = False  # else the text is cut before the model sees it
    raw["added_tokens"] = [
        {"id": 257, "content": "<s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
    ]
    tokens = load(raw)
    assert tokens.encode_text("<s>") == [256, *tokens.encode_text(">")]


def test_an_unknown_byte_does_not_become_the_end_of_text() -> None:
    raw = json.loads(byte_level([AddedToken("<|end|>", special=True)]).to_str())
    raw["model"]["vocab"].pop("b")
    raw["model"]["vocab"]["<|end|>"] = 256
    raw["model"]["unk_token"] = "<|end|>"
    tokens = load(raw)
    assert tokens.encode_text("abc") == tokens.encode_text("ac")


def test_a_vocabulary_that_lets_text_become_a_special_token_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"\[SEP\]"):
        load(words({"[UNK]": 0, "[SEP]": 1, "a": 2}))


def test_word_pieces_encode_between_their_frame_and_cannot_stream() -> None:
    library = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "to": 3, "##ken": 4}))
    library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    library.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    library.enable_padding(length=128)
    library.enable_truncation(2)
    tokens = load(library)
    assert tokens.encode_parts(tokens.frame("Token token zzz [SEP]")) == [1, 3, 4, 3, 4, 0, 0, 0, 0, 2]
    assert tokens.decode([1, 3, 4, 2]) == "token"
    assert not tokens.can_stream


def test_a_begin_of_text_comes_from_the_files_own_template() -> None:
    library = byte_level([AddedToken("<|begin|>", special=True)])
    library.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 256)]),
        ]
    )
    assert load(library).frame("a") == [256, "a"]
    assert load(byte_level([]), bos_id=0, add_bos=True).frame("a") == [0, "a"]


def test_only_the_first_text_of_a_prompt_gets_a_space_where_the_file_says_first() -> None:
    library = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "▁a": 2, "<s>": 3}, merges=[("▁", "a")]))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.add_special_tokens(["<s>"])
    tokens = load(library)
    assert tokens.encode_parts(["a", 3, "a"]) == library.encode("a<s>a").ids == [2, 3, 1]
    assert tokens.encode_parts([3, "a"]) == library.encode("<s>a").ids == [3, 1]
    assert tokens.encode_alone(["a", 3, "a"]) == [2, 3, 1] and tokens.encode_alone([3, "a"]) == [3, 1]


def test_a_llama_2_file_is_the_same_as_its_gguf() -> None:
    source = sentencepiece()
    ids = {piece: token for token, piece in enumerate(source.pieces)}
    joint = [("t", "h"), ("h", "e"), ("▁", "t"), ("▁t", "he")]
    library = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=joint, byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokens, from_gguf = load(library), Tokenizer(source)
    assert tokens.encode_parts([1, "the 😀</s>", 2]) == [
        1,
        *library.encode("the 😀").ids,
        *tokens.encode_text("</s>")[1:],
        2,
    ]
    assert tokens.decode(tokens.encode_text("the 😀</s>")) == "the 😀</s>"
    assert tokens.table.shown == from_gguf.table.shown
    assert tokens.table.strips_space and tokens.table.byte_ids == from_gguf.table.byte_ids


def test_unigram_specials_are_not_matched_by_text() -> None:
    vocab = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in "</s>a▁")]
    library = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    library.add_special_tokens(["</s>", "<unk>"])
    tokens = load(library)
    assert tokens.encode_text("a</s>") == [6, 2, 3, 4, 5]


GOOD = json.loads(byte_level([]).to_str())


@pytest.mark.parametrize(
    "broken",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        json.dumps(GOOD | {"model": None}).encode(),
        json.dumps(GOOD | {"model": {"type": "BPE", "vocab": {"a": 4_000_000_000}, "merges": []}}).encode(),
        json.dumps(GOOD | {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}).encode(),
        json.dumps(GOOD | {"model": {"type": "BPE", "vocab": {}, "merges": []}}).encode(),
        json.dumps(GOOD | {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}}).encode(),
        json.dumps(GOOD | {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["ab"]}}).encode(),
        json.dumps(GOOD | {"model": {"type": "Magic", "vocab": {"a": 0}}}).encode(),
        json.dumps(GOOD | {"added_tokens": [{"id": "x", "content": "a"}]}).encode(),
        json.dumps(GOOD | {"added_tokens": [{"id": 1 << 40, "content": "a"}]}).encode(),
        json.dumps(GOOD | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}}}).encode(),
        json.dumps(
            GOOD
            | {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}]}}
            | {"special_tokens": {}}
        ).encode(),
    ],
)
def test_a_broken_file_is_one_clear_error(broken: bytes) -> None:
    with pytest.raises(InvalidModel, match=r"tokenizer\.json"):
        Tokenizer(Vocabulary(tokenizer_json=broken))
