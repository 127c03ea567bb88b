"""Everything that is being answered, by the keys that workers know it by. Takes their frames; decides no route.

Owns the keys. One frame becomes at most one record per stream, and none where it shows nothing.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from headrace.core.errors import HeadraceError, Unreachable
from headrace.core.event import Outcome
from headrace.core.messages import End, Frame, GrammarText, Refusal, ScoreTable
from headrace.core.ports import Clock
from headrace.core.request import Request
from headrace.serving.failures import WORKER_LOST, error_of, failure_of, failure_of_end
from headrace.serving.life import Life
from headrace.serving.replica_table import ReplicaEnd
from headrace.serving.voice import Voice
from headrace.streams.record import Alternative, Failure, Part

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

    def submit(self, voice: Voice, replica: ReplicaEnd, request: Request) -> None:
        """Raises Unreachable; then the voice is as it was."""
        grammar = voice.prepared.grammar
        key = next(self._keys)
        replica.submit(key, request, None if grammar is None else GrammarText(grammar.kind, grammar.source))
        voice.key = key
        voice.replica = replica
        self._voices[key] = voice

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
        broken: list[Life] = []
        for key, _, token in frame.rows() if frame.keys else ():
            voice = voices.get(key)
            if voice is None or voice.is_stopped:
                continue
            try:
                if voice.first_s is None:
                    self._begin(voice, said, now_s)
                is_telling = voice.hear(token)
            except Exception:
                log.exception("a token of request %s could not be told", voice.life.stream.id)
                broken.append(voice.life)
                continue
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
        if ended:
            self._take_ends(frame, said, now_s)
        else:
            self._tell(said, frame.step, now_s)
        for life in broken:
            self.fail(life, INTERNAL)

    def lost(self, replica: str, keys: Sequence[int]) -> None:
        found = [voice for key in keys if (voice := self._voices.pop(key, None)) is not None]
        by_life: dict[Life, list[Voice]] = {}
        for voice in found:
            by_life.setdefault(voice.life, []).append(voice)
        for life, voices in by_life.items():
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
            usage = life.usage() if life.counts else None
            life.stream.append(parts, step=step, age_s=life.age_s(now_s), usage=usage)

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
            try:
                self._close(voice, end.reason, said, now_s)
            except Exception:
                log.exception("the end of request %s could not be told", life.stream.id)
                failed.append((life, INTERNAL))
                continue
            if not life.left:
                over.append((life, end))
        self._tell(said, frame.step, now_s)
        for life, end in over:
            self._end(life, end, now_s)
        for life, failure in failed:
            if not life.stream.is_ended:
                life.close(None, now_s)
            self.fail(life, failure)

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
        voice = self._voices.pop(refusal.key, None)
        if voice is None:
            return
        error = error_of(refusal)
        if not voice.life.refuse(error):
            self.fail(voice.life, failure_of(error))

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
            data = voice.life.model.tokenizer.token_bytes
            top = tuple(
                Alternative(token, data(token), chance)
                for token, chance in zip(ids, logprobs, strict=True)
                if token >= 0
            )
            voice.score(position, logprob, top)
