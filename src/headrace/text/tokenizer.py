"""Text to ids and ids to text, for one vocabulary. Owns the rule that no text becomes a special token.

A rendered prompt is a list of pieces: `str` is text, encoded with specials off, so that a user who
writes `<|im_end|>` gets the characters; `int` is the id of a special token that a template wrote.
Calls here block and are safe from many threads; `TokenizerPool` keeps them off a loop.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any

import msgspec
import tokenizers

from headrace.core.errors import InvalidInput, InvalidModel
from headrace.text.detokenizer import Detokenizer
from headrace.text.recipe import Recipe
from headrace.text.tokenizer_file import build_from_file
from headrace.text.tokens import Spelling, TokenTable
from headrace.text.vocabularies import build_from_vocabulary
from headrace.weights.vocabulary import Vocabulary

Piece = str | int


class Tokenizer:
    """`special_ids` maps every token that only a template may write to its id: control tokens, which decoding
    leaves out (`control_ids`), and those a model's maker defined, like `<tool_call>`, which decoding shows."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """InvalidModel if the vocabulary cannot be built, or would let text become a special token."""
        recipe = build_from_file(vocabulary) if vocabulary.tokenizer_json else build_from_vocabulary(vocabulary)
        self._opening = recipe.opening
        self._following = recipe.following
        self.table: TokenTable = recipe.table
        self.special_ids: dict[str, int] = recipe.special_ids
        self.before, self.after = recipe.before, recipe.after
        self.hash = _digest(vocabulary)
        self._prove_specials_off(recipe)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. A model may have more rows of logits; those ids mean nothing."""
        return self.table.size

    @property
    def control_ids(self) -> frozenset[int]:
        return self.table.control_ids

    @property
    def can_stream(self) -> bool:
        """Whether ids can be turned back into text one by one; vocabularies of word pieces cannot."""
        return self.table.spelling is not Spelling.OPAQUE

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of an id, control tokens as they are written; none for an id without a piece."""
        return self.table.bytes_of[token] if 0 <= token < self.table.size else b""

    def frame(self, text: str) -> list[Piece]:
        """A bare text as the model expects it: with its begin-of-text, or between its `[CLS]` and `[SEP]`."""
        return [*self.before, text, *self.after]

    def encode_text(self, text: str) -> list[int]:
        return self.encode_parts([text])

    def encode_behind(self, text: str) -> list[int]:
        """Ids of a text that follows a special token."""
        return _encode(self._following, [text])[0]

    def encode_parts(self, parts: Sequence[Piece]) -> list[int]:
        return self.encode_batch([parts])[0]

    def encode_batch(self, prompts: Sequence[Sequence[Piece]], *, one_by_one: bool = False) -> list[list[int]]:
        """Ids of each prompt. The interpreter is free meanwhile. `one_by_one` takes no more than one of the
        library's own threads, so that a large prompt leaves some to others."""
        if one_by_one:
            return [self.encode_alone(parts) for parts in prompts]
        jobs = [_join_texts(parts) for parts in prompts]
        first = [part for parts in jobs for part in parts[:1] if isinstance(part, str)]
        rest = [part for parts in jobs for part in parts[1:] if isinstance(part, str)]
        first_ids = iter(_encode(self._opening, first))
        rest_ids = iter(_encode(self._following, rest))
        results: list[list[int]] = []
        for parts in jobs:
            ids: list[int] = []
            for column, part in enumerate(parts):
                if isinstance(part, int):
                    ids.append(part)
                else:
                    ids += next(rest_ids if column else first_ids)
            results.append(ids)
        return results

    def encode_alone(self, parts: Sequence[Piece]) -> list[int]:
        """Ids of one prompt, text by text."""
        ids: list[int] = []
        for kind, run in _runs(parts):
            if kind is int:
                ids.extend(run)
            elif text := "".join(run):
                ids += _encode(self._following if ids else self._opening, [text])[0]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without control tokens; what a `Detokenizer` gives in parts."""
        if not self.can_stream:
            return str(self._opening.decode([token for token in ids if token not in self.control_ids]))
        stream = Detokenizer(self.table)
        return stream.push(ids) + stream.finish()

    def _prove_specials_off(self, recipe: Recipe) -> None:
        """A vocabulary is data from outside: see that what its builder took out cannot come back."""
        forbidden = set(self.special_ids.values()) - {recipe.unknown_id}
        names = list(self.special_ids)
        for encoder in {id(encoder): encoder for encoder in (self._opening, self._following)}.values():
            for name, ids in zip(names, _encode(encoder, names), strict=True):
                if not forbidden.isdisjoint(ids):
                    raise InvalidModel(f"Text that contains {name!r} would be encoded as a special token.")


def num_chars(parts: Sequence[Piece]) -> int:
    """Of all texts among them."""
    return sum([len(part) for kind, run in _runs(parts) if kind is str for part in run])


def _runs(parts: Sequence[Piece]) -> Iterator[tuple[type, Iterator[Any]]]:
    """Neighbours of a kind together."""
    return groupby(parts, type)


def _join_texts(parts: Sequence[Piece]) -> list[Piece]:
    """Neighbouring texts are one text: a token may lie across their border."""
    joined: list[Piece] = []
    run: list[str] = []
    for part in parts:
        if isinstance(part, int):
            if run:
                joined.append("".join(run))
                run.clear()
            joined.append(part)
        elif part:
            run.append(part)
    if run:
        joined.append("".join(run))
    return joined


def _encode(encoder: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    try:
        # encode_batch_fast lets go of the interpreter, as `encode` does not, and computes no offsets.
        return [encoding.ids for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False)]
    except TypeError as error:
        raise InvalidInput("A text has half of a surrogate pair, which is no character.") from error


def _digest(vocabulary: Vocabulary) -> str:
    """Of what decides about ids and text; not of the chat template."""
    frame = (vocabulary.bos_id, vocabulary.add_bos)
    gguf = (vocabulary.model, vocabulary.pre, vocabulary.add_space_prefix)
    tables = (vocabulary.pieces, vocabulary.kinds, vocabulary.scores, vocabulary.merges)
    return sha256(msgspec.msgpack.encode((vocabulary.tokenizer_json, frame, gguf, tables))).hexdigest()
