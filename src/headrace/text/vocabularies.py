"""Tokenisers from the vocabulary of a GGUF file. Owns the split rules that its `pre` names stand for.

A GGUF names its pre-tokeniser instead of describing it, so a name that is not known here is refused:
a wrong split still encodes, only into ids the model was never trained on.
"""

from collections.abc import Callable

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from headrace.core.errors import InvalidModel
from headrace.text.recipe import Recipe
from headrace.text.tokens import MAX_IDS, SPACE, Spelling, TokenTable
from headrace.weights.vocabulary import PieceKind, Vocabulary

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_DIGITS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_AFTER_DIGITS}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_AFTER_DIGITS}"


def build_from_vocabulary(vocabulary: Vocabulary) -> Recipe:
    """The recipe of a GGUF vocabulary; InvalidModel where it is not one that can be built exactly."""
    _check(vocabulary)
    builder = _BUILDERS.get(vocabulary.model)
    if builder is None:
        raise InvalidModel(f"The tokeniser model {vocabulary.model!r} is not supported: gpt2 and llama are.")
    return builder(vocabulary)


def _check(vocabulary: Vocabulary) -> None:
    count = len(vocabulary.pieces)
    if not 0 < count <= MAX_IDS:
        raise InvalidModel(f"The vocabulary has {count} pieces; 1 to {MAX_IDS} are possible.")
    if len(vocabulary.kinds) != count:
        raise InvalidModel(f"The vocabulary has {count} pieces but {len(vocabulary.kinds)} token types.")
    if vocabulary.add_bos and not 0 <= (-1 if vocabulary.bos_id is None else vocabulary.bos_id) < count:
        raise InvalidModel("The vocabulary wants a begin-of-text token and does not say which.")


def _byte_level(vocabulary: Vocabulary) -> Recipe:
    encoder = tokenizers.Tokenizer(_byte_level_model(vocabulary))
    configure = _PRE_TOKENIZERS.get(vocabulary.pre)
    if configure is None:
        known = ", ".join(sorted(name for name in _PRE_TOKENIZERS if name))
        raise InvalidModel(f"The pre-tokeniser {vocabulary.pre!r} is not supported: {known} are.")
    configure(encoder)
    encoder.decoder = decoders.ByteLevel()
    return _recipe(vocabulary, encoder, Spelling.BYTE_LEVEL)


def _byte_level_model(vocabulary: Vocabulary) -> models.BPE:
    merges = []
    for number, merge in enumerate(vocabulary.merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise InvalidModel(f"Merge {number} of the vocabulary is not two pieces with a space between.")
        merges.append((left, right))
    # Without an unknown token a byte that the vocabulary lacks is left out. Files name the end of text
    # as their unknown token, and no text may become that.
    return _bpe(vocabulary, merges, ignore_merges=vocabulary.pre in _IGNORES_MERGES)


def _sentencepiece(vocabulary: Vocabulary) -> Recipe:
    count = len(vocabulary.pieces)
    if len(vocabulary.scores) != count:
        raise InvalidModel(f"The vocabulary has {count} pieces but {len(vocabulary.scores)} scores.")
    unknown = next(
        (p for p, k in zip(vocabulary.pieces, vocabulary.kinds, strict=True) if k == PieceKind.UNKNOWN), None
    )
    model = _bpe(vocabulary, _merges_by_score(vocabulary), byte_fallback=True, fuse_unk=True, unk_token=unknown)
    encoder = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    prefixed = vocabulary.add_space_prefix
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    return _recipe(vocabulary, encoder, Spelling.SENTENCEPIECE, strips_space=prefixed)


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose joint piece scores best: so every way to split a piece
    is a merge, ranked by the piece's score."""
    score_of = {
        piece: score
        for piece, kind, score in zip(vocabulary.pieces, vocabulary.kinds, vocabulary.scores, strict=True)
        if kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED)
    }
    ranked = []
    for order, (piece, score) in enumerate(score_of.items()):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in score_of and right in score_of:
                ranked.append((-score, order, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: object) -> models.BPE:
    """A model in which control pieces do not exist, so that no text becomes one."""
    ids: dict[str, int] = {}
    for token, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.kinds, strict=True)):
        if kind in (PieceKind.NORMAL, PieceKind.BYTE, PieceKind.UNKNOWN) or _is_text(piece, kind):
            ids.setdefault(piece, token)
    if any(kind == PieceKind.USER_DEFINED for kind in vocabulary.kinds):
        # A user-defined piece that merges could spell would come out of ordinary text.
        merges = [pair for pair in merges if pair[0] in ids and pair[1] in ids and "".join(pair) in ids]
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library raises nothing narrower for bad merges
        raise InvalidModel(f"The vocabulary's merges cannot be used: {error}.") from error


def _is_text(piece: str, kind: int) -> bool:
    """White space that a vocabulary wants whole is ordinary text; every other added token is not."""
    return kind == PieceKind.USER_DEFINED and not piece.replace(SPACE, " ").strip()


def _recipe(
    vocabulary: Vocabulary, encoder: tokenizers.Tokenizer, spelling: Spelling, *, strips_space: bool = False
) -> Recipe:
    kinds = dict(enumerate(vocabulary.kinds))
    pieces = dict(enumerate(vocabulary.pieces))
    if spelling is Spelling.BYTE_LEVEL:  # SentencePiece reaches its white space by merges
        whole = [piece for token, piece in pieces.items() if _is_text(piece, kinds[token])]
        encoder.add_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in whole])
    hidden = {token for token, kind in kinds.items() if kind in (PieceKind.CONTROL, PieceKind.UNKNOWN)}
    special = {
        piece: token
        for token, piece in pieces.items()
        if token in hidden or (kinds[token] == PieceKind.USER_DEFINED and not _is_text(piece, kinds[token]))
    }
    used = {token: piece for token, piece in pieces.items() if kinds[token] != PieceKind.UNUSED}
    table = TokenTable(used, size=len(pieces), spelling=spelling, control_ids=hidden, strips_space=strips_space)
    before = (vocabulary.bos_id,) if vocabulary.add_bos and vocabulary.bos_id is not None else ()
    return Recipe(opening=encoder, following=encoder, table=table, special_ids=special, before=before)


def _split_digits(encoder: tokenizers.Tokenizer) -> None:
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _split_as_gpt2(encoder: tokenizers.Tokenizer) -> None:
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split_as_qwen2(encoder: tokenizers.Tokenizer) -> None:
    encoder.normalizer = normalizers.NFC()
    encoder.pre_tokenizer = _split_at(_QWEN2)


def _split_as_llama3(encoder: tokenizers.Tokenizer) -> None:
    encoder.pre_tokenizer = _split_at(_LLAMA3)


def _split_at(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[tokenizers.Tokenizer], None]] = {
    "": _split_as_gpt2,
    "default": _split_as_gpt2,
    "gpt-2": _split_as_gpt2,
    "smollm": _split_digits,
    "qwen2": _split_as_qwen2,
    "llama-bpe": _split_as_llama3,
    "llama3": _split_as_llama3,
    "llama-v3": _split_as_llama3,
}
# Llama 3 takes a word that is a piece as that piece, whatever its merges would give.
_IGNORES_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3"})

_BUILDERS: dict[str, Callable[[Vocabulary], Recipe]] = {"gpt2": _byte_level, "llama": _sentencepiece}
