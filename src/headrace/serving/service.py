"""A request's life over workers, once, for every face: prepared, routed, generated, told, explained.

Owns the open lives and what is remembered of past ones. Faces open orders here and read the streams; what workers
say comes in as frames (`core.ports.FrameSink`). Use from one event loop.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256

from msgspec import Struct

from headrace.core.caller import Caller
from headrace.core.errors import ContextLengthExceeded, HeadraceError, ModelNotFound, TimedOut, Unreachable
from headrace.core.hashing import chain_blocks, chain_root
from headrace.core.messages import WorkerCard, WorkerState
from headrace.core.ports import Clock, FrameSink
from headrace.core.request import Request
from headrace.core.stages import Stage, StageClock
from headrace.router.pick import DOWN, pick, score
from headrace.serving.ask import Ask
from headrace.serving.explanation import Explanation, Explanations
from headrace.serving.injection import LateSink
from headrace.serving.life import Life
from headrace.serving.lives import Lives
from headrace.serving.model_text import ModelText
from headrace.serving.order import Order, check_order, check_prompts
from headrace.serving.preparation import encode_prompt, prepare
from headrace.serving.replica_table import ReplicaEnd, ReplicaTable
from headrace.serving.voice import Voice
from headrace.streams.journal import Stream
from headrace.streams.record import Failure

# A request that no worker has said anything to goes to at most this many replicas, one after the other.
MAX_ATTEMPTS = 2
# Fewer prompt tokens than this are hashed in a tenth of a millisecond; handing them to a thread takes as much.
_INLINE_TOKENS = 2048
# As others say that a client closed the request.
CANCELLED = 499


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
        seeds: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._models = {model.name: model for model in models}
        self._aliases = {alias: model.name for model in models for alias in model.aliases}
        self._clock = clock
        self._wall_s = wall_s
        self._secret = secret or secrets.token_bytes(32)
        self._inject = dict(inject or {})
        self._on_finished = on_finished
        self._seeds = seeds
        # One at a time: threads that compute take turns with the loop, and it would wait for each of them.
        self._hashing = asyncio.Lock()
        self._roots: dict[tuple[str, str], bytes] = {}
        self._open: dict[Stream, Life] = {}
        self._explanations = Explanations()
        self._lives = Lives(clock, self._place_again, detokenise_s=self._inject.get(Stage.DETOKENISE, 0.0))
        transfer_s = self._inject.get(Stage.TRANSFER, 0.0)
        self.replicas = replicas(LateSink(self._lives, transfer_s) if transfer_s > 0.0 else self._lives)

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
            raise ModelNotFound(f"The model {name[:128]!r} is not served here: {known} are.", param="model")
        return found

    async def open(self, order: Order, caller: Caller, stages: StageClock) -> Stream:
        """Prepare, route and submit. Returns when every choice is accepted by a worker; else raises, and nothing is
        kept. The caller reads the stream, and says `finished` when it is done with it."""
        check_order(order)
        model = self.model(order.model)
        await self._enter(stages, Stage.TOKENISE)
        prepared = await prepare(model, order.asks, now_s=self._wall_s(), seeds=self._seeds)
        check_prompts(prepared)
        await self._enter(stages, Stage.ROUTE)
        stream = Stream(order.request_id, caller.tenant, order.dialect, model=model.name, created_s=self._wall_s())
        life = Life(stream, caller, stages, model, counts=order.counts)
        life.prepare(prepared)
        await self._place(life)
        self._open[stream] = life
        return stream

    def cancel(self, stream: Stream, why: str) -> None:
        """At once: every choice is aborted and the stream ends, if it had not, with a failure of this code."""
        life = self._open.get(stream)
        if life is not None:
            self._lives.fail(life, Failure(why, "the request was cancelled", status=CANCELLED))

    def pause(self, stream: Stream) -> None:
        """Stop generating until `resume`: nobody reads."""
        life = self._open.get(stream)
        for voice in life.live if life is not None else ():
            voice.pause()

    def resume(self, stream: Stream) -> None:
        life = self._open.get(stream)
        for voice in life.live if life is not None else ():
            voice.resume()

    def finished(self, stream: Stream, stages: StageClock) -> None:
        """The face is done with the stream and has closed its clock. What was not over is cancelled."""
        life = self._open.get(stream)
        if life is None:
            return
        seconds = dict(stages.seconds)
        self.cancel(stream, "disconnected")
        del self._open[stream]
        explanation = life.explain(seconds)
        self._explanations.file(explanation)
        if self._on_finished is not None:
            self._on_finished(explanation)

    def explain(self, request_id: str, caller: Caller) -> Explanation:
        """NotFound for unknown ids and for those of others alike."""
        return self._explanations.find(caller.tenant, request_id)

    async def tokenize(self, name: str, ask: Ask, *, framed: bool = True) -> list[int]:
        """The prompt ids that the ask would have. `framed`: with the model's begin-of-text around a bare text."""
        return await encode_prompt(self.model(name), ask, now_s=self._wall_s(), framed=framed)

    async def detokenize(self, name: str, ids: Sequence[int]) -> str:
        return await asyncio.to_thread(self.model(name).tokenizer.decode, ids)

    async def _enter(self, stages: StageClock, stage: Stage) -> None:
        stages.enter(stage, self._clock.now_s())
        delay_s = self._inject.get(stage, 0.0)
        if delay_s > 0.0:
            await asyncio.sleep(delay_s)

    async def _place(self, life: Life) -> None:
        """Submit a life to one replica, wholly; to another one if the first is gone before it has answered."""
        await self._hash_ahead(life)
        while True:
            replica = self._pick(life)
            admitted = life.admitted()
            try:
                self._submit(life, replica, life.voices)
                await admitted
                return
            except Unreachable:
                self._lives.drop(life)
                if life.attempts >= MAX_ATTEMPTS or not self._others(life):
                    raise
                life.stages.enter(Stage.ROUTE, self._clock.now_s())
            except BaseException:
                self._lives.drop(life)
                raise

    def _place_again(self, life: Life, voices: Sequence[Voice]) -> None:
        """Voices that have said nothing and lost their worker; raises where they cannot be placed."""
        if life.attempts >= MAX_ATTEMPTS:
            raise Unreachable("the worker was lost")
        self._submit(life, self._pick(life), voices)

    def _pick(self, life: Life) -> ReplicaEnd:
        replicas = self.replicas.of(life.model.name)
        chosen = pick(
            [
                score(replica.queued_s, replica.load.waiting + replica.load.running)
                if replica.is_ready and replica.name not in life.tried
                else DOWN
                for replica in replicas
            ]
        )
        if chosen is None:
            raise Unreachable(f"no worker of {life.model.name} is ready")
        return replicas[chosen]

    def _others(self, life: Life) -> bool:
        replicas = self.replicas.of(life.model.name)
        return any(replica.is_ready and replica.name not in life.tried for replica in replicas)

    def _submit(self, life: Life, replica: ReplicaEnd, voices: Sequence[Voice]) -> None:
        card = replica.card
        assert card is not None, "a ready replica has a card"
        _check_context(life, card)
        root = self._root(life.caller.tenant, card)
        chains = life.chains.get((root, card.block_size))
        if chains is None:
            chains = life.chains[root, card.block_size] = _chain(life, root, card.block_size)
        now_s = self._clock.now_s()
        life.submitted(replica.name, card.fingerprint, now_s)
        age_s = life.age_s(now_s)
        parts = [(run, _request(run[0], life, root, chains[id(run[0].prepared)], age_s)) for run in _adjacent(voices)]
        self._lives.submit(replica, parts)

    async def _hash_ahead(self, life: Life) -> None:
        """Long prompts are hashed off the loop, before a replica is picked: all of a version agree on the hashes."""
        cards = (replica.card for replica in self.replicas.of(life.model.name) if replica.is_ready)
        card = next((card for card in cards if card is not None), None)
        if card is None or life.num_prompt_tokens <= _INLINE_TOKENS:
            return
        _check_context(life, card)
        root = self._root(life.caller.tenant, card)
        async with self._hashing:
            life.chains[root, card.block_size] = await asyncio.to_thread(_chain, life, root, card.block_size)

    def _root(self, tenant: str, card: WorkerCard) -> bytes:
        version = card.fingerprint or card.version
        found = self._roots.get((tenant, version))
        if found is None:
            salt = hmac.new(self._secret, tenant.encode(), sha256).digest()
            found = self._roots[tenant, version] = chain_root(salt=salt, version=version)
        return found


def _check_context(life: Life, card: WorkerCard) -> None:
    """Here as well as in the engine: what cannot run is not sent."""
    num_prompt = max((len(prepared.prompt_ids) for prepared in life.asks), default=0)
    if card.context_len and num_prompt >= card.context_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens; the context holds {card.context_len}, one of them for output",
            param="prompt",
        )


def _chain(life: Life, root: bytes, block_size: int) -> dict[int, tuple[bytes, ...]]:
    return {id(prepared): chain_blocks(root, prepared.prompt_ids, block_size) for prepared in life.asks}


def _adjacent(voices: Sequence[Voice]) -> list[list[Voice]]:
    """Neighbouring choices of the same prompt together: they are one part of a submission."""
    runs: list[list[Voice]] = []
    for voice in voices:
        last = runs[-1][-1] if runs else None
        if last is not None and last.prepared is voice.prepared and last.choice_of_ask + 1 == voice.choice_of_ask:
            runs[-1].append(voice)
        else:
            runs.append([voice])
    return runs


def _request(voice: Voice, life: Life, root: bytes, hashes: tuple[bytes, ...], age_s: float) -> Request:
    ask, caller = voice.prepared.ask, life.caller
    left_s = None if ask.deadline_s is None else ask.deadline_s - age_s
    if left_s is not None and left_s <= 0.0:
        raise TimedOut("the deadline has passed", param="deadline_s")
    return Request(
        request_id=life.stream.id,
        tenant=caller.tenant,
        prompt_ids=voice.prepared.prompt_ids,
        max_tokens=ask.max_tokens,
        sampling=voice.prepared.sampling,
        choice=voice.choice_of_ask,
        tier=caller.tier if ask.priority is None else min(caller.tier, ask.priority),
        ttft_target_s=ask.ttft_target_s,
        itl_target_s=ask.itl_target_s,
        queue_timeout_s=ask.queue_timeout_s,
        deadline_s=left_s,
        prefix_root=root,
        block_hashes=hashes,
    )
