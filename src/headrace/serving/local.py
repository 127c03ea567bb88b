"""Generation inside this process: asks in, spoken deltas out, the engine turned by the caller.

Owns the sequences it submitted and their text. One thread, no socket: the same engine loop that a worker
runs, for commands and measurements.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.core.event import Ended, Outcome, StepFrame
from headrace.core.hashing import chain_blocks, chain_root
from headrace.core.plan import Scores
from headrace.core.ports import Clock
from headrace.core.request import Request, Tier
from headrace.engine.loop import Engine
from headrace.serving.ask import Ask
from headrace.serving.choice import Choice
from headrace.serving.model_text import ModelText
from headrace.serving.preparation import Prepared, prepare_sync
from headrace.text.grammar import Grammar
from headrace.text.matchers import Matchers

# Local work is patient: it is queued, never refused for its wait.
_PATIENCE_S = 1e6


class Spoken(Struct, frozen=True):
    """What one choice of one ask had to say in a step. `ended` comes with its last words."""

    key: int
    choice: int
    text: str
    ids: tuple[int, ...] = ()
    scores: Scores | None = None
    ended: Ended | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class _Stream:
    key: int
    index: int
    choice: Choice


class LocalService:
    def __init__(
        self,
        engine: Engine,
        model: ModelText,
        *,
        clock: Clock,
        version: str,
        block_size: int,
        matchers: Matchers | None,
        seeds: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._engine = engine
        self._model = model
        self._clock = clock
        self._root = chain_root(salt=b"local", version=version)
        self._block_size = block_size
        self._matchers = matchers
        self._seeds = seeds
        self._streams: dict[int, _Stream] = {}

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return len(self._streams)

    def prepare(self, ask: Ask) -> Prepared:
        """Render, tokenise and check. Raises what is wrong with the ask; nothing is kept."""
        for name in ("echo", "score_only", "return_token_ids"):
            if getattr(ask, name):
                raise InvalidInput(f"{name} is for streams: a local reply is what the model adds", param=name)
        prepared = prepare_sync(self._model, ask, seeds=self._seeds)
        assert prepared.grammar is None or self._matchers is not None, "a model with an end has matchers"
        return prepared

    def submit(self, key: int, prepared: Prepared) -> None:
        """Start every choice of an ask under the caller's `key`. Refused as a whole or accepted as a whole."""
        hashes = chain_blocks(self._root, prepared.prompt_ids, self._block_size)
        requests = [self._request(key, index, prepared, hashes) for index in range(prepared.ask.n)]
        numbers = self._engine.submit_all(requests, self._clock.now_s())
        try:
            for index, number in enumerate(numbers):
                if prepared.grammar is not None:
                    self._add_matcher(number, prepared.grammar)
                self._streams[number] = _Stream(key, index, self._choice(prepared))
        except BaseException:
            for number in numbers:
                self._drop(number)
            raise

    def turn(self) -> list[Spoken]:
        """One turn of the engine, as text."""
        now_s = self._clock.now_s()
        return self._speak(self._engine.turn(now_s))

    def _request(self, key: int, index: int, prepared: Prepared, hashes: tuple[bytes, ...]) -> Request:
        return Request(
            request_id=f"{key}.{index}",
            tenant="local",
            prompt_ids=prepared.prompt_ids,
            max_tokens=prepared.ask.max_tokens,
            sampling=prepared.sampling,
            choice=index,
            tier=Tier.BATCH,
            ttft_target_s=_PATIENCE_S,
            queue_timeout_s=_PATIENCE_S,
            prefix_root=self._root,
            block_hashes=hashes,
        )

    def _choice(self, prepared: Prepared) -> Choice:
        return Choice(
            self._model.tokenizer.table,
            prepared.window,
            ends=(*prepared.sampling.stop_ids, *(() if prepared.sampling.ignore_eos else self._model.eos_ids)),
            continues=prepared.continues,
            shows_specials=not prepared.ask.skip_special_tokens,
        )

    def _add_matcher(self, number: int, grammar: Grammar) -> None:
        assert self._matchers is not None, "a grammar is refused when it is prepared"
        self._matchers.add(number, grammar).result()

    def _forget_matcher(self, number: int) -> None:
        if self._matchers is not None:
            self._matchers.remove(number)

    def _drop(self, number: int) -> None:
        self._streams.pop(number, None)
        self._forget_matcher(number)
        self._engine.abort(number, self._clock.now_s())

    def _speak(self, frame: StepFrame) -> list[Spoken]:
        ended = {event.number: event for event in frame.ended}
        scores = _by_owner(frame.scores)
        spoken: list[Spoken] = []
        for number, token in zip(frame.numbers.tolist(), frame.tokens.tolist(), strict=True):
            stream = self._streams.get(number)
            if stream is None:
                continue
            text = stream.choice.push((token,))
            end = ended.pop(number, None)
            if end is None and stream.choice.stopped:
                # The end comes with the next turn's events.
                self._engine.abort(number, self._clock.now_s(), used_tokens=stream.choice.num_tokens)
            spoken.append(self._said(number, stream, text, (token,), scores.pop(number, None), end))
        for number, score in scores.items():
            if number in self._streams and number not in ended:
                spoken.append(self._said(number, self._streams[number], "", (), score, None))
        for number, end in ended.items():
            stream = self._streams.get(number)
            if stream is not None:
                spoken.append(self._said(number, stream, "", (), scores.get(number), end))
        return spoken

    def _said(
        self,
        number: int,
        stream: _Stream,
        text: str,
        ids: tuple[int, ...],
        scores: Scores | None,
        ended: Ended | None,
    ) -> Spoken:
        if ended is None:
            return Spoken(stream.key, stream.index, text, ids, scores)
        del self._streams[number]
        self._forget_matcher(number)
        reason = "stop" if stream.choice.stopped else ended.reason
        if ended.outcome is Outcome.FAILED:
            reason = "error"
        return Spoken(stream.key, stream.index, text + stream.choice.finish(), ids, scores, ended, reason)


def _by_owner(scores: Scores | None) -> dict[int, Scores]:
    """The scores of each sequence."""
    if scores is None:
        return {}
    found: dict[int, Scores] = {}
    for owner in set(scores.owners.tolist()):
        entries = (scores.owners == owner).nonzero()[0]
        found[owner] = scores.take(entries, scores.owners[entries])
    return found
