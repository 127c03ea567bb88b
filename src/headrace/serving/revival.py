"""Streams that a journal kept, spoken for again. Owns which worker is asked for a sequence, and when that is given up.

The text state of each choice is rebuilt from the ids it has said. Its workers are then asked, one after the other,
whether they still have its sequences; what none of them has goes on by replay.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headrace.core.errors import InvalidInput, Refused
from headrace.core.ports import Clock
from headrace.core.stages import Stage, StageClock
from headrace.serving.birth import read_order
from headrace.serving.life import Life, numerics_of
from headrace.serving.lives import Lives
from headrace.serving.model_text import ModelText
from headrace.serving.replica_table import ReplicaEnd, ReplicaTable
from headrace.serving.voice import Voice
from headrace.streams.journal import Kept
from headrace.streams.record import Dialect
from headrace.streams.stream import Stream

# Workers that are not ready by then do not have it any more.
PATIENCE_S = 3.0
LOOK_S = 0.1


@dataclass(slots=True)
class _Search:
    """`is_waiting` for a worker that can be asked; else one is asked."""

    asked: set[str]
    until_s: float
    is_waiting: bool = False


class Revival:
    """`dialects` reads what a face wrote of how a stream is worded."""

    def __init__(
        self,
        lives: Lives,
        replicas: ReplicaTable,
        models: Mapping[str, ModelText],
        dialects: Callable[[bytes], Dialect],
        clock: Clock,
        wall_s: Callable[[], float],
    ) -> None:
        self._lives = lives
        self._replicas = replicas
        self._models = models
        self._dialects = dialects
        self._clock = clock
        self._wall_s = wall_s
        self._searches: dict[Voice, _Search] = {}
        self._timer: asyncio.TimerHandle | None = None
        lives.seeker = self

    def stream(self, kept: Kept) -> Stream:
        """As it was. InvalidInput where it cannot be worded here."""
        birth = kept.birth
        stream = Stream(
            birth.stream,
            birth.tenant,
            self._dialects(birth.dialect),
            model=birth.model,
            fingerprint=birth.fingerprint,
            created_s=birth.created_s,
        )
        stream.restore(kept.records)
        return stream

    def life(self, kept: Kept, stream: Stream) -> Life:
        """Of a stream that has not ended, as it was when the last record was kept. HeadraceError where it cannot go
        on here."""
        order = read_order(kept.birth.order)
        model = self._models.get(kept.birth.model)
        if model is None:
            raise InvalidInput(f"the model {kept.birth.model!r} is not served here any more")
        now_s = self._clock.now_s()
        age_s = order.age_s + max(0.0, self._wall_s() - kept.birth.created_s)
        # Where the time of its earlier life went is not known; it waits for its next token since then.
        stages = StageClock(Stage.TRANSFER, now_s - age_s)
        life = Life(stream, order.caller, stages, model, counts=order.counts)
        life.prepare([ask.prepared() for ask in order.asks])
        for voice, most_tokens in zip(life.voices, order.most_tokens, strict=True):
            voice.most_tokens = most_tokens
        life.revive(kept.records, order.numerics, age_s, now_s)
        return life

    def recall(self, kept: Kept) -> Life:
        """Both at once. Nobody else knows either yet: a thread may do it."""
        return self.life(kept, self.stream(kept))

    def adopt(self, life: Life) -> None:
        """Find its sequences; what has nothing more to say ends here."""
        over = [voice for voice in life.live if voice.over is not None]
        if over or not life.left:
            self._lives.lose(life, over)
        until_s = self._clock.now_s() + PATIENCE_S
        for voice in life.live:
            if not life.stream.is_closed:
                self._searches[voice] = _Search(set(), until_s)
                self._go_on(voice)

    @property
    def num_sought(self) -> int:
        """Voices of which no worker has said yet that it has them."""
        return len(self._searches)

    def refused(self, voice: Voice) -> bool:
        """A worker does not have it. Whether another will be asked."""
        return voice in self._searches and self._ask_next(voice)

    def forget(self, voices: Iterable[Voice]) -> None:
        """They are found, or lost, or over."""
        for voice in voices if self._searches else ():
            self._searches.pop(voice, None)

    def look(self) -> None:
        """Whom to ask may have changed, or the time is over."""
        for voice, search in list(self._searches.items()):
            if search.is_waiting and self._searches.get(voice) is search:
                self._go_on(voice)

    def _go_on(self, voice: Voice) -> None:
        """Ask a worker that is there, wait for one that may come, or give it up."""
        life = voice.life
        with self._lives.guard(life):
            if not self._ask_next(voice):
                self._lives.lose(life, [voice])

    def _ask_next(self, voice: Voice) -> bool:
        """False: all were asked, or nobody comes any more; the search is over then."""
        search = self._searches[voice]
        search.is_waiting = False
        replicas = self._replicas.of(voice.life.model.name)
        for replica in replicas:
            if replica.is_ready and replica.name not in search.asked and _computes(replica, voice.life):
                try:
                    self._lives.attach(replica, voice)
                except Refused:  # it is gone, or has no room: once more at the next look
                    continue
                search.asked.add(replica.name)
                return True
        may_come = any(_may_come(replica, voice.life) and replica.name not in search.asked for replica in replicas)
        if may_come and self._clock.now_s() < search.until_s:
            search.is_waiting = True
            self._arm()
            return True
        del self._searches[voice]
        return False

    def _arm(self) -> None:
        """One timer for all of them: there may be thousands."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.look()


def _computes(replica: ReplicaEnd, life: Life) -> bool:
    return replica.card is not None and numerics_of(replica.card) == life.numerics


def _may_come(replica: ReplicaEnd, life: Life) -> bool:
    return not replica.is_ready or _computes(replica, life)
