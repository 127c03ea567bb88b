"""Compiles a grammar to see whether it can be used, inside a limited process.

Owns the trial. Its vocabulary is the 256 bytes: what a grammar costs depends on the grammar far more than on the
tokens. The worker that later builds the same grammar over a real vocabulary does it under the same limits.
"""

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.core.errors import InvalidInput
from headrace.text.grammar import Grammar, check_size
from headrace.text.grammar_source import explain, grammar_source, matcher_limits

_EOS_ID = 256
# Some grammars compile and fail at their first tokens, for being too ambiguous.
_TRIAL_BYTES = 64


class ByteVocabulary:
    """What llguidance asks of a tokeniser, over bytes."""

    eos_token_id = _EOS_ID
    bos_token_id = None
    special_token_ids = (_EOS_ID,)

    def __init__(self) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [b"<end>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def check_grammar(payload: msgspec.Raw) -> bool:
    """True, or InvalidInput with the compiler's reason. What it costs is the limited process's to bound."""
    grammar = msgspec.msgpack.decode(payload, type=Grammar)
    check_size(grammar)
    source = grammar_source(grammar)
    lexicon = LLTokenizer(TokenizerWrapper(ByteVocabulary()), n_vocab=_EOS_ID + 1, eos_token=_EOS_ID)
    matcher = LLMatcher(lexicon, source, limits=matcher_limits(grammar), log_level=0)
    for _ in range(_TRIAL_BYTES):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [value for value in range(_EOS_ID) if mask[value >> 3] >> (value & 7) & 1]
        if not allowed:
            break
        # Any byte will do; one from the middle is seldom a space.
        matcher.consume_token(allowed[len(allowed) // 2])
    if matcher.is_error():
        raise InvalidInput(explain(grammar, matcher.get_error()))
    return True
