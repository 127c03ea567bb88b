"""What one choice of a request says, from its tokens to parts of records. Owns the ids it heard, and text, calls and
scores not told yet: all that it takes to go on at another worker.

Knows no frame and no other choice. Everything here runs once per token: it is the gateway's hottest path.
"""

import secrets
import string
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError
from headrace.core.messages import End
from headrace.serving.choice import Choice
from headrace.serving.preparation import Prepared
from headrace.serving.replica_table import ReplicaEnd
from headrace.streams.reader import join_calls
from headrace.streams.record import Alternative, CallDelta, Part, Score
from headrace.text.tools.events import ArgumentsDelta, CallEnded, CallStarted, TextDelta, ToolEvent
from headrace.text.tools.syntax import open_syntax

if TYPE_CHECKING:
    from headrace.serving.life import Life

# A worker that has said so many tokens of a sequence since it got it can compute it.
FEW_TOKENS = 3
_LETTERS = string.ascii_letters + string.digits


class Voice:
    """`number` counts the choices of the request, `choice_of_ask` those of its own ask. `key` is its name at the
    worker, -1 while it has none. Of the ids it `heard`, the first `num_replayed` were before this worker had it. It
    ends with `most_tokens`, 0 where its workers do not say how much they hold."""

    __slots__ = (
        "_call_deltas",
        "_calls",
        "_is_plain",
        "_num_calls",
        "_num_chars",
        "_num_told",
        "_prompt_scores",
        "_score",
        "_scores",
        "_text",
        "_wants_prompt",
        "choice",
        "choice_of_ask",
        "end",
        "finish",
        "first_s",
        "has_called",
        "heard",
        "is_accepted",
        "is_attached",
        "is_paused",
        "is_stopped",
        "key",
        "life",
        "most_tokens",
        "num_cached",
        "num_replayed",
        "number",
        "prepared",
        "replica",
        "submitted_s",
    )

    def __init__(self, life: "Life", number: int, choice_of_ask: int, prepared: Prepared) -> None:
        ask, sampling = prepared.ask, prepared.sampling
        self.life = life
        self.number = number
        self.choice_of_ask = choice_of_ask
        self.prepared = prepared
        # Made while its worker computes: what is to be computed does not wait for it.
        self.choice: Choice | None = None
        # The ints are those of the stream's records. An array would save four bytes of each, and takes several times
        # as long to add to.
        self.heard: list[int] = []
        self.num_replayed = 0
        self.most_tokens = 0
        # Of its prompt, by the worker that said its first token.
        self.num_cached = 0
        self.submitted_s = 0.0
        self.is_accepted = False
        # Its worker got it from another gateway, so how much was replayed there is known at its end.
        self.is_attached = False
        self.key = -1
        self.replica: ReplicaEnd | None = None
        self.end: End | None = None
        self.finish: str | None = None
        self.first_s: float | None = None
        self.is_stopped = False
        self.is_paused = False
        # The one call that it may make: whatever comes after it is dropped.
        self.has_called = False
        self._calls = open_syntax(prepared.syntax, prepared.tool_names or None) if prepared.syntax else None
        self._wants_prompt = ask.echo or ask.return_token_ids or sampling.prompt_logprobs is not None
        self._is_plain = not (self._calls or self._wants_prompt or ask.score_only or sampling.logprobs is not None)
        self._text = ""
        self._call_deltas: list[CallDelta] = []
        self._score: tuple[float, tuple[Alternative, ...]] | None = None
        self._scores: list[Score] = []
        self._prompt_scores: dict[int, Score] = {}
        self._num_told = 0
        self._num_chars = 0
        # Calls that are whole: one that broke off is nothing to be run.
        self._num_calls = 0

    @property
    def used_tokens(self) -> int:
        """Tokens that count for the client: none past a stop string, none where only scores were asked."""
        if self.prepared.ask.score_only:
            return 0
        heard = len(self.heard)
        return heard if self.end is None else min(heard, self.num_replayed + self.end.counters.emitted)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that did not have to be computed. That a worker was lost changes nothing of them."""
        if self.end is not None and not self.num_replayed:
            return self.end.counters.prompt_cached
        return self.num_cached

    @property
    def is_fresh(self) -> bool:
        """Its worker has said nothing of it yet, or next to nothing."""
        return len(self.heard) - self.num_replayed < FEW_TOKENS

    @property
    def over(self) -> str | None:
        """Why nothing can follow what was heard, as its worker would say it; None where something can."""
        if self.is_stopped:
            return "stop"
        num_heard, sampling = len(self.heard), self.prepared.sampling
        if num_heard and num_heard >= sampling.min_tokens:
            last = self.heard[-1]
            if last in sampling.stop_ids or (not sampling.ignore_eos and last in self.life.model.eos_ids):
                return "stop"
        return "length" if 0 < self.most_tokens <= num_heard else None

    def listen(self) -> Choice:
        """What makes text of its tokens."""
        if self.choice is None:
            model, sampling = self.life.model, self.prepared.sampling
            self.choice = Choice(
                model.tokenizer.table,
                self.prepared.window,
                ends=(*sampling.stop_ids, *(() if sampling.ignore_eos else model.eos_ids)),
                continues=self.prepared.continues,
                shows_specials=not self.prepared.ask.skip_special_tokens,
            )
        return self.choice

    def hear(self, token: int) -> bool:
        """A token came. True: there is something to tell."""
        self.heard.append(token)
        text = (self.choice or self.listen()).push_one(token)
        if self._is_plain:
            self._text += text
        elif not self.prepared.ask.score_only:
            self._hear_more(token, text)
        return bool(self._text or self._call_deltas)

    def score(self, position: int, logprob: float, top: tuple[Alternative, ...]) -> None:
        """Of an id of the prompt, or of the token that is heard next."""
        ids = self.prepared.prompt_ids
        if position < len(ids):
            data = self.life.model.tokenizer.token_bytes(ids[position])
            self._prompt_scores[position] = Score(ids[position], data, logprob, top)
        elif position == len(ids) + len(self.heard):
            self._score = (logprob, top)

    def tell(self, finish: str | None = None) -> Part:
        """All that was not told yet. `finish`: it is the last of this choice."""
        index, offset = self._num_told, self._num_chars
        ids, text = tuple(self.heard[index:]), self._text
        self._text = ""
        self._num_told = index + len(ids)
        self._num_chars = offset + len(text)
        if self._is_plain:
            cached = self.num_cached if index == 0 else 0
            return Part(self.number, ids, text, finish=finish, index=index, offset=offset, cached=cached)
        if self.prepared.ask.score_only:
            ids = ()
        scores, calls = tuple(self._scores), join_calls(self._call_deltas)
        self._scores.clear()
        self._call_deltas.clear()
        cached = self.num_cached if index == 0 else 0
        return Part(self.number, ids, text, scores, calls, finish, index, offset, cached=cached)

    def tell_prompt(self) -> Part | None:
        """Once, before anything else, where it was asked for."""
        if not self._wants_prompt:
            return None
        self._wants_prompt = False
        ids, text = self.prepared.prompt_ids, self.prepared.echoed
        scores: tuple[Score, ...] = ()
        if self._prompt_scores:
            data = self.life.model.tokenizer.token_bytes
            found = self._prompt_scores
            scores = tuple(found.get(at) or Score(token, data(token), None) for at, token in enumerate(ids))
            self._prompt_scores = {}
        self._num_chars += len(text)
        return Part(self.number, ids, text, scores, is_prompt=True)

    def close(self, reason: str) -> str:
        """No more tokens will come, for this reason. Returns the finish to tell; what was held back is told with it."""
        if not self.prepared.ask.score_only:
            rest = (self.choice or self.listen()).finish()
            if self._calls is None:
                self._text += rest
            else:
                self._take_events([*self._calls.push(rest), *self._calls.finish()])
        finish = "stop" if self.is_stopped else reason
        if finish == "stop" and self._num_calls and not self.prepared.is_named:
            finish = "tool_calls"
        self.finish = finish
        return finish

    def abort(self) -> None:
        """Its worker need not go on. Tokens past those that count are overrun there."""
        if self.replica is not None:
            used_tokens = None if self.is_attached else max(0, self.used_tokens - self.num_replayed)
            self.replica.abort(self.key, used_tokens)

    def submitted(self, replica: ReplicaEnd, key: int, now_s: float) -> None:
        """It is with a worker now, which is to treat it as the one before did."""
        self.replica = replica
        self.key = key
        self.num_replayed = len(self.heard)
        self.submitted_s = now_s
        self.is_accepted = False
        self.is_attached = False
        if self.is_paused:
            replica.pause(key)

    def attached(self, replica: ReplicaEnd, key: int, now_s: float) -> None:
        """As `submitted`, to a worker that has had it from before."""
        self.submitted(replica, key, now_s)
        self.num_replayed = 0
        self.is_attached = True

    def recall(self, part: Part, said_s: float) -> None:
        """It said this in an earlier life, by today's clock at `said_s`: be as after that. HeadraceError where it would
        have said something else."""
        if part.is_prompt:
            self._wants_prompt = False
            self._num_chars += len(part.text)
            return
        if part.ids and self.is_stopped:
            raise HeadraceError("a stream has gone on behind its stop string")
        for token in part.ids:
            self.hear(token)
        self.is_stopped = self.listen().stopped or self.has_called
        if not part.index:
            self.num_cached = part.cached
            self.first_s = said_s
        told = self.tell(part.finish)
        if part.finish is not None:
            self.finish = part.finish
            self.life.left -= 1
        elif told.text != part.text:
            raise HeadraceError("the ids of a stream do not give the text that it has said")

    def pause(self) -> None:
        self.is_paused = True
        if self.replica is not None and self.key >= 0:
            self.replica.pause(self.key)

    def resume(self) -> None:
        self.is_paused = False
        if self.replica is not None and self.key >= 0:
            self.replica.resume(self.key)

    def _hear_more(self, token: int, text: str) -> None:
        if self._score is not None:
            logprob, top = self._score
            self._score = None
            self._scores.append(Score(token, self.life.model.tokenizer.token_bytes(token), logprob, top))
        if self._calls is None:
            self._text += text
        elif text:
            self._take_events(self._calls.push(text))

    def _take_events(self, events: list[ToolEvent]) -> None:
        # Where calls are forced, what else there is are tags, or a part of one where the reply was cut off.
        is_forced = self.prepared.is_forced
        for event in events:
            if self.has_called:
                return
            match event:
                case TextDelta(text) if not is_forced:
                    self._text += text
                case CallStarted(index, name):
                    self._call_deltas.append(CallDelta(index, _call_id(), name))
                case ArgumentsDelta(index, text):
                    self._call_deltas.append(CallDelta(index, arguments=text))
                case CallEnded(index, broken_text):
                    self._num_calls += not broken_text
                    # What a grammar forces is one call already, and its end.
                    self.has_called = not (broken_text or is_forced or self.prepared.ask.parallel_tool_calls)
                    if broken_text and not is_forced:
                        place = self._num_chars + len(self._text)
                        self._call_deltas.append(CallDelta(index, broken_text=broken_text, place=place))


def _call_id() -> str:
    return "call_" + "".join([secrets.choice(_LETTERS) for _ in range(24)])
