"""Deltas of any stream together are the full decode: real vocabularies against the library, over hard text."""

import random
from collections.abc import Callable
from functools import cache

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import decoders, models

from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer
from tests.unit.text.real_vocabularies import NAMES, library_tokenizer, tokenizer
from tests.unit.text.small_vocabularies import sentencepiece

NUM_STRINGS = 10_000
ZWJ, SKIN, PRESENTATION = "\u200d", "\U0001f3fd", "\ufe0f"
PARTS: tuple[Callable[[random.Random], str], ...] = (
    lambda chance: chance.choice(("the ", " Paris", "\n\n", "  ", "don't", "2024", "<|im_end|>", "<tool_call>", "▁")),
    lambda chance: chr(chance.randrange(0x20, 0x7F)),
    lambda chance: chr(chance.randrange(0x1F300, 0x1FAF0)),
    lambda chance: ZWJ.join(chance.choices(("👩", "👨", "🏳" + PRESENTATION, "🌈", "🚀", "💻" + SKIN), k=3)),
    lambda chance: chr(chance.randrange(0x4E00, 0x9FFF)),
    lambda chance: chr(chance.randrange(0x20000, 0x2A6DF)),
    lambda chance: "e" + "".join(chr(chance.randrange(0x300, 0x36F)) for _ in range(3)),
    lambda chance: chr(chance.choice((0x0E01, 0x0915, 0xAC00, 0x0645, 0x10FFFF, 0xE000, 0x85, 0xAD, 0x2028, 0xFFFD))),
    lambda chance: chr(chance.randrange(0x20)),
)


def strings(seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choice(PARTS)(chance) for _ in range(chance.randrange(1, 9))) for _ in range(NUM_STRINGS)]


def stream(tokens: Tokenizer, ids: list[int], chance: random.Random) -> str:
    """Deltas, each checked to be whole characters that stay: together they are what was shown."""
    detokenizer = Detokenizer(tokens.table)
    shown, start = "", 0
    while start < len(ids):
        end = start + chance.choice((1, 1, 1, 2, 5))
        shown += detokenizer.push(ids[start:end])
        start = end
    return shown + detokenizer.finish()


@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_strings_come_back_as_the_library_decodes_them(name: str) -> None:
    tokens, library = tokenizer(name), library_tokenizer(name)
    chance = random.Random(1)
    batch = tokens.encode_batch([[text] for text in strings(seed=20)])
    expected = library.decode_batch(batch)
    assert [stream(tokens, ids, chance) for ids in batch] == expected
    assert sum("\ufffd" not in text for text in expected) > NUM_STRINGS // 2


@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_strings_cut_anywhere_come_back_as_the_library_decodes_them(name: str) -> None:
    tokens, library = tokenizer(name), library_tokenizer(name)
    chance = random.Random(2)
    batch = tokens.encode_batch([[text] for text in strings(seed=21)])
    # Cuts and shuffles leave half characters anywhere.
    cut = [chance.sample(ids, len(ids)) if chance.random() < 0.5 else ids[chance.randrange(1, 4) : -1] for ids in batch]
    expected = library.decode_batch(cut)
    assert [stream(tokens, ids, chance) for ids in cut] == expected
    assert sum("\ufffd" in text for text in expected) > NUM_STRINGS // 10


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(data=st.data())
def test_any_ids_in_any_deltas_are_the_full_decode(name: str, data: st.DataObject) -> None:
    tokens = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tokens.vocab_size + 10), max_size=30))
    seed = data.draw(st.integers(0, 99))
    assert stream(tokens, ids, random.Random(seed)) == library_tokenizer(name).decode(ids)


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    return Tokenizer(sentencepiece())


def sentencepiece_library() -> tokenizers.Tokenizer:
    """Only to decode: pieces without merges, with Llama 2's decoder."""
    source = sentencepiece()
    library = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(source.pieces)}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def test_ten_thousand_strings_by_sentencepiece_with_bytes_come_back_as_the_library_decodes_them() -> None:
    tokens = sentencepiece_tokenizer()
    chance = random.Random(3)
    texts = strings(seed=22)
    batch = tokens.encode_batch([[text] for text in texts])
    expected = sentencepiece_library().decode_batch(batch)
    assert [stream(tokens, ids, chance) for ids in batch] == expected
    # The vocabulary has every byte, so that nothing is lost; only its own sign for a space is ambiguous.
    assert expected == [text.replace("▁", " ") for text in texts]


@settings(max_examples=200)
@given(ids=st.lists(st.integers(3, 290), max_size=20), seed=st.integers(0, 99))
def test_any_sentencepiece_ids_in_any_deltas_are_the_full_decode(ids: list[int], seed: int) -> None:
    tokens = sentencepiece_tokenizer()
    text = stream(tokens, ids, random.Random(seed))
    assert text == tokens.decode(ids) == decode_naively(tokens, ids)


def decode_naively(tokens: Tokenizer, ids: list[int]) -> str:
    """SentencePiece's rule on the whole: in each run of bytes take characters, and a mark for what begins none."""
    runs: list[bytes | str] = [b""]
    for token in ids:
        data = tokens.token_bytes(token)
        if not 3 <= token < 259:
            runs += [data.decode(), b""]
        else:
            last = runs.pop()
            assert isinstance(last, bytes)
            runs.append(last + data)
    text = "".join(run if isinstance(run, str) else _take_characters(run) for run in runs)
    return text.removeprefix(" ")


def _take_characters(run: bytes) -> str:
    text = ""
    while run:
        for width in (1, 2, 3, 4):
            try:
                text, run = text + run[:width].decode(), run[width:]
                break
            except UnicodeDecodeError:
                continue
        else:
            text, run = text + "\ufffd", run[1:]
    return text
