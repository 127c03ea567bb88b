"""Vocabularies small enough to read: a SentencePiece one with its naive encoder, and a byte-level one."""

from collections.abc import Iterable
from itertools import pairwise

from headrace.weights.vocabulary import PieceKind, Vocabulary

WORDS = ("▁t", "he", "▁the", "in", "ing", "▁s", "▁si", "ng", "▁sing", "er", "th", "▁th", "▁a", "at", "▁at", "▁▁", "éa")
LETTERS = ("▁", *"abcdefghinorst", "é", "漢", "<", ">", "/", "s")


def sentencepiece(*, add_space_prefix: bool = True, user_defined: Iterable[str] = ()) -> Vocabulary:
    """Laid out as Llama 2's: unknown, begin, end, 256 bytes, then pieces, here with scores in no order."""
    controls = ("<unk>", "<s>", "</s>")
    kinds = [PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.CONTROL] + [PieceKind.BYTE] * 256
    byte_pieces = tuple(f"<0x{byte:02X}>" for byte in range(256))
    ordinary = (*WORDS, *dict.fromkeys(LETTERS))
    added = tuple(user_defined)
    kinds += [PieceKind.NORMAL] * len(ordinary) + [PieceKind.USER_DEFINED] * len(added)
    scores = (
        (0.0,) * 259 + tuple(-float(rank * 11 % len(ordinary)) for rank in range(len(ordinary))) + (0.0,) * len(added)
    )
    return Vocabulary(
        model="llama",
        pieces=(*controls, *byte_pieces, *ordinary, *added),
        kinds=tuple(map(int, kinds)),
        scores=scores,
        add_space_prefix=add_space_prefix,
        bos_id=1,
        eos_id=2,
        add_bos=True,
    )


def encode_naively(vocabulary: Vocabulary, text: str) -> list[int]:
    """SentencePiece by its definition: join the best-scoring neighbours until none can be joined."""
    normal = {
        piece: (vocabulary.scores[token], token)
        for token, piece in enumerate(vocabulary.pieces)
        if vocabulary.kinds[token] == PieceKind.NORMAL
    }
    symbols = list(("▁" * vocabulary.add_space_prefix + text).replace(" ", "▁"))
    while True:
        joint = [(normal[a + b][0], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in normal]
        if not joint:
            break
        at = -max(joint)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        token
        for symbol in symbols
        for token in ([normal[symbol][1]] if symbol in normal else [3 + byte for byte in symbol.encode()])
    ]


def byte_level(pre: str, *, words: Iterable[str] = (), merges: Iterable[str] = (), **more: object) -> Vocabulary:
    """256 bytes in the order of GPT-2's alphabet, `words`, what `merges` join, and one control token."""
    merged = tuple(merges)
    pieces = (*ALPHABET, *words, *(merge.replace(" ", "") for merge in merged), "<|end|>")
    kinds = (int(PieceKind.NORMAL),) * (len(pieces) - 1) + (int(PieceKind.CONTROL),)
    fields = {"model": "gpt2", "pre": pre, "pieces": pieces, "kinds": kinds, "merges": merged} | more
    return Vocabulary(**fields)  # type: ignore[arg-type]


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
ALPHABET = (*map(chr, _PRINTABLE), *(chr(256 + number) for number in range(256 - len(_PRINTABLE))))
