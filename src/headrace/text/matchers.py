"""The grammar state of a worker's sequences: which tokens may come next. Implements `core.ports.MaskSource`.

Owns one matcher per sequence number. Matchers are built and rebuilt in a thread, never in the step; what goes
wrong with one is told to who added it, or shows as a row without a mask, which fails alone. A gateway has checked
each grammar before; the limits here hold once more.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from headrace.core.errors import InvalidInput, RowFailed
from headrace.core.plan import Masks
from headrace.text.grammar import Grammar, check_size
from headrace.text.grammar_source import explain, grammar_source, matcher_limits
from headrace.text.lexicon import Lexicon

# Below this many rows handing the work to threads costs more than it saves.
_PARALLEL_ROWS = 16
_NO_TOKEN = 2**32 - 1


class Matchers:
    """`masks` and `advance` are called by the step's thread; `add` and `remove` by any."""

    def __init__(self, lexicon: Lexicon, *, build_threads: int = 1, mask_threads: int = 2) -> None:
        self._lexicon = lexicon
        self._builders = ThreadPoolExecutor(build_threads, thread_name_prefix="grammar")
        self._executor = LLExecutor(mask_threads) if mask_threads > 1 else None
        self._matchers: dict[int, LLMatcher] = {}
        self._building: dict[int, object] = {}
        self._lock = threading.Lock()

    def add(self, number: int, grammar: Grammar, emitted_ids: Sequence[int] = ()) -> "Future[None]":
        """Build the matcher of a sequence, past the tokens it has emitted. Masks are to be had when the future is done.

        The future raises InvalidInput for a grammar that does not compile, RowFailed for ids that it does not allow.
        """
        ticket = object()
        with self._lock:
            assert number not in self._matchers, f"sequence {number} has a matcher already"
            self._building[number] = ticket
        return self._builders.submit(self._build, number, ticket, grammar, tuple(emitted_ids))

    def build(self, grammar: Grammar, emitted_ids: Sequence[int] = ()) -> "Future[LLMatcher]":
        """Like `add` for a sequence that has no number yet: `put` files the matcher once it has one."""
        return self._builders.submit(self._make, grammar, tuple(emitted_ids))

    def put(self, number: int, matcher: LLMatcher) -> None:
        with self._lock:
            self._matchers[number] = matcher

    def remove(self, number: int) -> None:
        with self._lock:
            self._matchers.pop(number, None)
            self._building.pop(number, None)

    def rebuild(self, number: int, emitted_ids: Sequence[int]) -> bool:
        """Set a sequence's state to what follows these ids; False, and no masks, where its grammar forbids them."""
        matcher = self._matchers.get(number)
        if matcher is None:
            return False
        return bool(matcher.reset()) and _consume(matcher, emitted_ids)

    def masks(self, rows: Sequence[int], numbers: Sequence[int]) -> Masks:
        found = [
            (row, matcher)
            for row, number in zip(rows, numbers, strict=True)
            if (matcher := self._matchers.get(number)) is not None and not matcher.is_error()
        ]
        words = np.zeros((len(found), self._lexicon.num_words), np.int32)
        if self._executor is not None and len(found) >= _PARALLEL_ROWS:
            fill_next_token_bitmask_par(self._executor, [(pair[1], at) for at, pair in enumerate(found)], words)
        else:
            for at, (_, matcher) in enumerate(found):
                fill_next_token_bitmask(matcher, words, at)
        masks = words.view(np.uint32) & self._lexicon.allowed
        # A matcher may have met a limit just now; and a row with nothing allowed cannot be sampled either.
        good = np.array([not matcher.is_error() for _, matcher in found], bool) & masks.any(axis=1)
        return Masks(np.array([row for row, _ in found], np.int32)[good], masks[good])

    def advance(self, number: int, token: int) -> None:
        """A token that the grammar forbids puts the matcher into its error state: it gives no more masks."""
        matcher = self._matchers.get(number)
        if matcher is not None:
            _consume(matcher, (token,))

    def can_end(self, number: int) -> bool:
        """Whether what was emitted so far is complete."""
        matcher = self._matchers.get(number)
        return matcher is not None and bool(matcher.is_accepting())

    def close(self) -> None:
        self._builders.shutdown(wait=True, cancel_futures=True)
        self._matchers.clear()

    def _build(self, number: int, ticket: object, grammar: Grammar, emitted_ids: tuple[int, ...]) -> None:
        matcher = None
        try:
            matcher = self._make(grammar, emitted_ids)
        finally:
            with self._lock:
                if self._building.get(number) is ticket:  # else it was removed while being built
                    del self._building[number]
                    if matcher is not None:
                        self._matchers[number] = matcher

    def _make(self, grammar: Grammar, emitted_ids: tuple[int, ...]) -> LLMatcher:
        matcher = self._compile(grammar)
        if not _consume(matcher, emitted_ids):
            raise RowFailed("the tokens emitted so far do not follow the sequence's grammar")
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher of its own for each sequence. Copies would share an automaton, which grows as it is used: where
        one sequence drove it to its limit, all would fail."""
        check_size(grammar)
        matcher = LLMatcher(self._lexicon.tokens, grammar_source(grammar), limits=matcher_limits(grammar), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask is the dearest: have it here, and fail here if it fails
        if matcher.is_error():
            raise InvalidInput(explain(grammar, matcher.get_error()), param="response_format")
        return matcher


def _consume(matcher: LLMatcher, ids: Sequence[int]) -> bool:
    """False puts the matcher into its error state. llguidance forbids ids that are too large, but raises at negatives."""
    return bool(matcher.consume_tokens([token if token >= 0 else _NO_TOKEN for token in ids]))
