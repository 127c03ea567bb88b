"""Everything that is being answered, by the keys that workers know it by. Takes their frames; decides no route.

Owns the keys. One frame becomes at most one record per stream, and none where it shows nothing. A token is heard once
and in its order, whoever says it. What goes wrong with one life ends that one: a frame is for all tenants.
"""

import asyncio
import itertools
import logging
import struct
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext

from headrace.core.errors import HeadraceError, Refused, WorkerKilled
from headrace.core.event import NUM_COUNTERS, Counter, Outcome, Waits
from headrace.core.hashing import sequence_digest
from headrace.core.messages import AttachPart, End, Frame, GrammarText, Refusal, SubmitPart, WorkerState
from headrace.core.ports import Clock
from headrace.core.request import Request
from headrace.serving.failures import WORKER_KILLED, error_of, failure_of, failure_of_end
from headrace.serving.life import Life
from headrace.serving.replica_table import ReplicaEnd
from headrace.serving.rescue import Rescue, Seeker
from headrace.serving.scores import scored, tell_score
from headrace.serving.voice import Voice
from headrace.streams.record import Ending, Failure, Part, Usage

log = logging.getLogger("headrace.serving")

INTERNAL = Failure("internal_error", "the server failed to tell this reply")

# Of an end that nobody here asked for: another gateway has taken the sequence over.
_TAKEN = "taken"
# A worker that is there and gave something up is not asked at once to take it again.
_PAUSE_S = 0.05
# Nor one that would not have it at all.
_REFUSED_S = 1.0
# Of a refusal: its worker does not have the sequence any more.
_NOT_ATTACHABLE = "not_attachable"
_COUNTER = struct.Struct("<i")


class Guard:
    """Around what is said of one life."""

    __slots__ = ("_life", "_lives")

    def __init__(self, lives: "Lives", life: Life) -> None:
        self._lives = lives
        self._life = life

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._lives.mistold(self._life, error)
        return True


class Lives:
    """`rescue` and `seeker` are told here once they are there. What is said within one `held` goes to the journal together.
    `detokenise_s` makes the last step of every stream late."""

    rescue: Rescue
    seeker: Seeker | None = None

    def __init__(self, clock: Clock, *, detokenise_s: float = 0.0) -> None:
        self._clock = clock
        self._detokenise_s = detokenise_s
        self._keys = itertools.count()
        self._voices: dict[int, Voice] = {}
        # Of lives that ended before their workers said so; each of these keys is spoken of once more, or lost.
        self._parting: dict[int, Voice] = {}
        # Whose worker has left them in the frame that is being taken.
        self._displaced: list[Voice] = []
        self.held: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def num_voices(self) -> int:
        return len(self._voices)

    def submit(self, replica: ReplicaEnd, parts: Sequence[tuple[Sequence[Voice], Request]]) -> None:
        """Voices of one life, as one: each part's share a request, in the order of their choices. Those that another
        worker has leave it. Raises what the replica does; then the voices are as they were."""
        made: list[SubmitPart] = []
        named: dict[int, Voice] = {}
        for voices, request in parts:
            first = voices[0]
            grammar, life = first.prepared.grammar, first.life
            text = None if grammar is None else GrammarText(grammar.kind, grammar.source)
            keys = tuple(itertools.islice(self._keys, len(voices)))
            made.append(SubmitPart(keys, request, text, first.number, life.stream.is_kept, life.kills > 0))
            named.update(zip(keys, voices, strict=True))
        replica.submit(*made)
        now_s = self._clock.now_s()
        for key, voice in named.items():
            if self._voices.pop(voice.key, None) is not None:
                voice.abort()
            self._voices[key] = voice
            voice.submitted(replica, key, now_s)

    def attach(self, replica: ReplicaEnd, voice: Voice) -> None:
        """Ask a worker for what it has of it, from the first token on that was not heard. Raises Refused; then the
        voice is as it was."""
        key, life, prepared = next(self._keys), voice.life, voice.prepared
        digest = sequence_digest(prepared.prompt_ids, prepared.sampling.seed, voice.choice_of_ask, voice.heard)
        name = (life.caller.tenant, life.stream.id, voice.number)
        replica.attach(AttachPart(key, *name, len(voice.heard), digest))
        life.replica = replica.name
        self._voices[key] = voice
        voice.attached(replica, key, self._clock.now_s())

    def drop(self, life: Life) -> None:
        """Abort whatever of a life is with a worker, and forget its keys. What another gateway has taken over is not
        known there by them any more."""
        life.forget_admission()
        self.rescue.forget(life)
        if self.seeker is not None:
            self.seeker.forget(life.voices)
        for voice in life.voices:
            self._release(voice)

    def draining(self) -> dict[Life, list[Voice]]:
        """What is with workers that are leaving and could as well go on elsewhere."""
        found: dict[Life, list[Voice]] = {}
        for voice in self._voices.values():
            is_leaving = voice.replica is not None and voice.replica.state is WorkerState.DRAINING
            if is_leaving and voice.over is None and not voice.life.is_opening:
                found.setdefault(voice.life, []).append(voice)
        return found

    def _release(self, voice: Voice) -> None:
        if self._voices.pop(voice.key, None) is not None:
            voice.abort()
        voice.key = -1

    def fail(self, life: Life, failure: Failure, waits: Waits | None = None) -> None:
        """End a stream here and now, unless it has ended. `waits`: where its time went, if a worker has said so."""
        parting = {voice.key: voice for voice in life.voices if voice.key in self._voices}
        self.drop(life)
        if not life.stream.is_closed:
            self._parting |= parting
            life.tell_end(self._clock.now_s(), failure, waits=waits, num_parting=len(parting))

    def take(self, replica: str, frame: Frame) -> None:
        with self.held():
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        now_s = self._clock.now_s()
        self._take_answers(frame)
        if frame.scores is not None:
            for voice, score in scored(frame.scores, self._voices):
                try:
                    tell_score(voice, score)
                except Exception:
                    log.exception("a score of request %s could not be told", voice.life.stream.id)
                    self.break_off(voice.life)
        ended = {end.key for end in frame.ended}
        said: dict[Life, list[Part]] = {}
        if frame.keys:
            self._hear(frame, ended, said, now_s)
        if ended:
            self._take_ends(frame, said, now_s)
        else:
            self._tell(said, frame.step, now_s)
        if self._displaced:
            displaced, self._displaced = self._displaced, []
            for life, lost in _by_life(displaced).items():
                with self.guard(life):
                    self._lose(life, lost, after_s=_PAUSE_S)
            self.rescue.look()
        self.rescue.heard()

    def _take_answers(self, frame: Frame) -> None:
        """What was accepted and what was refused."""
        for key in frame.accepted:
            if (voice := self._voices.get(key)) is not None:
                voice.is_accepted = True
                voice.life.accept()
                if voice.is_attached and self.seeker is not None:
                    self.seeker.forget((voice,))
        for refusal in frame.refused:
            self._refuse(refusal)

    def _hear(self, frame: Frame, ended: Set[int], said: dict[Life, list[Part]], now_s: float) -> None:
        """The tokens of a frame, and what they let their voices say, but for those that end with it."""
        voices = self._voices
        # A worker that is attached to says several tokens of a voice at once: they are told as one.
        telling: dict[Voice, None] = {}
        for row, (key, index, token) in enumerate(frame.rows()):
            voice = voices.get(key)
            if voice is None or voice.is_stopped:
                continue
            if index != len(voice.heard):
                if index > len(voice.heard):
                    self._miss(voice)
                continue
            try:
                if voice.first_s is None:
                    self._begin(voice, _num_cached(frame, row), said, now_s)
                is_telling = voice.hear(token)
                if voice.has_called or (voice.choice is not None and voice.choice.stopped):
                    voice.is_stopped = True
                    if key not in ended:
                        voice.abort()
                if is_telling and key not in ended:
                    telling[voice] = None
            except Exception:
                log.exception("a token of request %s could not be told", voice.life.stream.id)
                self.break_off(voice.life)
        for voice in telling:
            life = voice.life
            try:
                if life in said:
                    said[life].append(voice.tell())
                else:
                    said[life] = [voice.tell()]
            except Exception:
                log.exception("a token of request %s could not be told", life.stream.id)
                self.break_off(life)

    def lost(self, replica: str, keys: Sequence[int], *, is_dead: bool = True) -> None:
        with self.held():
            self._take_lost(replica, keys, is_dead)

    def _take_lost(self, replica: str, keys: Sequence[int], is_dead: bool) -> None:
        found = [voice for key in keys if (voice := self._voices.pop(key, None)) is not None]
        for key in keys if self._parting else ():
            self._part(key, None)
        for voice in found:
            voice.key = -1
        if self.seeker is not None:
            self.seeker.forget(found)
        by_life = _by_life(found)
        culprits = self.rescue.judge(replica, by_life) if is_dead else ()
        for life, voices in by_life.items():
            with self.guard(life):
                if life in culprits:
                    self._fail_or_refuse(life, WorkerKilled(WORKER_KILLED))
                else:
                    self._lose(life, voices)
        self.rescue.look()

    def _miss(self, voice: Voice) -> None:
        """A token that it should have heard did not come: nothing its worker says of it is of use any more."""
        log.warning("request %s missed a token of %s", voice.life.stream.id, voice.life.replica)
        self._release(voice)
        self._displaced.append(voice)

    def _begin(self, voice: Voice, num_cached: int, said: dict[Life, list[Part]], now_s: float) -> None:
        """Its first token is here."""
        voice.first_s = now_s
        voice.num_cached = num_cached
        if voice.life.first_s is None:
            voice.life.first_s = now_s
        prompt = voice.tell_prompt()
        if prompt is not None:
            said.setdefault(voice.life, []).append(prompt)

    def _tell(self, said: dict[Life, list[Part]], step: int, now_s: float) -> None:
        for life, parts in said.items():
            if life.stream.is_closed:  # it broke in this frame
                continue
            try:
                usage = life.usage() if life.counts else None
                life.stream.append(parts, step=step, age_s=life.age_s(now_s), usage=usage)
            except Exception:
                log.exception("a step of request %s could not be told", life.stream.id)
                self.break_off(life)

    def guard(self, life: Life) -> "Guard":
        """What goes wrong in here ends this life alone."""
        return Guard(self, life)

    def mistold(self, life: Life, error: Exception) -> None:
        """Something of it could not be told, for a fault of ours."""
        log.error("something of request %s could not be told", life.stream.id, exc_info=error)
        self.break_off(life)

    def break_off(self, life: Life) -> None:
        """Something of a reply is lost: it ends now, so that it cannot end as if it were whole."""
        if life.refuse(HeadraceError(INTERNAL.message)):
            return  # who opens it hears of it, and drops it
        try:
            self.fail(life, INTERNAL)
        except Exception:
            log.exception("request %s could not be ended as it should", life.stream.id)
            if not life.stream.is_closed:
                life.stream.end(Ending(Usage(), INTERNAL))

    def _take_ends(self, frame: Frame, said: dict[Life, list[Part]], now_s: float) -> None:
        over: list[tuple[Life, End]] = []
        failed: list[tuple[Life, End]] = []
        for end in frame.ended:
            voice = self._voices.pop(end.key, None)
            if voice is None:
                self._part(end.key, end)
                continue
            life = voice.life
            if voice.is_attached:
                voice.num_replayed = end.counters.replayed
            if not voice.is_stopped and _is_cut_off(voice, end):
                voice.key = -1
                self._displaced.append(voice)
                continue
            voice.end = end
            if end.outcome is not Outcome.FINISHED and not voice.is_stopped:
                failed.append((life, end))
                continue
            try:
                self._close(voice, end.reason, said, now_s)
            except Exception as error:  # noqa: BLE001 - as in `guard`, which would take longer for every end
                self.mistold(life, error)
                continue
            if not life.left:
                life.submitted_s = voice.submitted_s
                over.append((life, end))
        self._tell(said, frame.step, now_s)
        for life, end in over:
            self._finish(life, end, now_s)
        for life, end in failed:
            self._finish(life, end, now_s, failure_of_end(end))

    def _part(self, key: int, end: End | None) -> None:
        """What became, with its worker, of a voice whose life was over before."""
        voice = self._parting.pop(key, None)
        if voice is None:
            return
        if end is not None:
            voice.end = end
        voice.life.part(None if end is None else end.waits)

    def _finish(self, life: Life, end: End, now_s: float, failure: Failure | None = None) -> None:
        if life.stream.is_closed:
            return
        try:
            if failure is None:
                self._end(life, end, now_s)
            else:
                life.close(None, now_s)
                self.fail(life, failure, end.waits)
        except Exception as error:  # noqa: BLE001 - likewise
            self.mistold(life, error)

    def _close(self, voice: Voice, reason: str, said: dict[Life, list[Part]], now_s: float) -> None:
        finish = voice.close(reason)
        parts = said.setdefault(voice.life, [])
        prompt = voice.tell_prompt()
        if prompt is not None:
            parts.append(prompt)
        parts.append(voice.tell(finish))
        voice.life.left -= 1
        if voice.first_s is not None and len(voice.heard) > 1:
            voice.life.itl_s = (now_s - voice.first_s) / (len(voice.heard) - 1)

    def _end(self, life: Life, end: End, arrival_s: float) -> None:
        life.close(end.waits, arrival_s)
        if self._detokenise_s > 0.0:
            asyncio.get_running_loop().call_later(self._detokenise_s, self._tell_end, life)
        else:
            self._tell_end(life)

    def _tell_end(self, life: Life) -> None:
        if not life.stream.is_closed:
            life.tell_end(self._clock.now_s())

    def _refuse(self, refusal: Refusal) -> None:
        """All keys of a refusal are of one life."""
        voices = [voice for key in refusal.keys if (voice := self._voices.pop(key, None)) is not None]
        if not voices:
            for key in refusal.keys:
                self._part(key, None)
            return
        for voice in voices:
            voice.key = -1
        life = voices[0].life
        with self.guard(life):
            if refusal.code == _NOT_ATTACHABLE:
                seeker = self.seeker
                self._displaced += [voice for voice in voices if seeker is None or not seeker.refused(voice)]
                return
            error = error_of(refusal)
            if not life.refuse(error):  # it was promised an answer by another: later, or elsewhere
                life.refusal = error.message
                after_s = error.retry_after_s if isinstance(error, Refused) else _REFUSED_S
                self.rescue.displace(life, voices, after_s=after_s)

    def _fail_or_refuse(self, life: Life, error: HeadraceError) -> None:
        """Who opens it hears of it; once it is open, its stream does."""
        if not life.refuse(error):
            self.fail(life, failure_of(error))

    def lose(self, life: Life, voices: list[Voice]) -> None:
        """No worker has these any more, be it that they were there or were never found."""
        with self.held():
            self._lose(life, voices)
        self.rescue.look()

    def _lose(self, life: Life, voices: list[Voice], *, after_s: float = 0.0) -> None:
        """Voices that have no worker any more: those that could say nothing more end, the others go on elsewhere."""
        now_s = self._clock.now_s()
        if life.stream.is_closed:
            return
        life.admit()  # a worker may have had it: from here on it is as one that was accepted
        said: dict[Life, list[Part]] = {}
        cut_off = []
        for voice in voices:
            if (reason := voice.over) is not None:
                self._close(voice, reason, said, now_s)
            else:
                cut_off.append(voice)
        self._tell(said, -1, now_s)
        if cut_off:
            self.rescue.displace(life, cut_off, after_s=after_s)
        elif not life.left:
            life.close(None, now_s)
            self._tell_end(life)


def _by_life(voices: Sequence[Voice]) -> dict[Life, list[Voice]]:
    found: dict[Life, list[Voice]] = {}
    for voice in voices:
        found.setdefault(voice.life, []).append(voice)
    return found


def _is_cut_off(voice: Voice, end: End) -> bool:
    """Its worker gave it up, or its last tokens did not come: it has more to say."""
    if end.outcome is Outcome.ABORTED:
        return end.reason != _TAKEN
    counters = end.counters
    num_said = voice.num_replayed + counters.emitted + counters.overrun
    return end.outcome is Outcome.FINISHED and num_said > len(voice.heard)


def _num_cached(frame: Frame, row: int) -> int:
    """Of the prompt of that row's sequence. One number of a frame is read faster without an array of them."""
    found: int = _COUNTER.unpack_from(frame.counters, _COUNTER.size * (row * NUM_COUNTERS + Counter.PROMPT_CACHED))[0]
    return found
