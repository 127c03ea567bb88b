"""A prompt that fits has the tokens it always has; one that does not is refused after a look at a part of it."""

import pytest

from headrace.core.errors import ContextLengthExceeded
from headrace.text.fitting import Room, encode_within
from headrace.text.tokenizer import Piece, Tokenizer
from tests.unit.text.real_vocabularies import tokenizer

PROSE = "The channel brings 1,024 litres; the wheel — naïvely — never waits.\n"


class Counted:
    """A tokeniser that counts the characters it was given."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.num_chars = 0

    def encode_batch(self, prompts: list[list[Piece]], *, one_by_one: bool = False) -> list[list[int]]:
        self.num_chars += sum(len(part) for parts in prompts for part in parts if isinstance(part, str))
        return self.inner.encode_batch(prompts, one_by_one=one_by_one)

    def encode_parts(self, parts: list[Piece]) -> list[int]:
        return self.encode_batch([parts])[0]

    def encode_text(self, text: str) -> list[int]:
        return self.encode_parts([text])


def encoded(counted: Counted, parts: list[Piece], room: Room) -> list[int]:
    (ids,) = encode_within(counted, [parts], [room])  # type: ignore[arg-type]
    return ids


@pytest.mark.parametrize("name", ["smollm2", "qwen2"])
@pytest.mark.parametrize("text", [PROSE * 500, " " * 100_000, "x" * 60_000, "水车" * 10_000])
def test_the_longest_prompt_that_fits_is_taken_and_one_token_more_is_not(name: str, text: str) -> None:
    tokens = tokenizer(name)
    parts: list[Piece] = [1, text, 2, "end"]
    whole = tokens.encode_parts(parts)
    assert encode_within(tokens, [parts], [Room(len(whole))]) == [whole]
    with pytest.raises(ContextLengthExceeded):
        encode_within(tokens, [parts], [Room(len(whole) - 1)])


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning() -> None:
    counted = Counted(tokenizer("smollm2"))
    with pytest.raises(ContextLengthExceeded, match="more than 2048"):
        encoded(counted, [PROSE * 20_000], Room(2048))
    assert counted.num_chars < 100_000


@pytest.mark.parametrize("name", ["smollm2", "qwen2"])
@pytest.mark.parametrize("last", [1, 10, 700])
@pytest.mark.parametrize("text", [PROSE * 4000, " " * 100_000 + "ab " * 1000, "wheel" * 40_000])
def test_the_end_of_a_text_is_what_it_is_in_the_whole(name: str, last: int, text: str) -> None:
    counted = Counted(tokenizer(name))
    parts: list[Piece] = [text, 1, "tail "]
    assert encoded(counted, parts, Room(2048, last)) == counted.inner.encode_parts(parts)[-last:]
    assert counted.num_chars < 150_000


def test_an_end_that_is_longer_than_the_room_is_refused_as_a_text_is() -> None:
    counted = Counted(tokenizer("smollm2"))
    with pytest.raises(ContextLengthExceeded):
        encoded(counted, [PROSE * 20_000], Room(2048, 2**31))
    assert counted.num_chars < 100_000
    assert encoded(counted, ["one two"], Room(2048, 2**31)) == counted.inner.encode_text("one two")
