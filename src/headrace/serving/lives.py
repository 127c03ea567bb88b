"""Everything that is being answered, by the keys that workers know it by. Takes their frames; decides no route.

Owns the keys. One frame becomes at most one record per stream, and none where it shows nothing. What goes wrong with
one life ends that one: a frame is for all tenants.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.core.errors import HeadraceError, Unreachable
from headrace.core.event import Outcome
from headrace.core.messages import End, Frame, GrammarText, Refusal, ScoreTable, SubmitPart
from headrace.core.ports import Clock
from headrace.core.request import Request
from headrace.serving.failures import WORKER_LOST, error_of, failure_of, failure_of_end
from headrace.serving.life import Life
from headrace.serving.replica_table import ReplicaEnd
from headrace.serving.voice import Voice
from headrace.streams.record import Alternative, Ending, Failure, Part, Usage

log = logging.getLogger("headrace.serving")

INTERNAL = Failure("internal_error", "the server failed to tell this reply")


class Lives:
    """`place_again` submits voices that lost their worker before it said anything, or raises. `detokenise_s` makes
    the last step of every stream late."""

    def __init__(
        self,
        clock: Clock,
        place_again: Callable[[Life, Sequence[Voice]], None],
        *,
        detokenise_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._place_again = place_again
        self._detokenise_s = detokenise_s
        self._keys = itertools.count()
        self._voices: dict[int, Voice] = {}

    @property
    def num_voices(self) -> int:
        return len(self._voices)

    def submit(self, replica: ReplicaEnd, parts: Sequence[tuple[Sequence[Voice], Request]]) -> None:
        """Voices of one life, as one: each part's share a request, in the order of their choices. Raises what the
        replica does; then the voices are as they were."""
        made = []
        for voices, request in parts:
            grammar = voices[0].prepared.grammar
            text = None if grammar is None else GrammarText(grammar.kind, grammar.source)
            made.append(SubmitPart(tuple(next(self._keys) for _ in voices), request, text))
        replica.submit(*made)
        for part, (voices, _) in zip(made, parts, strict=True):
            for key, voice in zip(part.keys, voices, strict=True):
                self._voices[key] = voice
                voice.submitted(replica, key)

    def drop(self, life: Life) -> None:
        """Abort whatever of a life is with a worker, and forget its keys."""
        life.forget_admission()
        for voice in life.voices:
            if self._voices.pop(voice.key, None) is not None:
                voice.abort(voice.used_tokens)
            voice.key = -1

    def fail(self, life: Life, failure: Failure) -> None:
        """End a stream here and now, unless it has ended."""
        self.drop(life)
        if not life.stream.is_ended:
            life.tell_end(self._clock.now_s(), failure)

    def take(self, replica: str, frame: Frame) -> None:
        now_s = self._clock.now_s()
        voices = self._voices
        for key in frame.accepted:
            if (accepted := voices.get(key)) is not None:
                accepted.life.accept()
        for refusal in frame.refused:
            self._refuse(refusal)
        if frame.scores is not None:
            self._hand_out(frame.scores)
        ended = {end.key for end in frame.ended}
        said: dict[Life, list[Part]] = {}
        for key, _, token in frame.rows() if frame.keys else ():
            voice = voices.get(key)
            if voice is None or voice.is_stopped:
                continue
            try:
                if voice.first_s is None:
                    self._begin(voice, said, now_s)
                is_telling = voice.hear(token)
                if voice.choice.stopped:
                    voice.is_stopped = True
                    if key not in ended:
                        voice.abort(voice.choice.num_tokens)
                if is_telling and key not in ended:
                    life = voice.life
                    if life in said:
                        said[life].append(voice.tell())
                    else:
                        said[life] = [voice.tell()]
            except Exception:
                log.exception("a token of request %s could not be told", voice.life.stream.id)
                self._break(voice.life)
        if ended:
            self._take_ends(frame, said, now_s)
        else:
            self._tell(said, frame.step, now_s)

    def lost(self, replica: str, keys: Sequence[int]) -> None:
        found = [voice for key in keys if (voice := self._voices.pop(key, None)) is not None]
        by_life: dict[Life, list[Voice]] = {}
        for voice in found:
            by_life.setdefault(voice.life, []).append(voice)
        for life, voices in by_life.items():
            with self._guard(life):
                self._lose(life, voices)

    def _begin(self, voice: Voice, said: dict[Life, list[Part]], now_s: float) -> None:
        """Its first token is here."""
        voice.first_s = now_s
        if voice.life.first_s is None:
            voice.life.first_s = now_s
        prompt = voice.tell_prompt()
        if prompt is not None:
            said.setdefault(voice.life, []).append(prompt)

    def _tell(self, said: dict[Life, list[Part]], step: int, now_s: float) -> None:
        for life, parts in said.items():
            if life.stream.is_ended:  # it broke in this frame
                continue
            try:
                usage = life.usage() if life.counts else None
                life.stream.append(parts, step=step, age_s=life.age_s(now_s), usage=usage)
            except Exception:
                log.exception("a step of request %s could not be told", life.stream.id)
                self._break(life)

    @contextmanager
    def _guard(self, life: Life) -> Iterator[None]:
        """What goes wrong in here ends this life alone."""
        try:
            yield
        except Exception:
            log.exception("something of request %s could not be told", life.stream.id)
            self._break(life)

    def _break(self, life: Life) -> None:
        """Something of a reply is lost: it ends now, so that it cannot end as if it were whole."""
        if life.refuse(HeadraceError(INTERNAL.message)):
            return  # who opens it hears of it, and drops it
        try:
            self.fail(life, INTERNAL)
        except Exception:
            log.exception("request %s could not be ended as it should", life.stream.id)
            if not life.stream.is_ended:
                life.stream.end(Ending(Usage(), INTERNAL))

    def _take_ends(self, frame: Frame, said: dict[Life, list[Part]], now_s: float) -> None:
        over: list[tuple[Life, End]] = []
        failed: list[tuple[Life, Failure]] = []
        for end in frame.ended:
            voice = self._voices.pop(end.key, None)
            if voice is None:
                continue
            life = voice.life
            voice.end = end
            if end.outcome is not Outcome.FINISHED and not voice.is_stopped:
                failed.append((life, failure_of_end(end)))
                continue
            with self._guard(life):
                self._close(voice, end.reason, said, now_s)
                if not life.left:
                    over.append((life, end))
        self._tell(said, frame.step, now_s)
        for life, end in over:
            self._finish(life, end, now_s)
        for life, failure in failed:
            self._finish(life, failure, now_s)

    def _finish(self, life: Life, how: End | Failure, now_s: float) -> None:
        if life.stream.is_ended:
            return
        with self._guard(life):
            if isinstance(how, End):
                self._end(life, how, now_s)
            else:
                life.close(None, now_s)
                self.fail(life, how)

    def _close(self, voice: Voice, reason: str, said: dict[Life, list[Part]], now_s: float) -> None:
        finish = voice.close(reason)
        parts = said.setdefault(voice.life, [])
        prompt = voice.tell_prompt()
        if prompt is not None:
            parts.append(prompt)
        parts.append(voice.tell(finish))
        voice.life.left -= 1
        if voice.first_s is not None and voice.choice.num_tokens > 1:
            voice.life.itl_s = (now_s - voice.first_s) / (voice.choice.num_tokens - 1)

    def _end(self, life: Life, end: End, arrival_s: float) -> None:
        life.close(end.waits, arrival_s)
        if self._detokenise_s > 0.0:
            asyncio.get_running_loop().call_later(self._detokenise_s, self._tell_end, life)
        else:
            self._tell_end(life)

    def _tell_end(self, life: Life) -> None:
        if not life.stream.is_ended:
            life.tell_end(self._clock.now_s())

    def _refuse(self, refusal: Refusal) -> None:
        """All keys of a refusal are of one life."""
        voices = [voice for key in refusal.keys if (voice := self._voices.pop(key, None)) is not None]
        if not voices:
            return
        life = voices[0].life
        with self._guard(life):
            error = error_of(refusal)
            if not life.refuse(error):
                self.fail(life, failure_of(error))

    def _lose(self, life: Life, voices: list[Voice]) -> None:
        now_s = self._clock.now_s()
        if life.refuse(Unreachable(WORKER_LOST)):
            return
        said: dict[Life, list[Part]] = {}
        silent = []
        for voice in voices:
            if voice.is_stopped:
                self._close(voice, "stop", said, now_s)
            else:
                silent.append(voice)
        self._tell(said, -1, now_s)
        if not silent:
            if not life.left:
                life.close(None, now_s)
                self._tell_end(life)
            return
        try:
            if life.has_spoken:
                raise Unreachable(WORKER_LOST)
            self._place_again(life, silent)
        except HeadraceError as error:
            self.fail(life, failure_of(error))

    def _hand_out(self, table: ScoreTable) -> None:
        scores = table.unpack()
        tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
        entries = zip(scores.owners.tolist(), scores.positions.tolist(), scores.logprobs.tolist(), tops, strict=True)
        for owner, position, logprob, (ids, logprobs) in entries:
            voice = self._voices.get(owner)
            if voice is None:
                continue
            try:
                data = voice.life.model.tokenizer.token_bytes
                top = tuple(
                    Alternative(token, data(token), chance)
                    for token, chance in zip(ids, logprobs, strict=True)
                    if token >= 0
                )
                voice.score(position, logprob, top)
            except Exception:
                log.exception("a score of request %s could not be told", voice.life.stream.id)
                self._break(voice.life)
