"""What one choice of a request says, from its tokens to parts of records. Owns text, calls and scores not told yet.

Knows no frame and no other choice. Everything here runs once per token: it is the gateway's hottest path.
"""

import secrets
import string
from typing import TYPE_CHECKING

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

_LETTERS = string.ascii_letters + string.digits


class Voice:
    """`number` counts the choices of the request, `choice_of_ask` those of its own ask. `key` is its name at the
    worker, -1 while it has none."""

    __slots__ = (
        "_call_deltas",
        "_calls",
        "_ids",
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
        "is_paused",
        "is_stopped",
        "key",
        "life",
        "number",
        "prepared",
        "replica",
    )

    def __init__(self, life: "Life", number: int, choice_of_ask: int, prepared: Prepared) -> None:
        ask, sampling = prepared.ask, prepared.sampling
        self.life = life
        self.number = number
        self.choice_of_ask = choice_of_ask
        self.prepared = prepared
        self.choice = Choice(
            life.model.tokenizer.table,
            prepared.window,
            ends=(*sampling.stop_ids, *(() if sampling.ignore_eos else life.model.eos_ids)),
            continues=prepared.continues,
            shows_specials=not ask.skip_special_tokens,
        )
        self.key = -1
        self.replica: ReplicaEnd | None = None
        self.end: End | None = None
        self.finish: str | None = None
        self.first_s: float | None = None
        self.is_stopped = False
        self.is_paused = False
        self._calls = open_syntax(prepared.syntax) if prepared.syntax else None
        self._wants_prompt = ask.echo or ask.return_token_ids or sampling.prompt_logprobs is not None
        self._is_plain = not (self._calls or self._wants_prompt or ask.score_only or sampling.logprobs is not None)
        self._text = ""
        self._ids: list[int] = []
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
        heard = self.choice.num_tokens
        return heard if self.end is None else min(heard, self.end.counters.emitted)

    def hear(self, token: int) -> bool:
        """A token came. True: there is something to tell."""
        text = self.choice.push_one(token)
        if self._is_plain:
            self._ids.append(token)
            self._text += text
        elif not self.prepared.ask.score_only:
            self._ids.append(token)
            self._hear_more(token, text)
        return bool(self._text or self._call_deltas)

    def score(self, position: int, logprob: float, top: tuple[Alternative, ...]) -> None:
        """Of an id of the prompt, or of the token that is heard next."""
        ids = self.prepared.prompt_ids
        if position < len(ids):
            data = self.life.model.tokenizer.token_bytes(ids[position])
            self._prompt_scores[position] = Score(ids[position], data, logprob, top)
        else:
            self._score = (logprob, top)

    def tell(self, finish: str | None = None) -> Part:
        """All that was not told yet. `finish`: it is the last of this choice."""
        ids, text = tuple(self._ids), self._text
        self._ids.clear()
        self._text = ""
        index, offset = self._num_told, self._num_chars
        self._num_told = index + len(ids)
        self._num_chars = offset + len(text)
        if self._is_plain:
            return Part(self.number, ids, text, finish=finish, index=index, offset=offset)
        scores, calls = tuple(self._scores), join_calls(self._call_deltas)
        self._scores.clear()
        self._call_deltas.clear()
        return Part(self.number, ids, text, scores, calls, finish, index, offset)

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
            rest = self.choice.finish()
            if self._calls is None:
                self._text += rest
            else:
                self._take_events([*self._calls.push(rest), *self._calls.finish()])
        finish = "stop" if self.is_stopped else reason
        if finish == "stop" and self._num_calls and not self.prepared.is_named:
            finish = "tool_calls"
        self.finish = finish
        return finish

    def abort(self, used_tokens: int | None = None) -> None:
        if self.replica is not None:
            self.replica.abort(self.key, used_tokens)

    def submitted(self, replica: ReplicaEnd, key: int) -> None:
        """It is with a worker now, which is to treat it as the one before did."""
        self.replica = replica
        self.key = key
        if self.is_paused:
            replica.pause(key)

    def pause(self) -> None:
        self.is_paused = True
        if self.replica is not None:
            self.replica.pause(self.key)

    def resume(self) -> None:
        self.is_paused = False
        if self.replica is not None:
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
            match event:
                case TextDelta(text) if not is_forced:
                    self._text += text
                case CallStarted(index, name):
                    self._call_deltas.append(CallDelta(index, _call_id(), name))
                case ArgumentsDelta(index, text):
                    self._call_deltas.append(CallDelta(index, arguments=text))
                case CallEnded(index, broken_text):
                    self._num_calls += not broken_text
                    if broken_text and not is_forced:
                        self._call_deltas.append(CallDelta(index, broken_text=broken_text))


def _call_id() -> str:
    return "call_" + "".join([secrets.choice(_LETTERS) for _ in range(24)])
