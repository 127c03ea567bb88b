"""The engine: keeps `runner.depth` plans in flight and turns results into frames.

Owns the order of launches. `begin` and `end` are one iteration split where a simulator's time passes;
a worker calls `turn`. Forward pass and sampling are two launches, so that masks which need the last
step's tokens are made while the device computes.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.core.config import EngineConfig, TenantConfig, check_engine
from headrace.core.errors import InvalidInput, NotFound, OutOfRoom
from headrace.core.event import Counter, Counters, EngineLoad, Outcome, StepFrame
from headrace.core.plan import Masks, Plan, StepResult
from headrace.core.ports import MaskSource, Runner
from headrace.core.request import Request
from headrace.engine.checks import check_state
from headrace.engine.draft import Flight
from headrace.engine.intake import Intake
from headrace.engine.outcome import Applier
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Phase, Sequence
from headrace.engine.state import State

# The proof takes milliseconds per thousand blocks: when idle, and not every time.
_CHECK_EVERY_S = 10.0
# What no step brought has no rows; made once, since four empty arrays take longer than all else of it.
_NO_STEP = StepFrame(-1)


class Engine:
    def __init__(self, config: EngineConfig, runner: Runner, masks: MaskSource | None = None) -> None:
        check_engine(config)
        self._runner = runner
        self._depth = runner.depth
        self._masks = masks
        self._state = State(config)
        self._intake = Intake(self._state)
        self._scheduler = Scheduler(self._state)
        self._applier = Applier(self._state)
        self._flights: deque[Flight] = deque()
        self._unsampled: Flight | None = None
        self._result: StepResult | None = None
        self._next_check_s = -math.inf

    # What a gateway asks

    def submit(self, request: Request, now_s: float) -> int:
        """Queue a request; returns its sequence number. Raises InvalidInput or Refused, nothing kept."""
        return self.submit_all((request,), now_s)[0]

    def submit_all(self, requests: Iterable[Request], now_s: float) -> list[int]:
        """Queue what belongs together, wholly or not at all; returns a sequence number for each."""
        return self._intake.accept(requests, now_s)

    def abort(self, number: int, now_s: float, *, used_tokens: int | None = None) -> bool:
        """End a sequence now, wherever it is. Of those emitted here, tokens past `used_tokens` are overrun."""
        sequence = self._state.live.get(number)
        if sequence is None:
            return False
        if used_tokens is not None:
            self._count_overrun(sequence, used_tokens)
        self._state.end(sequence, Outcome.ABORTED, "aborted", now_s)
        return True

    def withdraw(self, number: int, now_s: float) -> bool:
        """Take back a sequence that has not started, to place it elsewhere."""
        sequence = self._state.live.get(number)
        if sequence is None or sequence.started or sequence.phase is not Phase.WAITING:
            return False
        self._state.end(sequence, Outcome.ABORTED, "withdrawn", now_s)
        return True

    def pause(self, number: int, now_s: float) -> bool:
        """Stop generating until `resume`; the slot goes to others."""
        sequence = self._state.live.get(number)
        if sequence is None or sequence.phase not in (Phase.RUNNING, Phase.WAITING):
            return False
        self._state.pause(sequence, now_s)
        return True

    def resume(self, number: int, now_s: float) -> bool:
        sequence = self._state.live.get(number)
        if sequence is None or sequence.phase is not Phase.PAUSED:
            return False
        self._state.resume(sequence, now_s)
        return True

    def observe_service(self, tenant: str, seconds: float) -> None:
        """Device-seconds a tenant was given on other replicas; they count here too."""
        if not (math.isfinite(seconds) and seconds >= 0.0):
            raise InvalidInput("service must be a finite number of seconds, zero or more", param="seconds")
        tenants = self._state.tenants
        tenants.observe(tenants.index(tenant), seconds)

    def take_service(self) -> dict[str, float]:
        """Device-seconds each tenant was given here since this was last asked; tenants given none are left out."""
        return self._state.tenants.take_given()

    def set_tenants(self, tenants: tuple[TenantConfig, ...]) -> None:
        """Weights, caps and reservations from now on, of all tenants. InvalidInput, nothing changed, if they clash."""
        check_engine(replace(self._state.config, tenants=tenants))
        self._state.tenants.replace(tenants)

    def clear_prefix_cache(self) -> int:
        """Forget every published prefix: a salt was rotated. Returns how many blocks were forgotten."""
        return self._state.pool.clear_cache()

    # The loop

    def turn(self, now_s: float) -> StepFrame:
        """One iteration: fill the pipeline, then wait for the oldest plan. Proves the accounts when idle."""
        while self.begin(now_s):
            pass
        frame = self.end(now_s) if self._flights else self.take_events(now_s)
        self.check_when_idle(now_s)
        return frame

    def begin(self, now_s: float) -> bool:
        """Plan and launch one step if the pipeline has room. False when full or nothing can run."""
        if len(self._flights) >= self._depth or self._unsampled is not None:
            return False
        flight = self._launch(now_s)
        if flight is None:
            return False
        self._flights.append(flight)
        if not len(flight.plan.masked_rows):
            self._runner.sample(flight.plan.step, None)
        else:
            self._unsampled = flight
            self._sample_if_known()
        return True

    def _launch(self, now_s: float) -> Flight | None:
        """The next step, or a smaller one where the device has no memory for it: at once, or when the step that runs has
        given its own back."""
        while (flight := self._scheduler.schedule(now_s)) is not None:
            try:
                self._runner.launch(flight.plan)
            except OutOfRoom:
                self._scheduler.refuse(flight, now_s, is_alone=not self._flights)
                if self._flights:
                    return None
                continue
            self._scheduler.commit(flight, now_s)
            return flight
        return None

    def wait(self) -> None:
        """Wait for the oldest plan, so that `end` can be told when it was done."""
        if self._flights and self._result is None:
            self._result = self._runner.collect()

    def end(self, now_s: float) -> StepFrame:
        """Wait for the oldest plan, apply it, launch the sampling that waited for its tokens."""
        self.wait()
        flight, result = self._flights.popleft(), self._result
        assert result is not None
        self._result = None
        frame = self._applier.apply(flight, result, now_s)
        if self._masks is not None and self._state.num_masked_live:
            self._advance_masks(self._masks, frame)
        self._sample_if_known()
        return self._with_ended(frame)

    def rest(self) -> None:
        """There is nothing to plan: the time until something comes is no wait of anybody."""
        self._scheduler.rest()

    def take_events(self, now_s: float) -> StepFrame:
        """Ends that no step brought: aborts, timeouts."""
        self._state.expire(now_s)
        return self._with_ended(_NO_STEP)

    def _sample_if_known(self) -> None:
        """Masks can be made once every earlier plan is applied."""
        flight = self._unsampled
        if flight is None or self._flights[0] is not flight:
            return
        self._unsampled = None
        self._runner.sample(flight.plan.step, self._make_masks(flight))

    def _make_masks(self, flight: Flight) -> Masks:
        rows = flight.plan.masked_rows.tolist()
        alive = [row for row in rows if flight.sequences[row].phase is not Phase.ENDED]
        if self._masks is None or not alive:
            return Masks(np.zeros(0, np.int32), np.zeros((0, 0), np.uint32))
        return self._masks.masks(alive, [flight.sequences[row].number for row in alive])

    def _advance_masks(self, masks: MaskSource, frame: StepFrame) -> None:
        live = self._state.live
        for number, token in zip(frame.numbers.tolist(), frame.tokens.tolist(), strict=True):
            if number in live and live[number].request.sampling.masked:
                masks.advance(number, token)

    def _with_ended(self, frame: StepFrame) -> StepFrame:
        ended = self._state.ended
        if not ended:
            return frame
        self._state.ended = []
        return replace(frame, ended=tuple(ended))

    def _count_overrun(self, sequence: Sequence, used_tokens: int) -> None:
        table = self._state.table
        counters = table.counters[sequence.slot] if sequence.slot >= 0 else sequence.counters
        overrun = max(0, int(counters[Counter.EMITTED]) - max(0, used_tokens))
        counters[Counter.EMITTED] -= overrun
        counters[Counter.OVERRUN] += overrun

    # What others may see

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def idle(self) -> bool:
        """Nothing to plan, nothing in flight, nothing to tell. Paused sequences do not count."""
        state = self._state
        return not (self._flights or state.line.count or state.table.num_running or state.ended)

    @property
    def next_expiry_s(self) -> float:
        return self._state.next_expiry_s

    @property
    def last_plan(self) -> Plan | None:
        return self._flights[-1].plan if self._flights else None

    @property
    def slot_numbers(self) -> NDArray[np.int64]:
        """Sequence number per slot, -1 where idle: a view."""
        return self._state.table.number

    @property
    def num_waiting(self) -> int:
        return self._state.line.count

    @property
    def queued_prompt_s(self) -> float:
        """How long the prompts that wait would take."""
        return self._state.queue_prompt_s

    @property
    def num_running(self) -> int:
        return self._state.table.num_running

    @property
    def num_used_blocks(self) -> int:
        return self._state.pool.num_used

    @property
    def num_preemptions(self) -> int:
        return self._state.num_preemptions

    @property
    def num_refused_plans(self) -> int:
        """Plans that the device found no memory for; their rows went into smaller ones."""
        return self._scheduler.room.num_refused

    @property
    def num_guaranteed_preemptions(self) -> int:
        return self._state.num_guaranteed_preemptions

    def service_levels(self) -> dict[str, float]:
        """Weighted device-seconds of every tenant seen."""
        tenants = self._state.tenants
        return dict(zip(tenants.names, tenants.level.tolist(), strict=False))

    def load(self) -> EngineLoad:
        state = self._state
        table, pool = state.table, state.pool
        return EngineLoad(
            queue_s=state.queue_s,
            running_s=0.5 * state.running_s,
            waiting=state.line.count,
            running=table.num_running,
            free_slots=table.num_free,
            free_blocks=pool.num_available,
            used_blocks=pool.num_used,
            total_blocks=pool.total,
        )

    def phase_of(self, number: int) -> Phase:
        """Where a live sequence stands; NotFound once it has ended."""
        sequence = self._state.live.get(number)
        if sequence is None:
            raise NotFound(f"no live sequence {number}")
        return sequence.phase

    def counters_of(self, number: int) -> Counters:
        """Of a live sequence, as of its last applied step; zeros once it has ended, since its end tells them."""
        sequence = self._state.live.get(number)
        if sequence is None:
            return Counters()
        table = self._state.table
        return Counters(*(table.counters[sequence.slot].tolist() if sequence.slot >= 0 else sequence.counters))

    def outputs_of(self, number: int) -> list[int] | None:
        """Every applied token of a live sequence by its index, replayed ones first; None once it has ended."""
        sequence = self._state.live.get(number)
        if sequence is None:
            return None
        if sequence.slot >= 0:
            self._state.table.flush(sequence.slot)
        return sequence.outputs.copy()

    def check_when_idle(self, now_s: float) -> None:
        if self.idle and now_s >= self._next_check_s:
            self._next_check_s = now_s + _CHECK_EVERY_S
            self.check()

    def check(self) -> None:
        """Prove every invariant of the state; AssertionError names the first that is broken."""
        check_state(self._state)
