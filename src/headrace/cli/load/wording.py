"""Intended requests put into words: HTTP bytes of a chat or completion with the length asked for.

Owns bodies and prompts. A prompt is a cut of one long random text, so that making it costs nothing while the load
runs and no two prompts begin alike.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from headrace.cli.load.http import Endpoint
from headrace.cli.load.plan import POOL_TOKENS, LoadPlan, Shot

T = TypeVar("T")

_DIGITS = 4
_MOST_RUNS = 256

WORDS = (
    "the of and to in is was for on that by this with you it not or be are from at as your all have new more an can "
    "time people water year work day way part place case week point hand fact group world home side house area money "
    "story month lot right study book eye job word business issue head far black long great little own old big high "
    "small large next early young few public bad same able"
)


class Asked(Struct, frozen=True):
    """What every request of a run has in common."""

    model: str
    api: str = "chat"
    streamed: bool = True
    temperature: float = 0.0
    ignore_eos: bool = True
    choices: int = 1
    # Prompts are ids and the reply's ids are asked for: completions only.
    with_ids: bool = False
    ids_below: int = 256
    tokens_per_word: float = 1.0
    extra: dict[str, object] = {}


class Wording:
    """Requests of one run. The same shot has the same words, whoever asks and when."""

    def __init__(self, endpoint: Endpoint, plan: LoadPlan, asked: Asked, *, run: int = 0) -> None:
        """Prompts of different runs differ, so that one does not find its prefixes in a cache that another filled."""
        self._endpoint = endpoint
        self._keys = [load.key for load in plan.tenants]
        self._asked = asked
        self._path = "/v1/chat/completions" if asked.api == "chat" else "/v1/completions"
        rng = np.random.default_rng([plan.seed, 7])
        self._run = run
        self._tenants = len(plan.tenants)
        self._ids: list[int] = []
        self._text: list[str] = []
        self._words = WORDS.split()
        if asked.with_ids:
            self._ids = rng.integers(0, asked.ids_below, POOL_TOKENS, dtype=np.int64).tolist()
        else:
            self._text = np.array(self._words)[rng.integers(0, len(self._words), POOL_TOKENS)].tolist()
        self._encode = msgspec.json.Encoder().encode

    def request(self, shot: Shot) -> bytes:
        body = self._encode(self.body(shot))
        return self._endpoint.head("POST", self._path, self._keys[shot.tenant], len(body)) + body

    def prompt_ids(self, shot: Shot) -> list[int]:
        own = _cut(self._ids, shot.offset, shot.prompt_tokens - shot.prefix_tokens)
        self._sign(own, shot, range(self._asked.ids_below))
        return _cut(self._ids, shot.prefix_offset, shot.prefix_tokens) + own

    def body(self, shot: Shot) -> dict[str, object]:
        asked = self._asked
        body: dict[str, object] = {
            "model": asked.model,
            "max_tokens": shot.output_tokens,
            "temperature": asked.temperature,
            "seed": shot.seed,
        }
        if asked.ignore_eos:
            body["ignore_eos"] = True
        if asked.choices > 1:
            body["n"] = asked.choices
        if asked.streamed:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        if asked.with_ids:
            body["prompt"] = self.prompt_ids(shot)
            body["return_token_ids"] = True
        elif asked.api == "chat":
            body["messages"] = [{"role": "user", "content": self._prompt_text(shot)}]
        else:
            body["prompt"] = self._prompt_text(shot)
        return body | asked.extra

    def _prompt_text(self, shot: Shot) -> str:
        prefix = _cut(self._text, shot.prefix_offset, self._num_words(shot.prefix_tokens))
        own = _cut(self._text, shot.offset, max(1, self._num_words(shot.prompt_tokens - shot.prefix_tokens)))
        self._sign(own, shot, self._words)
        return " ".join(prefix + own)

    def _sign(self, prompt: list[T], shot: Shot, alphabet: Sequence[T]) -> None:
        """Put the request's number at the front, in digits of the alphabet: two cuts may begin at one place."""
        rest = (shot.number * self._tenants + shot.tenant) * _MOST_RUNS + self._run
        for index in range(min(_DIGITS, len(prompt))):
            rest, digit = divmod(rest, len(alphabet))
            prompt[index] = alphabet[digit]

    def _num_words(self, tokens: int) -> int:
        return round(tokens / self._asked.tokens_per_word)


def _cut(pool: list[T], offset: int, count: int) -> list[T]:
    """`count` from `offset` on, round the end as often as needed."""
    cut = pool[offset : offset + count]
    while len(cut) < count:
        cut += pool[: count - len(cut)]
    return cut
