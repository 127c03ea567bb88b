"""One trace under static, dynamic and continuous batching, by virtual time.

Owns the two reference schedulers and the loop that drives the real engine over the same trace, slots,
KV pool and cost profile. Knows nothing of figures (`batching_report`) or of drawing.

The references get the benefit of every doubt but the one they are named for: a batch keeps its slots
until its last row is done. Prompts are not padded, a batch is prefilled in one step however long, and
a finished row costs no more compute, as in a ragged batch (most libraries compute all rows until the
last is done), so what continuous batching wins here is a lower bound. Not knowing an output's length,
a batch must promise every row the longest output allowed: that is what limits it when KV is scarce.
A reply leaves with its batch (`returned_s`), as a batch call returns; `finished_s` is the instant its
last token was computed, which is what a client would see of a batch that could stream.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.errors import InvalidInput
from headrace.core.plan import measure_work
from headrace.core.request import Request, SamplingParams
from headrace.engine.loop import Engine
from headrace.runner.fake import FakeRunner
from headrace.sim.clock import VirtualClock, to_ns

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_NEVER_S = 1e6
_NEVER_NS = 2**63


class Policy(StrEnum):
    STATIC = "static"
    DYNAMIC = "dynamic"
    CONTINUOUS = "continuous"


class Trace(Struct, frozen=True):
    """Requests in order of arrival. `max_output` is what a client may ask for; no scheduler knows more."""

    arrivals_s: FloatArray
    prompts: IntArray
    outputs: IntArray
    max_output: int

    def __post_init__(self) -> None:
        if not len(self.arrivals_s) == len(self.prompts) == len(self.outputs) > 0:
            raise InvalidInput("a trace needs as many arrivals as prompts and outputs, and at least one", param="trace")
        if (np.diff(self.arrivals_s) < 0).any() or self.arrivals_s[0] < 0:
            raise InvalidInput("arrivals must not be negative nor go back", param="arrivals_s")
        if self.prompts.min() < 1 or self.outputs.min() < 1 or self.outputs.max() > self.max_output:
            raise InvalidInput(f"lengths must be at least 1, outputs at most {self.max_output}", param="outputs")


class Machine(Struct, frozen=True):
    """What every policy has to work with."""

    slots: int = 32
    blocks: int = 4096
    block_size: int = 16
    profile: CostProfile = CostProfile()
    depth: int = 2

    def blocks_for(self, tokens: Any) -> Any:
        return -(-tokens // self.block_size)


@dataclass(slots=True, frozen=True)
class Spans:
    """Who held which slot from when to when; after `wanted_s` the holder was done and the slot only held."""

    slots: IntArray
    requests: IntArray
    starts_s: FloatArray
    wanted_s: FloatArray
    ends_s: FloatArray


@dataclass(slots=True, frozen=True)
class Steps:
    """When each step ran, and the blocks that held tokens of unfinished requests meanwhile."""

    starts_s: FloatArray
    ends_s: FloatArray
    kv_blocks: IntArray


@dataclass(slots=True, frozen=True)
class PolicyRun:
    """What happened to every request of a trace. `noticed_s`: when a scheduler could first have placed it."""

    policy: Policy
    trace: Trace
    machine: Machine
    noticed_s: FloatArray
    first_s: FloatArray
    finished_s: FloatArray
    returned_s: FloatArray
    spans: Spans
    steps: Steps
    preemptions: int = 0
    recomputed: int = 0


def run_policy(policy: Policy, trace: Trace, machine: Machine, linger_s: float) -> PolicyRun:
    """Play the whole trace; `linger_s` is how long a dynamic batch stays open for its first request."""
    if machine.blocks_for(trace.prompts.max() + trace.max_output) > machine.blocks:
        raise InvalidInput("the longest request does not fit the KV pool", param="blocks")
    if policy is Policy.CONTINUOUS:
        return _Continuous(trace, machine).run()
    return _run_batches(policy, trace, machine, linger_s if policy is Policy.DYNAMIC else None)


def _run_batches(policy: Policy, trace: Trace, machine: Machine, linger_s: float | None) -> PolicyRun:
    """Batch after batch, each to its end. Without `linger_s` a batch waits until it is full or nothing more comes."""
    batches: list[_Batch] = []
    first, free_s = 0, 0.0
    while first < len(trace.outputs):
        room = _batch_room(trace, machine, first)
        start_s, size = _close_batch(trace.arrivals_s[first:], room, free_s, linger_s)
        batch = _compute_batch(trace, machine, slice(first, first + size), start_s)
        batches.append(batch)
        free_s = float(batch.ends_s[-1])
        first += size
    return _join_batches(policy, trace, machine, batches)


def _batch_room(trace: Trace, machine: Machine, first: int) -> int:
    """How many of the next requests a batch may hold: one a slot, and the longest output of each must fit."""
    promised = np.cumsum(machine.blocks_for(trace.prompts[first : first + machine.slots] + trace.max_output))
    return int(np.searchsorted(promised, machine.blocks, side="right"))


def _close_batch(arrivals_s: FloatArray, room: int, free_s: float, linger_s: float | None) -> tuple[float, int]:
    """When the next batch starts and how many it takes; `arrivals_s` are those not served yet."""
    room = min(room, len(arrivals_s))
    closes_s = float(arrivals_s[room - 1])
    if linger_s is not None:
        closes_s = min(closes_s, float(arrivals_s[0]) + linger_s)
    start_s = max(free_s, closes_s)
    return start_s, int(np.searchsorted(arrivals_s[:room], start_s, side="right"))


@dataclass(slots=True, frozen=True)
class _Batch:
    rows: slice
    start_s: float
    ends_s: FloatArray
    kv_blocks: IntArray


def _compute_batch(trace: Trace, machine: Machine, rows: slice, start_s: float) -> _Batch:
    """Step 0 prefills every row and yields its first token; step k >= 1 yields the (k+1)th of those not done."""
    profile = machine.profile
    prompts, outputs = trace.prompts[rows], trace.outputs[rows]
    work = measure_work(np.zeros(len(prompts), np.int32), prompts.astype(np.int32))
    prefill_s = (
        profile.c_in_s * work.prefill_tokens
        + profile.c_out_s * work.decode_rows
        + profile.c_kv_s * work.kv_tokens
        + profile.c_att_s * work.attended
    )
    later = np.arange(1, int(outputs.max()))
    wanted = outputs[:, None] > later  # [rows, steps]
    contexts = np.where(wanted, prompts[:, None] + later, 0)
    decode_s = profile.c_out_s * wanted.sum(axis=0) + profile.c_kv_s * contexts.sum(axis=0)
    steps_s = profile.c0_s + np.concatenate(([prefill_s], decode_s))
    kv_blocks = np.concatenate(([machine.blocks_for(prompts).sum()], machine.blocks_for(contexts).sum(axis=0)))
    return _Batch(rows, start_s, start_s + np.cumsum(steps_s), kv_blocks)


def _join_batches(policy: Policy, trace: Trace, machine: Machine, batches: list[_Batch]) -> PolicyRun:
    sizes = [batch.rows.stop - batch.rows.start for batch in batches]
    starts_s = np.repeat([batch.start_s for batch in batches], sizes)
    first_s = np.repeat([batch.ends_s[0] for batch in batches], sizes)
    returned_s = np.repeat([batch.ends_s[-1] for batch in batches], sizes)
    finished_s = np.concatenate([batch.ends_s[trace.outputs[batch.rows] - 1] for batch in batches])
    slots = np.concatenate([np.arange(size) for size in sizes])
    steps = Steps(
        np.concatenate([np.concatenate(([batch.start_s], batch.ends_s[:-1])) for batch in batches]),
        np.concatenate([batch.ends_s for batch in batches]),
        np.concatenate([batch.kv_blocks for batch in batches]),
    )
    spans = Spans(slots, np.arange(len(slots)), starts_s, finished_s, returned_s)
    return PolicyRun(policy, trace, machine, trace.arrivals_s, first_s, finished_s, returned_s, spans, steps)


@dataclass(slots=True, frozen=True)
class _Launched:
    """A plan under way: its slots as planned, and how many requests the planner had been given."""

    launched_s: float
    slot_numbers: IntArray
    kv_blocks: int
    submitted: int


class _Continuous:
    """Drives the real engine over the fake runner and notes who sat where in each step."""

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self._trace = trace
        self._machine = machine
        self._clock = VirtualClock()
        config = _engine_config(trace, machine)
        self._runner = FakeRunner(config, clock=self._clock, depth=machine.depth, cells=False)
        self._engine = Engine(config, self._runner)
        count = len(trace.outputs)
        # In the clock's own unit: a float may be a hair before the instant it was turned into.
        self._arrivals_ns = [to_ns(arrival_s) for arrival_s in trace.arrivals_s.tolist()]
        self._unfinished = count
        self._noticed_s = np.full(count, np.nan)
        self._first_s = np.full(count, np.nan)
        self._finished_s = np.full(count, np.nan)
        self._numbers: dict[int, int] = {-1: -1}
        self._launched: deque[_Launched] = deque()
        self._starts_s: list[float] = []
        self._ends_s: list[float] = []
        self._seated: list[_Launched] = []
        self._preemptions = 0
        self._recomputed = 0

    def run(self) -> PolicyRun:
        while self._unfinished:
            self._submit_arrived()
            while self._engine.begin(self._clock.now_s()):
                self._note_launch()
            self._move_on()
        steps = Steps(
            np.array(self._starts_s), np.array(self._ends_s), np.array([plan.kv_blocks for plan in self._seated])
        )
        return PolicyRun(
            Policy.CONTINUOUS,
            self._trace,
            self._machine,
            self._noticed_s,
            self._first_s,
            self._finished_s,
            self._finished_s,
            self._trace_spans(steps),
            steps,
            self._preemptions,
            self._recomputed,
        )

    @property
    def _num_submitted(self) -> int:
        return len(self._numbers) - 1

    def _submit_arrived(self) -> None:
        while self._next_arrival_ns() <= self._clock.now_ns:
            index = self._num_submitted
            request = _request(self._trace, index)
            self._runner.script(request.request_id, request.choice, int(self._trace.outputs[index]))
            self._numbers[self._engine.submit(request, self._clock.now_s())] = index

    def _next_arrival_ns(self) -> int:
        more = self._num_submitted < len(self._arrivals_ns)
        return self._arrivals_ns[self._num_submitted] if more else _NEVER_NS

    def _note_launch(self) -> None:
        used = self._engine.load().used_blocks
        seats = self._engine.slot_numbers.copy()
        self._launched.append(_Launched(self._clock.now_s(), seats, used, self._num_submitted))

    def _move_on(self) -> None:
        """To the next instant at which something happens: a step's end or an arrival."""
        arrives_ns = self._next_arrival_ns()
        ready_ns = to_ns(self._runner.next_ready_s) if self._engine.in_flight else _NEVER_NS
        assert min(arrives_ns, ready_ns) < _NEVER_NS, "requests wait and the engine plans nothing"
        self._clock.move_to(min(arrives_ns, ready_ns))
        if ready_ns <= arrives_ns:
            self._note_end()

    def _note_end(self) -> None:
        now_s = self._clock.now_s()
        plan = self._launched.popleft()
        start_s = max(plan.launched_s, self._ends_s[-1] if self._ends_s else 0.0)
        self._seated.append(plan)
        self._starts_s.append(start_s)
        self._ends_s.append(now_s)
        self._noticed_s[: plan.submitted] = np.fmin(self._noticed_s[: plan.submitted], start_s)
        frame = self._engine.end(now_s)
        rows = np.array([self._numbers[number] for number in frame.numbers.tolist()], np.int64)
        self._first_s[rows] = np.fmin(self._first_s[rows], now_s)
        for ended in frame.ended:
            index = self._numbers[ended.number]
            assert ended.counters.emitted == self._trace.outputs[index], ended
            self._finished_s[index] = now_s
            self._unfinished -= 1
            self._preemptions += ended.preemptions
            self._recomputed += ended.counters.recomputed

    def _trace_spans(self, steps: Steps) -> Spans:
        """Join the steps in which a slot had the same holder."""
        seats = np.array([[self._numbers[n] for n in plan.slot_numbers.tolist()] for plan in self._seated])
        changes = np.ones((len(seats) + 1, self._machine.slots), bool)
        changes[1:-1] = seats[1:] != seats[:-1]
        # Column by column, every change but a column's last one begins a span that ends at the next change.
        slots, rows = np.nonzero(changes.T)
        begins = np.flatnonzero(rows < len(seats))
        slots, firsts, lasts = slots[begins], rows[begins], rows[begins + 1] - 1
        held = seats[firsts, slots] >= 0
        slots, firsts, lasts = slots[held], firsts[held], lasts[held]
        requests = seats[firsts, slots]
        ends_s = steps.ends_s[lasts]
        wanted_s = np.minimum(ends_s, self._finished_s[requests])
        return Spans(slots, requests, steps.starts_s[firsts], wanted_s, ends_s)


def _engine_config(trace: Trace, machine: Machine) -> EngineConfig:
    """Nothing may be refused or time out: the references refuse nothing either."""
    return EngineConfig(
        slots=machine.slots,
        blocks=machine.blocks,
        block_size=machine.block_size,
        context_len=int(trace.prompts.max()) + trace.max_output,
        max_queue_s=_NEVER_S,
        queue_timeout_s=_NEVER_S,
        max_waiting=max(200_000, len(trace.outputs)),
        profile=machine.profile,
    )


def _request(trace: Trace, index: int) -> Request:
    """The scheduler sees `max_output`; the end at the traced length comes as an unforeseen stop token."""
    return Request(
        f"request-{index}",
        "tenant",
        tuple(range(1, int(trace.prompts[index]) + 1)),
        max_tokens=trace.max_output,
        sampling=SamplingParams(),
        ttft_target_s=_NEVER_S,
    )
