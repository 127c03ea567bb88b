"""What each id of a vocabulary means in bytes, and which ids never show in text.

Owns the rules that turn written pieces into bytes: GPT-2's alphabet of printable bytes, and
SentencePiece's `▁` and `<0xNN>`. Knows neither how text is split into ids nor any stream.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property

SPACE = "▁"
# A vocabulary is a table in memory: an id far outside any real one is an attack or a broken file.
MAX_IDS = 1 << 21


class Spelling(Enum):
    """How a vocabulary writes bytes as pieces."""

    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "sentencepiece"
    # Word pieces and others: encoded for embedding models, never streamed.
    OPAQUE = "opaque"


class TokenTable:
    """Bytes of every id below `size`; an id without a piece has none.

    `control_ids` are left out of decoded text. `byte_ids` are SentencePiece's single bytes, which may
    be parts of a character; its other pieces are whole characters. `strips_space`: the first
    character of a decoded text, if a space, is the one that encoding put there.
    """

    def __init__(
        self,
        pieces: Mapping[int, str],
        *,
        size: int,
        spelling: Spelling,
        control_ids: Iterable[int] = (),
        strips_space: bool = False,
    ) -> None:
        self.size = size
        self.spelling = spelling
        self.control_ids = frozenset(control_ids)
        self.strips_space = strips_space
        to_bytes = _RULES[spelling]
        self.bytes_of: list[bytes] = [b""] * size
        for token, piece in pieces.items():
            self.bytes_of[token] = to_bytes(piece)
        single_bytes = pieces.items() if spelling is Spelling.SENTENCEPIECE else ()
        self.byte_ids = frozenset(token for token, piece in single_bytes if _fallback_byte(piece) is not None)
        # What a stream adds per id: nothing for control ids.
        self.shown = [b"" if token in self.control_ids else data for token, data in enumerate(self.bytes_of)]

    @cached_property
    def whole(self) -> list[str | None]:
        """What a stream adds per id where that is whole characters, else None; made when the first stream needs it."""
        return [_characters(data) for data in self.shown]


def _characters(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class _ByteAlphabet(dict[int, int]):
    """GPT-2's 256 printable characters; any other maps to one that latin-1 does not have."""

    def __missing__(self, key: int) -> int:
        return 0xFFFF


def _byte_alphabet() -> _ByteAlphabet:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = _ByteAlphabet({byte: byte for byte in printable})
    for offset, byte in enumerate(sorted(set(range(256)) - printable)):
        alphabet[256 + offset] = byte
    return alphabet


_ALPHABET = _byte_alphabet()


def _from_byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # an added token, which is written as itself
        return piece.encode("utf-8", "replace")


def _from_sentencepiece(piece: str) -> bytes:
    byte = _fallback_byte(piece)
    return piece.replace(SPACE, " ").encode("utf-8", "replace") if byte is None else bytes([byte])


def _fallback_byte(piece: str) -> int | None:
    if len(piece) != 6 or not piece.startswith("<0x") or piece[5] != ">":
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _as_written(piece: str) -> bytes:
    return piece.encode("utf-8", "replace")


_RULES: dict[Spelling, Callable[[str], bytes]] = {
    Spelling.BYTE_LEVEL: _from_byte_level,
    Spelling.SENTENCEPIECE: _from_sentencepiece,
    Spelling.OPAQUE: _as_written,
}
