"""A vocabulary as llguidance wants it. Owns the one way a tokeniser is handed over, and the ids no grammar allows.

llguidance gets the bytes of every token from our own table, so that what a grammar allowed is what a stream shows.
Building takes some tenths of a second; a worker does it once per model.
"""

from collections.abc import Sequence

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from headrace.core.errors import InvalidModel
from headrace.text.tokenizer import Tokenizer


class Lexicon:
    """`vocab_size` is the model's: rows of padding beyond the tokeniser's last token are never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids or not 0 <= min(eos_ids) <= max(eos_ids) < vocab_size:
            raise InvalidModel("a grammar needs a model whose end tokens are known")
        if not tokenizer.can_stream:
            raise InvalidModel("a grammar needs a vocabulary whose tokens have bytes of their own")
        hidden = tokenizer.control_ids.union(tokenizer.special_ids.values())
        spoken = [b"" if token in hidden else tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.num_words = (vocab_size + 31) // 32
        self.allowed = _pack([bool(text) or token in eos_ids for token, text in enumerate(spoken)], self.num_words)
        source = _Source(tokenizer, spoken, eos_ids[0])
        self.tokens = LLTokenizer(TokenizerWrapper(source), n_vocab=vocab_size, eos_token=list(eos_ids))


class _Source:
    """What llguidance asks of a tokeniser. It is called for text that a grammar forces, to find its usual tokens."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokenizer: Tokenizer, spoken: list[bytes], eos_id: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = spoken
        self.eos_token_id = eos_id
        self._id_of = {text: token for token, text in enumerate(spoken) if text}
        self._longest = max(map(len, self._id_of))

    def __call__(self, text: bytes) -> list[int]:
        # Behind any special token, so that no space is put in front as at the start of a prompt.
        ids = self._tokenizer.encode_parts([self.eos_token_id, text.decode("utf-8", "replace")])[1:]
        return ids if b"".join(self.tokens[token] for token in ids) == text else self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """Where the encoder changes the text (a normaliser), any tokens that spell it will do."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            for end in range(min(len(text), start + self._longest), start, -1):
                if (token := self._id_of.get(text[start:end])) is not None:
                    ids.append(token)
                    start = end
                    break
            else:
                break  # a byte that no token spells: the rest cannot be written
        return ids


def _pack(bits: list[bool], num_words: int) -> NDArray[np.uint32]:
    padded = np.zeros(num_words * 32, np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)
