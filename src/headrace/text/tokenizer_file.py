"""Tokenisers from a Hugging Face `tokenizer.json`. Owns what is read from it and what is taken out.

The file is edited before the library sees it: special tokens, padding, truncation and framing are
removed, so that what is built can encode text and nothing else.
"""

from typing import Any

import msgspec
import tokenizers
from msgspec import Struct

from headrace.core.errors import InvalidModel
from headrace.text.recipe import Recipe
from headrace.text.tokens import MAX_IDS, SPACE, Spelling, TokenTable
from headrace.weights.vocabulary import Vocabulary


class _Added(Struct, frozen=True):
    id: int
    content: str
    special: bool = False

    @property
    def is_text(self) -> bool:
        """White space that a vocabulary wants whole is ordinary text; every other added token is not."""
        return not self.special and not self.content.replace(SPACE, " ").strip()


class _Model(Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]]
    type: str = "BPE"
    unk_token: str | None = None
    unk_id: int | None = None
    merges: list[str | tuple[str, str]] = []


class _File(Struct, frozen=True):
    model: _Model
    added_tokens: list[_Added] = []
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def build_from_file(vocabulary: Vocabulary) -> Recipe:
    """The recipe of a tokenizer.json; InvalidModel where the file is not one."""
    try:
        raw = msgspec.json.decode(vocabulary.tokenizer_json)
        file = msgspec.convert(raw, _File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidModel(f"tokenizer.json cannot be read: {error}.") from error
    pieces = _pieces(file)
    spelling, strips_space = _spelling(file.decoder)
    special_ids = {added.content: added.id for added in file.added_tokens if not added.is_text}
    table = TokenTable(
        pieces,
        size=max(pieces) + 1,
        spelling=spelling,
        control_ids=[added.id for added in file.added_tokens if added.special],
        strips_space=strips_space,
    )
    _take_out_specials(raw, file, spelling)
    opening = _load(raw)
    following = _load(raw) if _unmark_start(raw["pre_tokenizer"]) else opening
    before, after = _frame(file.post_processor)
    if not before and not after and vocabulary.add_bos and vocabulary.bos_id is not None:
        before = (vocabulary.bos_id,)
    if any(token >= table.size for token in (*before, *after)):
        raise InvalidModel("tokenizer.json frames texts with ids that it does not have.")
    return Recipe(
        opening=opening,
        following=following,
        table=table,
        special_ids=special_ids,
        unknown_id=None if file.model.type == "BPE" else _unknown_id(file.model),
        before=before,
        after=after,
    )


def _pieces(file: _File) -> dict[int, str]:
    vocab = file.model.vocab
    if isinstance(vocab, dict):
        pieces = {token: piece for piece, token in vocab.items()}
    else:
        pieces = {token: piece for token, (piece, _) in enumerate(vocab)}
    pieces.update((added.id, added.content) for added in file.added_tokens)
    if not pieces or min(pieces) < 0 or max(pieces) >= MAX_IDS:
        raise InvalidModel(f"tokenizer.json has no pieces, or ids outside 0 to {MAX_IDS - 1}.")
    if any(not added.content for added in file.added_tokens):
        raise InvalidModel("tokenizer.json has an added token without text.")
    return pieces


def _unknown_id(model: _Model) -> int | None:
    if isinstance(model.vocab, dict) and model.unk_token is not None:
        return model.vocab.get(model.unk_token)
    return model.unk_id


def _take_out_specials(raw: dict[str, Any], file: _File, spelling: Spelling) -> None:
    raw["truncation"] = raw["padding"] = raw["post_processor"] = None
    raw["normalizer"] = raw.get("normalizer")
    raw["pre_tokenizer"] = raw.get("pre_tokenizer")
    kept = [added for added in file.added_tokens if added.is_text and file.model.type == "BPE"]
    removed = {added.content for added in file.added_tokens if added not in kept}
    numbers = {added.id for added in kept}
    raw["added_tokens"] = [entry for entry in raw.get("added_tokens", ()) if entry["id"] in numbers]
    model = raw["model"]
    if file.model.type == "BPE":
        unknown = file.model.unk_token
        if spelling is Spelling.BYTE_LEVEL or unknown not in file.model.vocab:
            # A byte that the vocabulary lacks is left out: files name the end of text as their unknown token.
            unknown = model["unk_token"] = None
        removed.discard(unknown or "")
        vocab = {piece: token for piece, token in model["vocab"].items() if piece not in removed}
        # The library numbers an added token by the model's vocabulary, if that has it.
        model["vocab"] = vocab | {added.content: added.id for added in kept}
        model["merges"] = [pair for pair in model.get("merges", ()) if _avoids(pair, removed)]
    elif file.model.type == "Unigram":
        # Ids are positions, so a special piece cannot go; a piece with a space in it matches no text.
        unknown_id = _unknown_id(file.model)
        model["vocab"] = [
            [f"{piece} {token}", score] if piece in removed and token != unknown_id else [piece, score]
            for token, (piece, score) in enumerate(model["vocab"])
        ]


def _avoids(pair: Any, removed: set[str]) -> bool:
    left, right = pair.split(" ", 1) if isinstance(pair, str) and " " in pair else pair
    return left not in removed and right not in removed and left + right not in removed


def _load(raw: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(raw))
    except Exception as error:  # the library raises nothing narrower for a bad file
        raise InvalidModel(f"tokenizer.json cannot be used: {error}.") from error


def _unmark_start(part: Any) -> bool:
    """Stop a pre-tokeniser from treating text behind a special token as the start of a text. True if one did."""
    match part:
        case {"type": "Metaspace", "prepend_scheme": "first"}:
            part["prepend_scheme"] = "never"
            return True
        case {"pretokenizers": [*inner]}:
            return sum(map(_unmark_start, inner)) > 0
    return False


def _spelling(decoder: dict[str, Any] | None) -> tuple[Spelling, bool]:
    """How the file's decoder reads pieces, and whether it takes one space off the front."""
    steps = list(_steps(decoder))
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return Spelling.BYTE_LEVEL, False
    strips = [step for step in steps if step.get("type") == "Strip"]
    from_space = any(step.get("pattern") == {"String": SPACE} and step.get("content") == " " for step in steps)
    strips_one = [(step.get("content"), step.get("start"), step.get("stop")) for step in strips] in ([], [(" ", 1, 0)])
    if from_space and strips_one and set(names) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return Spelling.SENTENCEPIECE, bool(strips)
    return Spelling.OPAQUE, False


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    inner = decoder.get("decoders")
    if not isinstance(inner, list):
        return [decoder]
    return [step for item in inner if isinstance(item, dict) for step in _steps(item)]


def _frame(processor: dict[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a post-processor puts before and after a single text."""
    match processor:
        case {"type": "Sequence", "processors": [*inner]}:
            frames = [_frame(item) for item in inner if isinstance(item, dict)]
            return next((frame for frame in frames if frame != ((), ())), ((), ()))
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [str(), int(cls)], "sep": [str(), int(sep)]}:
            return (cls,), (sep,)
        case {"type": "TemplateProcessing", "single": [*parts], "special_tokens": {**ids}}:
            return _template_frame(parts, ids)
    return (), ()


def _template_frame(parts: list[Any], ids: dict[Any, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sides: tuple[list[int], list[int]] = ([], [])
    seen_text = False
    for part in parts:
        match part:
            case {"Sequence": _}:
                seen_text = True
            case {"SpecialToken": {"id": name}}:
                match ids.get(name):
                    case {"ids": [*numbers]} if all(isinstance(number, int) and number >= 0 for number in numbers):
                        sides[seen_text].extend(numbers)
                    case _:
                        raise InvalidModel(f"tokenizer.json frames texts with {name!r} and does not say its id.")
    return tuple(sides[0]), tuple(sides[1])
