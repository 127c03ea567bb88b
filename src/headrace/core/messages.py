"""What gateway and worker say to each other: the protocol, whatever carries it. Owns the messages; moves no bytes.

A gateway names each of its sequences by a `key` of its own choosing, never used again. A worker numbers its frames
per gateway from 1 and keeps each until it is acknowledged. What a lost connection leaves running can be attached to
by the name of its sequence: tenant, request and number. Arrays travel as little-endian bytes. No clock is compared
across processes: what travels are durations.
"""

import struct
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from msgspec import Struct

from headrace.core.config import TenantConfig
from headrace.core.event import NUM_COUNTERS, Counters, EngineLoad, Outcome, Waits
from headrace.core.plan import IntArray, Scores
from headrace.core.request import Request

PROTOCOL = 2
# Of what travels as bytes.
_KEY, _ROW = np.dtype("<i8"), np.dtype("<i4")


class WorkerState(StrEnum):
    """A worker's life. Nothing is routed to one that is not READY; one that drains finishes what it has."""

    LOADING = "loading"
    VERIFYING = "verifying"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"
    FAILED = "failed"


class WorkerCard(Struct, frozen=True):
    """Who a worker is. Zeros and empty strings are not known before it has loaded."""

    name: str
    model: str
    index: int
    pid: int
    # Larger at each start of the same worker: what an earlier life says later is not believed.
    epoch: int
    version: str = ""
    fingerprint: str = ""
    dtype: str = ""
    slots: int = 0
    blocks: int = 0
    block_size: int = 0
    context_len: int = 0
    vocab_size: int = 0
    eos_ids: tuple[int, ...] = ()


# From gateway to worker.


class Hello(Struct, frozen=True, tag="hello"):
    """The first message on every connection. `gateway` is random per gateway process.

    A gateway that comes again lives, and has moved what its last connection had: that is aborted at once, unless it
    says here that it `attaches`.
    """

    protocol: int
    gateway: str
    attaches: bool = False


class GrammarText(Struct, frozen=True):
    """A constraint on a reply, as `text.grammar.Grammar` has it; it was checked where the request came in."""

    kind: str
    source: str = ""


class SubmitPart(Struct, frozen=True):
    """Choices of one prompt, which travels once: `keys[i]` is choice `request.choice + i`, and number `first + i` among
    all sequences of the client's request. `outlives`: after its gateway is gone somebody may come for it. `is_suspect`: a
    worker may have died of it, and this one is to say that it has it before it runs it."""

    keys: tuple[int, ...]
    request: Request
    grammar: GrammarText | None = None
    first: int = 0
    outlives: bool = True
    is_suspect: bool = False


class Submit(Struct, frozen=True, tag="submit"):
    """All sequences of one client's request: taken in as one, or refused as one. A key that was taken in is answered
    by rows and by exactly one `End`; all in frames."""

    parts: tuple[SubmitPart, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple([key for part in self.parts for key in part.keys])


class AttachPart(Struct, frozen=True):
    """A sequence by its name, and the index of the first token that is wanted of it: that of its row in a frame, so
    that ids which were replayed count. `digest` is `core.hashing.sequence_digest` of all before it: a name may have been
    given twice. Empty: whatever has the name."""

    key: int
    tenant: str
    request_id: str
    number: int
    index: int
    digest: bytes = b""


class Attach(Struct, frozen=True, tag="attach"):
    """Go on, under these keys, with what another connection submitted; each part is answered for itself.

    The answer is an acceptance and every token from `index` on, the known ones at once, several rows of a key in a
    frame, with the counters of now; then its `End`. Whoever had it until now hears an `End` that says `taken`. Or a
    refusal, `not_attachable`: replay it.
    """

    parts: tuple[AttachPart, ...]

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(part.key for part in self.parts)


class Goodbye(Struct, frozen=True, tag="goodbye"):
    """This gateway leaves for good: all it has here is aborted. A connection that is lost without it leaves its
    sequences running for a while, for whoever attaches."""


class Abort(Struct, frozen=True, tag="abort"):
    """Of what was emitted, tokens past `used_tokens` are overrun. Unknown keys have ended already: ignored."""

    key: int
    used_tokens: int | None = None


class Withdraw(Struct, frozen=True, tag="withdraw"):
    """Take back what has not started: its `End` then says `withdrawn`. Else nothing happens."""

    key: int


class Pause(Struct, frozen=True, tag="pause"):
    key: int


class Resume(Struct, frozen=True, tag="resume"):
    key: int


class Ack(Struct, frozen=True, tag="ack"):
    """Every frame up to and with this number was taken over."""

    frame: int


class Tenants(Struct, frozen=True, tag="tenants"):
    """Weights, caps and reservations from now on, of all tenants."""

    tenants: tuple[TenantConfig, ...]


class Service(Struct, frozen=True, tag="service"):
    """Device-seconds that tenants were given by other replicas of the model since this was last told."""

    seconds: dict[str, float]


class Drain(Struct, frozen=True, tag="drain"):
    """Take nothing new, finish what there is, abort what is left after the grace, then exit."""

    grace_s: float


FromGateway = Hello | Submit | Attach | Abort | Withdraw | Pause | Resume | Ack | Tenants | Service | Drain | Goodbye


# From worker to gateway.


class Welcome(Struct, frozen=True, tag="welcome"):
    """The answer to `Hello`."""

    protocol: int
    card: WorkerCard
    state: WorkerState


class End(Struct, frozen=True):
    """The terminal event of a sequence, by the gateway's key."""

    key: int
    outcome: Outcome
    reason: str
    counters: Counters
    waits: Waits
    preemptions: int = 0
    message: str = ""


class Refusal(Struct, frozen=True):
    """A submission that was not accepted: all its keys, with the fields of the error."""

    keys: tuple[int, ...]
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class ScoreTable(Struct, frozen=True):
    """`core.plan.Scores` as bytes; owners are keys. `width` is the number of alternatives per entry."""

    owners: bytes
    positions: bytes
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes
    width: int

    @staticmethod
    def pack(scores: Scores) -> "ScoreTable":
        return ScoreTable(
            scores.owners.astype("<i8").tobytes(),
            scores.positions.astype("<i4").tobytes(),
            scores.logprobs.astype("<f4").tobytes(),
            scores.top_ids.astype("<i4").tobytes(),
            scores.top_logprobs.astype("<f4").tobytes(),
            scores.top_ids.shape[1],
        )

    def unpack(self) -> Scores:
        """ValueError where the lengths disagree."""
        owners = np.frombuffer(self.owners, "<i8")
        shape = (len(owners), self.width)
        return Scores(
            owners,
            np.frombuffer(self.positions, "<i4"),
            np.frombuffer(self.logprobs, "<f4"),
            np.frombuffer(self.top_ids, "<i4").reshape(shape),
            np.frombuffer(self.top_logprobs, "<f4").reshape(shape),
        )


class Frame(Struct, frozen=True, tag="frame"):
    """One step for one gateway: what was accepted, a token per row, what ended, what was refused.

    Acceptances, refusals and ends by command are sent at once, before the next step; `step` is then -1. Where the
    next step will be short they come with its tokens instead. `load` counts everything accepted up to this frame.
    """

    number: int
    step: int
    keys: bytes = b""
    indices: bytes = b""
    tokens: bytes = b""
    counters: bytes = b""
    ended: tuple[End, ...] = ()
    refused: tuple[Refusal, ...] = ()
    # Keys of submissions taken in since the last frame.
    accepted: tuple[int, ...] = ()
    scores: ScoreTable | None = None
    load: EngineLoad | None = None

    @staticmethod
    def pack_rows(
        keys: Sequence[int], indices: IntArray, tokens: IntArray, counters: IntArray
    ) -> tuple[bytes, bytes, bytes, bytes]:
        return (
            struct.pack(f"<{len(keys)}q", *keys),
            indices.astype(_ROW, copy=False).tobytes(),
            tokens.astype(_ROW, copy=False).tobytes(),
            counters.astype(_ROW, copy=False).tobytes(),
        )

    def rows(self) -> list[tuple[int, int, int]]:
        """Key, token index and token of each row."""
        # In less time than numpy's, of a few rows in half of it.
        num_rows = len(self.keys) // _KEY.itemsize
        keys, ints = struct.unpack(f"<{num_rows}q", self.keys), f"<{num_rows}i"
        return list(zip(keys, struct.unpack(ints, self.indices), struct.unpack(ints, self.tokens), strict=True))

    def counter_rows(self) -> IntArray:
        return np.frombuffer(self.counters, "<i4").reshape(-1, NUM_COUNTERS)


class DeviceHealth(Struct, frozen=True):
    """What an accelerator says of itself; None where it does not tell. `ecc_uncorrected` counts memory errors that could
    not be corrected since its driver was loaded. `fault` says why nothing more should run on it; empty: nothing is wrong."""

    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    ecc_uncorrected: int | None = None
    fault: str = ""


class Beat(Struct, frozen=True, tag="beat"):
    """Twice a second at least, and at once when the state changes, from a thread that no step can hold up.

    `step_age_s` is how long the oldest step in flight has run, 0 when none has. `service` is what each tenant was
    given since the last beat, in device-seconds; one gateway hears of it and tells the other replicas. `progress` (0 to 1) and `note` are for a person who waits.
    `device` is as it was some seconds ago; None where there is no accelerator, or nothing that could ask it.
    """

    state: WorkerState
    card: WorkerCard
    load: EngineLoad
    step_age_s: float = 0.0
    service: dict[str, float] = {}
    progress: float = 0.0
    note: str = ""
    device: DeviceHealth | None = None


FromWorker = Welcome | Frame | Beat
