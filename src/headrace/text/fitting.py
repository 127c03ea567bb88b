"""Encoding with room for so many tokens and no more. Owns how much of a text is looked at before it is refused or cut.

A text that may fit is encoded whole: where it is cut decides its tokens. One that is far too long shows it in its
first slices, and one of which only the end is wanted is encoded from there.
"""

from collections.abc import Sequence

from msgspec import Struct

from headrace.core.errors import ContextLengthExceeded
from headrace.text.tokenizer import Piece, Tokenizer

# What is usual; a text that is shorter by it is encoded at once.
_CHARS_PER_TOKEN = 4
_SLICE_CHARS = 64 << 10
# A prompt that is no longer is encoded at once whatever room there is.
_SMALL_CHARS = _SLICE_CHARS // 8
# Each cut makes a few tokens more of a slice than it is in the whole, never twice as many.
_CERTAINTY = 2
# Tokens before those that are wanted: a cut reaches no further.
_MARGIN_TOKENS = 64


class Room(Struct, frozen=True):
    """A prompt has at most `num_tokens`, after all but the `last` of them were left out."""

    num_tokens: int
    last: int | None = None

    @property
    def is_tail(self) -> bool:
        """What is wanted fits, however long the text is."""
        return self.last is not None and self.last <= self.num_tokens


def encode_within(
    tokenizer: Tokenizer, prompts: Sequence[Sequence[Piece]], rooms: Sequence[Room], *, one_by_one: bool = False
) -> list[list[int]]:
    """Ids of each prompt; ContextLengthExceeded where one has no room."""
    if all(_is_short(parts, room) for parts, room in zip(prompts, rooms, strict=True)):
        encoded = tokenizer.encode_batch(prompts, one_by_one=one_by_one)
        return [_cut(ids, room) for ids, room in zip(encoded, rooms, strict=True)]
    return [_encode(tokenizer, parts, room) for parts, room in zip(prompts, rooms, strict=True)]


def encode_small(tokenizer: Tokenizer, parts: Sequence[Piece], room: Room) -> list[int]:
    """As `encode_within`, of a prompt that is known to be small."""
    return _cut(tokenizer.encode_alone(parts), room)


def _encode(tokenizer: Tokenizer, parts: Sequence[Piece], room: Room) -> list[int]:
    if room.is_tail:
        assert room.last is not None
        return _encode_tail(tokenizer, parts, room.last)
    if not _is_short(parts, room):
        _look(tokenizer, parts, room)
    return _cut(tokenizer.encode_parts(parts), room)


def _encode_tail(tokenizer: Tokenizer, parts: Sequence[Piece], last: int) -> list[int]:
    wanted = last + _MARGIN_TOKENS
    size = wanted * _CHARS_PER_TOKEN
    while True:
        tail = _tail(parts, size)
        ids = tokenizer.encode_parts(tail)
        if len(ids) >= wanted or size >= _size(parts):
            return ids[-last:]
        size *= _CHARS_PER_TOKEN


def _look(tokenizer: Tokenizer, parts: Sequence[Piece], room: Room) -> None:
    found = 0
    for part in parts:
        if isinstance(part, int):
            found += 1
            continue
        for start in range(0, len(part), _SLICE_CHARS):
            found += len(tokenizer.encode_text(part[start : start + _SLICE_CHARS]))
            if found > _CERTAINTY * room.num_tokens:
                raise _too_long(f"more than {room.num_tokens}", room)


def _cut(ids: list[int], room: Room) -> list[int]:
    kept = ids if room.last is None else ids[-room.last :]
    if len(kept) > room.num_tokens:
        raise _too_long(str(len(kept)), room)
    return kept


def _is_short(parts: Sequence[Piece], room: Room) -> bool:
    tokens = room.num_tokens if room.last is None else min(room.last + _MARGIN_TOKENS, room.num_tokens)
    return _size(parts) <= max(_CHARS_PER_TOKEN * tokens, _SMALL_CHARS)


def _size(parts: Sequence[Piece]) -> int:
    return sum([1 if isinstance(part, int) else len(part) for part in parts])


def _tail(parts: Sequence[Piece], size: int) -> list[Piece]:
    tail: list[Piece] = []
    for part in reversed(parts):
        if size <= 0:
            break
        tail.append(part if isinstance(part, int) else part[-size:])
        size -= 1 if isinstance(part, int) else len(part)
    return tail[::-1]


def _too_long(found: str, room: Room) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {found} tokens; there is room for {room.num_tokens} of them", param="prompt"
    )
