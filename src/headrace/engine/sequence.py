"""One generation inside the engine: its ids, blocks, counters and where its time went.

Owned by `State`, which alone moves a sequence between phases. Knows no queue and no plan.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from headrace.core.event import NUM_COUNTERS, Waits
from headrace.core.request import Admission, Request


class Phase(IntEnum):
    WAITING = 0
    RUNNING = 1
    # Its last row is launched and its slot given on; only the result is missing.
    LEAVING = 2
    PAUSED = 3
    ENDED = 4


@dataclass(slots=True, eq=False)
class Sequence:
    number: int
    request: Request
    tenant: int
    arrival_s: float
    ttft_at_s: float
    limit: int
    expected_output: float
    # Predicted device-seconds of its known tokens, and of those and its expected output.
    prompt_s: float
    work_s: float
    # Work that stood before it when it came; what the wait was in the end corrects later guesses.
    expected_wait_s: float = 0.0
    # When it is looked whether it still waits for its first slot.
    times_out_s: float = float("-inf")
    phase: Phase = Phase.WAITING
    started: bool = False
    slot: int = -1
    # Under which its TTFT target counts.
    target: int = 0
    # Where the waiting line filed it; an entry with another ticket is stale.
    ticket: int = 0
    outputs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    # The chain over prompt and generated blocks, made when it last gave up its blocks.
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    # Tokens computed by applied steps while it catches up; meaningless once it decodes.
    num_applied: int = 0
    catching_up: bool = True
    # Prompt positions up to this have been scored; they are not reported again when computed again.
    num_scored: int = 0
    # Positions below this were computed before.
    num_charged: int = 0
    # Positions below this are computed again at nobody's charge.
    num_forgiven: int = 0
    # The tier it was admitted in: its own, or a higher one that age had won it.
    rank: int = 0
    reserved_blocks: int = 0
    # The last launched plan that names it, up to date once it has left its slot.
    last_step: int = -1
    # The least that decode rows of a step took since it is computed beside them, and how many they were last.
    steady_s: float = float("inf")
    steady_rows: int = 0
    # The planning that gave it its slot, and the one that took it.
    begun_in: int = -1
    preempted_in: int = -1
    counters: list[int] = field(default_factory=([0] * NUM_COUNTERS).copy)
    preemptions: int = 0
    # Not preempted again before it holds this many tokens.
    safe_below: int = 0
    finished: bool = False
    since_s: float = 0.0
    clocks: tuple[float, float] = (0.0, 0.0)
    wait_capacity_s: float = 0.0
    wait_fairness_s: float = 0.0
    prefill_s: float = 0.0
    prefill_others_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    paused_s: float = 0.0
    # Of its request, asked for again and again.
    num_prompt: int = 0
    guaranteed: bool = False

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_ids)
        self.guaranteed = self.request.admission is Admission.GUARANTEED

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids the host knows."""
        return self.num_prompt + len(self.outputs)

    @property
    def ids(self) -> tuple[int, ...]:
        return self.request.prompt_ids + tuple(self.outputs) if self.outputs else self.request.prompt_ids

    def waits(self) -> Waits:
        """Where its time went; the parts sum to its stay."""
        return Waits(
            self.wait_capacity_s,
            self.wait_fairness_s,
            self.prefill_s - self.prefill_others_s,
            self.prefill_others_s,
            self.decode_s,
            self.preempted_s,
            self.paused_s,
        )
