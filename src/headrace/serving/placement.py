"""Which replica a request goes to, and how it gets there. Owns prefix salts and hashes, and what is tried again.

Everything of a life goes to one replica. Who needs one asks here; frames that come back are for `serving.lives`, and
when to try again once a worker was lost is for `serving.recovery`.
"""

import asyncio
import hmac
from collections.abc import Container, Sequence
from hashlib import sha256

from msgspec.structs import replace

from headrace.core.errors import ContextLengthExceeded, TimedOut, Unreachable
from headrace.core.hashing import chain_blocks, chain_root
from headrace.core.messages import WorkerCard
from headrace.core.ports import Clock
from headrace.core.request import Request, SamplingParams
from headrace.core.stages import Stage
from headrace.router.pick import pick, score
from headrace.serving.life import Life, numerics_of
from headrace.serving.lives import Lives
from headrace.serving.quarantine import Quarantine
from headrace.serving.replica_table import ReplicaEnd, ReplicaTable
from headrace.serving.voice import Voice

# A request is sent to at most this many replicas, one after the other, where one turns out not to be ready.
MAX_ATTEMPTS = 2
# Fewer prompt tokens than this are hashed in a tenth of a millisecond; handing them to a thread takes as much.
_INLINE_TOKENS = 2048


class Placement:
    """`secret` salts prefix hashes: with it no tenant can tell what another's prompts hold."""

    def __init__(self, lives: Lives, replicas: ReplicaTable, clock: Clock, secret: bytes) -> None:
        self._lives = lives
        self._replicas = replicas
        self._clock = clock
        self._secret = secret
        self.quarantine = Quarantine()
        # One at a time: threads that compute take turns with the loop, and it would wait for each of them.
        self._hashing = asyncio.Lock()
        self._roots: dict[tuple[str, str], bytes] = {}

    async def place(self, life: Life) -> None:
        """Submit a life to one replica, wholly; to another one if the first is not ready after all. One that is lost later is
        a matter of `serving.recovery`. WorkerKilled for what is known to kill them."""
        life.kills = self.quarantine.kills_of(life, self._clock.now_s())
        if life.num_prompt_tokens > _INLINE_TOKENS:
            await self._hash_ahead(life)
        while True:
            replica = self._pick(life)
            admitted = life.admitted()
            try:
                self._submit(life, replica, life.voices)
                for voice in life.voices:
                    voice.listen()
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
            finally:
                del admitted  # it holds an error whose traceback holds this frame

    def find(self, life: Life, *, avoided: Container[str] = ()) -> ReplicaEnd | None:
        """The best that is ready now and can go on with a life: once that has spoken, one that computes the same
        numbers."""
        has_spoken = life.has_spoken
        able = [
            replica
            for replica in self._replicas.of(life.model.name)
            if replica.is_ready
            and replica.name not in avoided
            and not (has_spoken and replica.card is not None and numerics_of(replica.card) != life.numerics)
        ]
        chosen = pick([score(replica.queued_s, replica.load.waiting + replica.load.running) for replica in able])
        return None if chosen is None else able[chosen]

    def replay(self, life: Life, voices: Sequence[Voice], replica: ReplicaEnd) -> None:
        """Let voices go on there, after what they have heard. Raises where they cannot; then they are as they were."""
        self._submit(life, replica, voices)
        life.replayed_tokens += sum(len(voice.heard) for voice in voices)

    def _pick(self, life: Life) -> ReplicaEnd:
        replica = self.find(life, avoided=life.tried)
        if replica is None:
            raise Unreachable(f"no worker of {life.model.name} is ready")
        return replica

    def _others(self, life: Life) -> bool:
        replicas = self._replicas.of(life.model.name)
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
        for voice in voices:
            _bound(voice, card)
        life.submitted(replica.name, card, now_s)
        age_s = life.age_s(now_s)
        parts = [(run, _request(run[0], life, root, chains[id(run[0].prepared)], age_s)) for run in _adjacent(voices)]
        self._lives.submit(replica, parts)
        life.stream.bind(card.fingerprint)

    async def _hash_ahead(self, life: Life) -> None:
        """Long prompts are hashed off the loop, before a replica is picked: all of a version agree on the hashes."""
        cards = (replica.card for replica in self._replicas.of(life.model.name) if replica.is_ready)
        card = next((card for card in cards if card is not None), None)
        if card is None:
            return
        _check_context(life, card)
        root = self._root(life.caller.tenant, card)
        async with self._hashing:
            life.chains[root, card.block_size] = await asyncio.to_thread(_chain, life, root, card.block_size)

    def _root(self, tenant: str, card: WorkerCard) -> bytes:
        version = numerics_of(card)
        found = self._roots.get((tenant, version))
        if found is None:
            salt = hmac.new(self._secret, tenant.encode(), sha256).digest()
            found = self._roots[tenant, version] = chain_root(salt=salt, version=version)
        return found


def _check_context(life: Life, card: WorkerCard) -> None:
    """Here as well as in the engine: what cannot run is not sent."""
    if life.num_prompt_tokens < card.context_len or not card.context_len:
        return
    num_prompt = max([len(prepared.prompt_ids) for prepared in life.asks], default=0)
    if num_prompt >= card.context_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens; the context holds {card.context_len}, one of them for output",
            param="prompt",
        )


def _chain(life: Life, root: bytes, block_size: int) -> dict[int, tuple[bytes, ...]]:
    return {id(prepared): chain_blocks(root, prepared.prompt_ids, block_size) for prepared in life.asks}


def _bound(voice: Voice, card: WorkerCard) -> None:
    """Its end, which stays where it is once it has spoken: its next worker may hold more, or less."""
    ask, num_prompt = voice.prepared.ask, len(voice.prepared.prompt_ids)
    if ask.max_tokens is not None:
        voice.most_tokens = ask.max_tokens
    elif not voice.heard and card.context_len and card.blocks:
        voice.most_tokens = max(1, min(card.context_len, card.blocks * card.block_size) - num_prompt)


def _adjacent(voices: Sequence[Voice]) -> list[list[Voice]]:
    """Neighbouring choices of the same prompt together, as long as they have not spoken: they are one part of a
    submission."""
    runs: list[list[Voice]] = []
    for voice in voices:
        last = runs[-1][-1] if runs else None
        if last is not None and not (last.heard or voice.heard) and _follows(voice, last):
            runs[-1].append(voice)
        else:
            runs.append([voice])
    return runs


def _follows(voice: Voice, last: Voice) -> bool:
    return last.prepared is voice.prepared and last.choice_of_ask + 1 == voice.choice_of_ask


def _sampling(voice: Voice) -> SamplingParams:
    """What was told of the prompt is not asked for again."""
    sampling = voice.prepared.sampling
    return sampling if sampling.prompt_logprobs is None else replace(sampling, prompt_logprobs=None)


def _request(voice: Voice, life: Life, root: bytes, hashes: tuple[bytes, ...], age_s: float) -> Request:
    ask, caller = voice.prepared.ask, life.caller
    left_s = None if ask.deadline_s is None else ask.deadline_s - age_s
    if left_s is not None and left_s <= 0.0:
        raise TimedOut("the deadline has passed", param="deadline_s")
    return Request(
        request_id=life.stream.id,
        tenant=caller.tenant,
        prompt_ids=voice.prepared.prompt_ids,
        # With what is replayed: that counts as output.
        max_tokens=voice.most_tokens if voice.heard and voice.most_tokens else ask.max_tokens,
        sampling=_sampling(voice) if voice.heard else voice.prepared.sampling,
        choice=voice.choice_of_ask,
        tier=caller.tier if ask.priority is None else min(caller.tier, ask.priority),
        ttft_target_s=ask.ttft_target_s,
        itl_target_s=ask.itl_target_s,
        # Whoever has heard something is past that wait.
        queue_timeout_s=None if voice.heard else ask.queue_timeout_s,
        deadline_s=left_s,
        replay_ids=tuple(voice.heard),
        prefix_root=root,
        block_hashes=hashes,
    )
