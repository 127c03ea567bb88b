"""One request that is being answered: its stream, its choices, its time. Owns their state; hears no frame itself."""

import asyncio
from collections.abc import Sequence
from itertools import compress

from msgspec.structs import astuple

from headrace.core.caller import Caller
from headrace.core.errors import HeadraceError
from headrace.core.event import Waits
from headrace.core.messages import WorkerCard
from headrace.core.stages import Stage, StageClock
from headrace.serving.explanation import Explanation
from headrace.serving.model_text import ModelText
from headrace.serving.preparation import Prepared
from headrace.serving.voice import Voice
from headrace.streams.record import Ending, Failure, Record, Usage
from headrace.streams.stream import Stream

# An enumeration looks for a value by way of several calls.
_NAMES = {stage: stage.value for stage in Stage}
# Whose time each of `Waits` is.
_WAITS = (
    Stage.WAIT_CAPACITY,
    Stage.WAIT_FAIRNESS,
    Stage.PREFILL,
    Stage.PREFILL_OTHERS,
    Stage.DECODE,
    Stage.PREEMPTED,
    Stage.CLIENT,
)


class Parting:
    """A life that ended here while `left` of its choices were with workers; `waits` are where the time of `interval_s`
    went, as far as is known."""

    __slots__ = ("interval_s", "left", "over", "waits")

    def __init__(self, left: int, waits: Waits, interval_s: float) -> None:
        self.left = left
        self.waits = waits
        self.interval_s = interval_s
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Life:
    """`left` choices have not ended. `tried` are the replicas it was given to, the last one being where it is; what
    it says is in the numbers of a replica of these `numerics`. `kills` are workers that died of it, as far as can be
    told. Since `stalled_s` no worker had anything to say of it; `refusal` is what one said last that would not go on with it."""

    __slots__ = (
        "_admission",
        "_before_s",
        "_num_admitted",
        "_parting",
        "attempts",
        "caller",
        "chains",
        "counts",
        "failure",
        "first_s",
        "itl_s",
        "kills",
        "left",
        "model",
        "num_prompt_tokens",
        "numerics",
        "refusal",
        "replayed_tokens",
        "replica",
        "stages",
        "stalled_s",
        "stream",
        "submitted_s",
        "tried",
        "voices",
    )

    def __init__(
        self, stream: Stream, caller: Caller, stages: StageClock, model: ModelText, *, counts: bool = False
    ) -> None:
        self.stream = stream
        self.caller = caller
        self.stages = stages
        self.model = model
        self.counts = counts
        self.voices: list[Voice] = []
        self.left = 0
        self.attempts = 0
        self.replica = ""
        self.tried: set[str] = set()
        self.numerics = ""
        self.kills = 0
        self.stalled_s: float | None = None
        self.refusal = ""
        self.replayed_tokens = 0
        self.submitted_s = 0.0
        self.first_s: float | None = None
        self.itl_s: float | None = None
        self.failure: Failure | None = None
        self.num_prompt_tokens = 0
        # By root and block size: the block hashes of each prompt, by the `id` of who holds it.
        self.chains: dict[tuple[bytes, int], dict[int, tuple[bytes, ...]]] = {}
        self._before_s = 0.0
        self._num_admitted = 0
        self._admission: asyncio.Future[None] | None = None
        self._parting: Parting | None = None

    @property
    def live(self) -> list[Voice]:
        """Choices that have not ended, be they with a worker or waiting for one."""
        return [voice for voice in self.voices if voice.end is None and voice.finish is None]

    @property
    def has_spoken(self) -> bool:
        return any(voice.heard for voice in self.voices)

    @property
    def is_opening(self) -> bool:
        """Someone waits for it to be admitted."""
        return self._admission is not None

    @property
    def asks(self) -> list[Prepared]:
        return [voice.prepared for voice in self.voices if voice.choice_of_ask == 0]

    def prepare(self, asks: Sequence[Prepared]) -> None:
        self.num_prompt_tokens = sum([len(prepared.prompt_ids) for prepared in asks])
        for prepared in asks:
            for choice in range(prepared.ask.n):
                self.voices.append(Voice(self, len(self.voices), choice, prepared))
        self.left = len(self.voices)

    def submitted(self, replica: str, card: WorkerCard, now_s: float) -> None:
        """It goes to this replica now."""
        self.attempts += 1
        self.replica = replica
        self.tried.add(replica)
        self.numerics = numerics_of(card)
        self.stages.enter(Stage.TRANSFER, now_s)
        self.submitted_s = now_s
        if self.attempts == 1:
            self._before_s = sum(self.stages.seconds.values()) - now_s

    def revive(self, records: Sequence[Record], numerics: str, age_s: float, now_s: float) -> None:
        """It has said this in an earlier life, and no worker is known to have it."""
        self.attempts = 1
        self.numerics = numerics
        self._before_s = age_s - now_s
        for record in records:
            said_s = record.age_s - self._before_s
            if self.first_s is None:
                self.first_s = said_s
            for part in record.parts:
                self.voices[part.choice].recall(part, said_s)

    def admitted(self) -> "asyncio.Future[None]":
        """Done when a worker has accepted every choice; raises what one was refused for."""
        self._num_admitted = 0
        self._admission = asyncio.get_running_loop().create_future()
        return self._admission

    def accept(self) -> None:
        """One more choice was accepted."""
        self._num_admitted += 1
        if self._num_admitted == len(self.voices):
            self.admit()

    def admit(self) -> None:
        """Whoever opens it need not wait any longer: its stream tells what becomes of it."""
        admission, self._admission = self._admission, None
        if admission is not None and not admission.done():
            admission.set_result(None)

    def refuse(self, error: HeadraceError) -> bool:
        """Not accepted. False: nobody waits for that any more."""
        if self._admission is None or self._admission.done():
            return False
        self._admission.set_exception(error)
        self._admission = None
        return True

    def forget_admission(self) -> None:
        """Nobody waits to be admitted any more."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.cancel()

    def age_s(self, now_s: float) -> float:
        """Since the first byte of the request."""
        return self._before_s + now_s

    def usage(self) -> Usage:
        """Up to now. A prompt counts once, however many choices it has."""
        cached_tokens = used_tokens = 0
        for voice in self.voices:
            used_tokens += voice.used_tokens
            if voice.choice_of_ask == 0:
                cached_tokens += voice.cached_tokens
        return Usage(self.num_prompt_tokens, cached_tokens, used_tokens)

    def close(self, waits: Waits | None, arrival_s: float) -> None:
        """The last choice ended; `waits` is where its time in the engine went. The rest of it was transfer."""
        self.stages.enter(Stage.DETOKENISE, arrival_s)
        if waits is not None:
            spread(self.stages.seconds, waits, arrival_s - self.submitted_s)

    def tell_end(
        self, now_s: float, failure: Failure | None = None, *, waits: Waits | None = None, num_parting: int = 0
    ) -> None:
        """Of one that failed: `waits` is what a worker said of where its time went, and `num_parting` choices are with
        workers that have yet to say so."""
        self.failure = failure
        self.stages.enter(Stage.CLIENT, now_s)
        seconds = self.stages.seconds
        if failure is not None:
            if waits is None:
                # What came after the first token was for the next ones.
                begun_s = now_s if self.first_s is None else max(self.first_s, self.submitted_s)
                waits = Waits(decode_s=max(0.0, now_s - begun_s))
            if num_parting:
                self._parting = Parting(num_parting, waits, now_s - self.submitted_s)
                seconds = self.seconds
            else:
                spread(seconds, waits, now_s - self.submitted_s)
        self.stream.end(Ending(self.usage(), failure, _by_name(seconds)), age_s=self.age_s(now_s))

    @property
    def seconds(self) -> dict[Stage, float]:
        """Where its time went, as far as is known."""
        seconds = self.stages.seconds.copy()
        if self._parting is not None:
            spread(seconds, self._parting.waits, self._parting.interval_s)
        return seconds

    @property
    def is_parting(self) -> bool:
        """It has ended here, and workers that had it have yet to say so."""
        return self._parting is not None

    def part(self, waits: Waits | None) -> None:
        """A worker has said where the time of one of its choices went, or is lost."""
        parting = self._parting
        if parting is not None:
            parting.left -= 1
            parting.waits = waits or parting.waits
            if not parting.left:
                self.settle()

    async def parted(self, patience_s: float) -> None:
        """Until its stages are what they will be: what workers do not say soon is guessed."""
        if self._parting is not None:
            await asyncio.wait([self._parting.over], timeout=patience_s)
            self.settle()

    def settle(self) -> None:
        """Its stages are what is known of them by now."""
        parting, self._parting = self._parting, None
        if parting is not None:
            spread(self.stages.seconds, parting.waits, parting.interval_s)
            if not parting.over.done():
                parting.over.set_result(None)

    def explain(self, seconds: dict[Stage, float]) -> Explanation:
        ends = [voice.end for voice in self.voices if voice.end is not None]
        ending = self.stream.ending
        return Explanation(
            request_id=self.stream.id,
            tenant=self.caller.tenant,
            model=self.model.name,
            replica=self.replica,
            stages=_by_name(seconds),
            wall_s=sum(seconds.values()),
            usage=self.usage() if ending is None else ending.usage,  # as it was told
            finish=tuple([voice.finish or "error" for voice in self.voices]),
            ttft_s=None if self.first_s is None else self.age_s(self.first_s),
            itl_s=self.itl_s,
            preemptions=sum([end.preemptions for end in ends]),
            recomputed_tokens=sum([end.counters.recomputed for end in ends]),
            overrun_tokens=sum([end.counters.overrun for end in ends]),
            attempts=self.attempts,
            replayed_tokens=self.replayed_tokens,
            error=None if self.failure is None else self.failure.code,
        )


def numerics_of(card: WorkerCard) -> str:
    """Workers for which this is equal compute the same numbers."""
    return card.fingerprint or card.version


def _by_name(seconds: dict[Stage, float]) -> dict[str, float]:
    return dict(zip(map(_NAMES.__getitem__, seconds), seconds.values(), strict=True))


def spread(seconds: dict[Stage, float], waits: Waits, interval_s: float) -> None:
    """Move what the engine accounts for from TRANSFER, which had all of the interval that a worker had it, to where it
    belongs."""
    parts = astuple(waits)
    stay_s: float = sum(parts)
    # Two clocks: a stay that seems longer than the interval it lies in is the interval.
    transfer_s = seconds.get(Stage.TRANSFER, 0.0)
    most_s = min(interval_s, transfer_s)
    scale = min(1.0, most_s / stay_s) if stay_s > 0.0 else 0.0
    # Most are nothing.
    for stage, spent_s in compress(zip(_WAITS, parts, strict=True), parts):
        if spent_s > 0.0:
            seconds[stage] = seconds.get(stage, 0.0) + spent_s * scale
    seconds[Stage.TRANSFER] = max(0.0, transfer_s - stay_s * scale)
