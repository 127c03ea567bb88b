"""A request's life over workers, once, for every face: prepared, routed, generated, told, explained.

Owns the open lives and what is remembered of past ones. Faces open orders here and read the streams; what workers
say comes in as frames (`core.ports.FrameSink`). Use from one event loop.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec import Struct

from headrace.core.caller import Caller
from headrace.core.errors import HeadraceError, InvalidModel, ModelNotFound
from headrace.core.messages import WorkerState
from headrace.core.ports import Clock, FrameSink
from headrace.core.stages import Stage, StageClock
from headrace.serving.ask import Ask
from headrace.serving.birth import save_order
from headrace.serving.explanation import Explanation, Explanations
from headrace.serving.injection import LateSink
from headrace.serving.life import Life
from headrace.serving.lives import Lives
from headrace.serving.model_text import ModelText
from headrace.serving.order import Order, check_order, check_prompts
from headrace.serving.placement import Placement
from headrace.serving.preparation import encode_prompt, prepare
from headrace.serving.recovery import Recovery
from headrace.serving.replica_table import ReplicaEnd, ReplicaTable
from headrace.serving.revival import Revival
from headrace.serving.scribe import Scribe
from headrace.streams.journal import Birth, Journal, Kept
from headrace.streams.record import Dialect, Ending, Failure, Usage
from headrace.streams.stream import Stream

log = logging.getLogger("headrace.serving")

MOVED = Failure("stream_moved", "Another gateway goes on with this stream: read it there.", 503)
# As others say that a client closed the request.
CANCELLED = 499
# Records of a stream whose text state is not rebuilt within a few tens of milliseconds.
LONG = 2000
# A worker says that something is over after the step in which it hears of it.
_PARTING_S = 2.0


class Dialects(Protocol):
    """How the faces' ways to word streams go into a journal and come back."""

    def encode(self, dialect: Dialect) -> bytes: ...

    def decode(self, data: bytes) -> Dialect:
        """Raises InvalidInput."""


class ModelCard(Struct, frozen=True):
    """A model as clients see it. `states` has one entry per replica; a model is served while one is ready."""

    name: str
    aliases: tuple[str, ...] = ()
    created_s: float = 0.0
    context_len: int = 0
    owned_by: str = "headrace"
    states: tuple[WorkerState, ...] = ()
    fingerprint: str = ""

    @property
    def is_ready(self) -> bool:
        return WorkerState.READY in self.states


class Service:
    """`replicas` is given where frames go and answers with the table of replicas. `secret` salts prefix hashes: with
    it no tenant can tell what another's prompts hold. `inject` are seconds to sleep when a stage is entered."""

    def __init__(
        self,
        models: Sequence[ModelText],
        replicas: Callable[[FrameSink], ReplicaTable],
        *,
        clock: Clock,
        wall_s: Callable[[], float] = time.time,
        secret: bytes | None = None,
        inject: Mapping[str, float] | None = None,
        on_finished: Callable[[Explanation], None] | None = None,
        seeds: Callable[[], int] = lambda: int.from_bytes(os.urandom(8), "little") >> 1,
        journal: Journal | None = None,
        dialects: Dialects | None = None,
    ) -> None:
        self._models = {model.name: model for model in models}
        self._aliases = {alias: model.name for model in models for alias in model.aliases}
        self._clock = clock
        self._wall_s = wall_s
        self._inject = dict(inject or {})
        self._on_finished = on_finished
        self._seeds = seeds
        self._open: dict[Stream, Life] = {}
        self._explanations = Explanations()
        self._lives = Lives(clock, detokenise_s=self._inject.get(Stage.DETOKENISE, 0.0))
        transfer_s = self._inject.get(Stage.TRANSFER, 0.0)
        self.replicas = replicas(LateSink(self._lives, transfer_s) if transfer_s > 0.0 else self._lives)
        self._placement = Placement(self._lives, self.replicas, clock, secret or secrets.token_bytes(32))
        self._recovery = Recovery(self._lives, self._placement, clock)
        self._dialects = dialects
        self._scribe: Scribe | None = None
        self._revival: Revival | None = None
        if journal is not None and dialects is not None:
            self._scribe = Scribe(journal, self._abandon)
            self._lives.held = self._scribe.held
            self._revival = Revival(self._lives, self.replicas, self._models, dialects.decode, clock, wall_s)

    @property
    def num_open(self) -> int:
        """Streams that no face has finished with."""
        return len(self._open)

    @property
    def num_sequences(self) -> int:
        """Sequences that workers are believed to hold."""
        return self._lives.num_voices

    async def warm_up(self) -> None:
        """Do now what the first request of each model would wait for."""
        for model in self._models.values():
            if model.template is not None:
                with suppress(HeadraceError):  # whoever needs a template that does not work is told
                    await model.template.describe()

    def models(self) -> list[ModelCard]:
        return [self.card(model) for model in self._models.values()]

    def card(self, model: ModelText) -> ModelCard:
        replicas = self.replicas.of(model.name)
        cards = [replica.card for replica in replicas if replica.card is not None]
        return ModelCard(
            name=model.name,
            aliases=model.aliases,
            created_s=model.created_s,
            context_len=next((card.context_len for card in cards if card.context_len), model.context_len),
            states=tuple(replica.state for replica in replicas),
            fingerprint=next((card.fingerprint for card in cards if card.fingerprint), ""),
        )

    def model(self, name: str) -> ModelText:
        """By name or alias; ModelNotFound says which there are."""
        found = self._models.get(self._aliases.get(name, name))
        if found is None:
            known = ", ".join([*self._models, *self._aliases])
            raise ModelNotFound(f"The model {name[:128]!r} is not served here; these are: {known}.", param="model")
        return found

    async def open(self, order: Order, caller: Caller, stages: StageClock) -> Stream:
        """Prepare, route and submit. Returns when every choice is accepted by a worker; else raises, and nothing is
        kept. The caller reads the stream, and says `finished` when it is done with it."""
        check_order(order)
        model = self.model(order.model)
        if not model.tokenizer.can_stream:
            raise InvalidModel("The model's vocabulary cannot be turned back into text token by token.")
        stages.enter(Stage.TOKENISE, self._clock.now_s())
        if self._inject:
            await self._delay(Stage.TOKENISE)
        prepared = await prepare(model, order.asks, now_s=self._wall_s(), seeds=self._seeds)
        check_prompts(prepared)
        stages.enter(Stage.ROUTE, self._clock.now_s())
        if self._inject:
            await self._delay(Stage.ROUTE)
        stream = Stream(order.request_id, caller.tenant, order.dialect, model=model.name, created_s=self._wall_s())
        life = Life(stream, caller, stages, model, counts=order.counts)
        life.prepare(prepared)
        if order.streamed and not caller.no_log:
            self._follow(life, order.grace_s)
        try:
            await self._placement.place(life)
        except BaseException:
            if stream.is_begun and not stream.is_closed:  # it is in the journal, and was to be read
                life.tell_end(self._clock.now_s(), _cancelled("disconnected"))
            life.voices.clear()  # as in `finished`
            if self._scribe is not None:
                self._scribe.forget(stream)
            raise
        self._open[stream] = life
        return stream

    async def revive_beside(self, kept: Kept) -> Stream | None:
        """As `revive`; where that takes long, others are served meanwhile."""
        assert self._revival is not None, "what revives streams has a journal"
        recalled = None
        if len(kept.records) > LONG:
            with suppress(Exception):  # it will be found again, and told
                recalled = await asyncio.to_thread(self._revival.recall, kept)
        return self.revive(kept, recalled)

    def revive(self, kept: Kept, recalled: Life | None = None) -> Stream | None:
        """Speak for a stream that another life of this gateway, or another gateway, kept; None where that cannot be.
        If it has not ended it goes on, and who put it up says `finished` when it has. `recalled` is its life, where that
        is known already."""
        assert self._scribe is not None and self._revival is not None, "what revives streams has a journal"
        try:
            stream = self._revival.stream(kept) if recalled is None else recalled.stream
        except Exception as error:  # noqa: BLE001 - a loop of the top: an older version's must not keep others away
            self._scribe.bury(kept.birth, len(kept.records) + 1, self._dead(kept, error))
            return None
        if stream.is_ended:
            return stream
        self._scribe.follow(stream)
        try:
            life = self._revival.life(kept, stream) if recalled is None else recalled
        except Exception as error:  # noqa: BLE001 - likewise; it can be read as far as it came
            stream.end(Ending(Usage(), self._dead(kept, error)))
            return stream
        self._open[stream] = life
        with self._lives.guard(life):
            self._revival.adopt(life)
        return stream

    def restored(self, kept: Kept) -> Stream:
        """One that another gateway speaks for, as far as it was kept: to be read, and not to be spoken for. Raises
        InvalidInput."""
        assert self._revival is not None, "what restores streams has a journal"
        return self._revival.stream(kept)

    def _dead(self, kept: Kept, error: Exception) -> Failure:
        """Why a stream of the journal does not go on."""
        if isinstance(error, HeadraceError):
            log.warning("stream %s of the journal cannot go on: %s", kept.birth.stream, error.message)
            return Failure("stream_lost", error.message, 503)
        log.error("stream %s of the journal cannot go on", kept.birth.stream, exc_info=error)
        return Failure("stream_lost", "this stream cannot go on after its gateway was lost", 503)

    def _follow(self, life: Life, grace_s: float | None) -> None:
        if self._scribe is None or self._dialects is None:
            return
        encode, stream, clock = self._dialects.encode, life.stream, self._clock

        def birth() -> Birth:
            since_s = self._wall_s() - stream.created_s
            return Birth(
                stream.id,
                stream.tenant,
                stream.model,
                stream.fingerprint,
                stream.created_s,
                save_order(life, life.age_s(clock.now_s()) - since_s),
                encode(stream.dialect),
                grace_s,
            )

        self._scribe.follow(stream, birth)

    def _abandon(self, stream: Stream) -> None:
        """Another gateway has taken it over: whoever reads it here is to ask again."""
        life = self._open.get(stream)
        if life is not None:
            self._lives.drop(life)
        stream.abandon(MOVED)

    def cancel(self, stream: Stream, why: str) -> None:
        """At once: every choice is aborted and the stream ends, if it had not, with a failure of this code."""
        life = self._open.get(stream)
        if life is not None:
            self._lives.fail(life, _cancelled(why))

    def pause(self, stream: Stream) -> None:
        """Stop generating until `resume`: nobody reads."""
        life = self._open.get(stream)
        for voice in life.live if life is not None else ():
            voice.pause()

    def resume(self, stream: Stream) -> None:
        life = self._open.get(stream)
        for voice in life.live if life is not None else ():
            voice.resume()

    def parting(self, stream: Stream) -> Awaitable[None] | None:
        """Where it has ended and workers have yet to say where its time with them went: until they have, or take long.
        Meanwhile it is explained as far as is known."""
        life = self._open.get(stream)
        if life is None or not life.is_parting:
            return None
        self._explanations.file(life.explain(life.seconds))
        return life.parted(_PARTING_S)

    def finished(self, stream: Stream, stages: StageClock | None = None) -> Explanation | None:
        """The face is done with the stream and has closed its clock; one that was revived has no other than its own.
        What was not over is cancelled. None: this was said before."""
        life = self._open.get(stream)
        if life is None:
            return None
        if not stream.is_closed or life.left:
            self.cancel(stream, "disconnected")
        life.settle()
        seconds = life.stages.close(self._clock.now_s()) if stages is None else dict(stages.seconds)
        del self._open[stream]
        explanation = life.explain(seconds)
        life.voices.clear()  # they refer to it: a cycle would keep all of it until a collection
        self._explanations.file(explanation)
        if self._on_finished is not None:
            self._on_finished(explanation)
        return explanation

    def replica_changed(self, replica: ReplicaEnd) -> None:
        """A replica's state or connection is another than before."""
        if self._revival is not None:
            self._revival.look()
        self._recovery.replica_changed(replica)

    def explain(self, request_id: str, caller: Caller) -> Explanation:
        """NotFound for unknown ids and for those of others alike."""
        return self._explanations.find(caller.tenant, request_id)

    async def tokenize(self, name: str, ask: Ask, *, framed: bool = True) -> list[int]:
        """The prompt ids that the ask would have. `framed`: with the model's begin-of-text around a bare text."""
        return await encode_prompt(self.model(name), ask, now_s=self._wall_s(), framed=framed)

    async def detokenize(self, name: str, ids: Sequence[int]) -> str:
        return await asyncio.to_thread(self.model(name).tokenizer.decode, ids)

    async def _delay(self, stage: Stage) -> None:
        delay_s = self._inject.get(stage, 0.0)
        if delay_s > 0.0:
            await asyncio.sleep(delay_s)


def _cancelled(why: str) -> Failure:
    return Failure(why, "the request was cancelled", status=CANCELLED)
