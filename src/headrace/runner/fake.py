"""A runner without a model: tokens are a function of the prompt, costs and faults are settable.

Owns the order of calls, sampling, scripted lengths and time; the memory it computes in is `Device`.
Greedy or not makes no difference here, and penalties, biases and `min_tokens` are not looked at.
"""

import math
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.core.config import CostProfile, EngineConfig
from headrace.core.errors import InvalidInput, OutOfRoom, RunnerFailed
from headrace.core.plan import IntArray, Masks, Plan, RowStatus, SlotStart, StepResult, measure_work
from headrace.core.ports import Clock
from headrace.runner.cells import LUCK, MASK_64, CellArray, IndexArray, mix, mix_int
from headrace.runner.device import FEW, Device, FewRow
from headrace.runner.faults import FAIL, RANGE, Faults
from headrace.runner.truth import MaskRule, truth

_NEVER = -2


@dataclass(slots=True)
class _Flight:
    """A launched plan."""

    plan: Plan
    cost_s: float
    ready_s: float
    # Few rows in plain numbers, as they were computed; None where they were as vectors. `spread` makes these of any.
    few: list[FewRow] | None
    slots: IndexArray = field(init=False)
    ends: IndexArray = field(init=False)
    samples_all: bool = field(init=False)
    # The last cell of each row; None without cells.
    cells: IndexArray | None = None
    # The rows whose slots have not failed; None for all.
    live: IndexArray | None = None
    tokens: IntArray | None = None
    statuses: NDArray[np.uint8] | None = None

    def spread(self) -> None:
        self.slots = self.plan.slots.astype(np.int64)
        self.ends = (self.plan.starts + self.plan.counts).astype(np.int64)
        self.samples_all = 0 not in self.plan.samples.tobytes()


class FakeRunner:
    """Computes plans at the pace of `profile`, under a given clock or, with `sleep`, in real time.

    Without `cells` there is no memory and no check: tokens mean nothing, but scripted ends, masks,
    faults and time hold. `speed` multiplies every cost: at 2.0 a step takes twice as long.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        profile: CostProfile | None = None,
        depth: int = 1,
        clock: Clock | None = None,
        sleep: bool = False,
        cells: bool = True,
        verify_prefix: bool = True,
        eos_probability: float = 0.0,
        speed: float = 1.0,
        jitter: float = 0.0,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        if len({token for token in config.eos_ids if token < config.vocab_size}) >= config.vocab_size:
            raise InvalidInput("eos_ids leave no other id to emit", param="eos_ids")
        if eos_probability > 0.0 and not config.eos_ids:
            raise InvalidInput("eos_probability needs an eos id", param="eos_probability")
        self.profile = profile if profile is not None else config.profile
        self.speed = speed
        self.jitter = jitter
        self.faults = faults
        # Output length per (request id, choice), read when the sequence starts in a slot.
        self.lengths: dict[tuple[str, int], int] = {}
        self._config = config
        self._vocab_size = np.array(config.vocab_size, np.uint64)
        self._depth = depth
        self._clock = clock
        self._sleep = sleep
        self._random = random.Random(seed)
        self._eos_probability = eos_probability
        # A token whose luck is below is an end of sequence.
        self._eos_luck = min(int(eos_probability * 2**64), MASK_64)
        self._device = Device(config, verify_prefix=verify_prefix) if cells else None
        # Each id, or the next that does not end a sequence.
        ids = np.arange(config.vocab_size if cells else 0, dtype=np.int32)
        for token in config.eos_ids:
            ids[token : token + 1] = _substitute(token, config)
        self._substitutes = ids
        self._plain_substitutes = ids.data
        self._in_flight: deque[_Flight] = deque()
        self._last_ready_s = 0.0
        self._gone = ""
        self._closed = threading.Event()
        self._numbers = np.full(config.slots, -1, np.int64)
        self._num_prompt = np.zeros(config.slots, np.int64)
        self._plain_numbers, self._plain_num_prompt = self._numbers.data, self._num_prompt.data
        # Number of ids after which a slot's token is the scripted end.
        self._end_index = np.full(config.slots, _NEVER, np.int64)
        self._plain_end_index = self._end_index.data
        self._is_scripted = False
        self._failed = np.zeros(config.slots, np.uint8)
        self._num_failed = 0
        self._plain_tokens = np.full(config.slots, _substitute(1, config), np.int32)

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def next_ready_s(self) -> float:
        """When the oldest plan in flight is done; infinite when it hangs or there is none."""
        return self._in_flight[0].ready_s if self._in_flight else math.inf

    def script(self, request_id: str, choice: int, num_tokens: int) -> None:
        """That sequence's output token `num_tokens - 1` is the end of sequence. Call before it starts."""
        if num_tokens < 1 or not self._config.eos_ids:
            raise InvalidInput("a scripted length is at least 1 and needs an eos id", param="num_tokens")
        self.lengths[request_id, choice] = num_tokens

    def truth(
        self,
        prompt_ids: Sequence[int],
        num_tokens: int,
        *,
        seed: int = 0,
        choice: int = 0,
        request_id: str | None = None,
        masks: MaskRule | None = None,
        stop_at_eos: bool = True,
    ) -> list[int]:
        """What this runner must say to that prompt; `request_id` finds its scripted length."""
        return truth(
            prompt_ids,
            num_tokens,
            vocab_size=self._config.vocab_size,
            eos_ids=self._config.eos_ids,
            seed=seed,
            choice=choice,
            scripted=None if request_id is None else self.lengths.get((request_id, choice)),
            eos_probability=self._eos_probability,
            masks=masks,
            stop_at_eos=stop_at_eos,
        )

    def load(self) -> None:
        self._check_usable()

    def warm_up(self) -> None:
        self._check_usable()

    def launch(self, plan: Plan) -> None:
        self._check_usable()
        if self._in_flight and self._in_flight[-1].statuses is None:
            raise RunnerFailed(f"step {plan.step} is launched before step {self._in_flight[-1].plan.step} is sampled")
        if len(self._in_flight) >= self._depth:
            raise RunnerFailed(f"step {plan.step} is launched with {self._depth} in flight already")
        if len(plan.slots) > self._config.slots:
            raise RunnerFailed(f"step {plan.step} has {len(plan.slots)} rows for {self._config.slots} slots")
        if self.faults is not None and (self.faults.dies(plan.step, "launch") or self.faults.kills(plan.begun)):
            self._die(f"the device died at the launch of step {plan.step}")
        cost_s = self._cost_s(plan)
        now_s = self._now_s()
        ready_s = max(now_s, self._last_ready_s) + cost_s
        for start in plan.begun:
            self._begin(start)
        is_few = len(plan.slots) <= FEW and self._device is not None and self.faults is None and not self._num_failed
        flight = _Flight(plan, cost_s, ready_s, [] if is_few else None)
        if not is_few:
            flight.spread()
        if self.faults is not None:
            self._find_room(self.faults, flight)
        if self._num_failed:
            live = np.flatnonzero(self._failed[flight.slots] == RowStatus.OK)
            flight.live = live if len(live) < len(flight.slots) else None
        if self._device is not None:
            self._compute(self._device, flight)
        self._last_ready_s = ready_s
        self._in_flight.append(flight)

    def sample(self, step: int, masks: Masks | None) -> None:
        self._check_usable()
        flight = self._in_flight[-1] if self._in_flight else None
        if flight is None or flight.statuses is not None or flight.plan.step != step:
            raise RunnerFailed(f"step {step} is sampled and is not the last launched, or was sampled before")
        plan = flight.plan
        flight.statuses = np.zeros(len(plan.slots), np.uint8)
        try:
            if flight.few is not None:
                flight.tokens = self._draw_few(flight.few)
            elif flight.live is None and flight.samples_all:
                flight.tokens = self._draw(flight.slots, flight.ends, flight.cells)
            else:
                flight.tokens = self._draw_some(flight)
        except RunnerFailed as error:
            self._gone = error.message
            raise
        if len(plan.masked_rows) or flight.live is not None or self.faults is not None:
            self._judge(flight, masks)
        elif self._device is not None:
            self._append(self._device, flight)

    def collect(self) -> StepResult:
        self._check_usable()
        if not self._in_flight:
            raise RunnerFailed("nothing is in flight to collect")
        flight = self._in_flight[0]
        step = flight.plan.step
        if flight.tokens is None or flight.statuses is None:
            raise RunnerFailed(f"step {step} is collected before it is sampled")
        if self.faults is not None and self.faults.dies(step, "collect"):
            self._die(f"the device died in step {step}")
        self._wait(flight)
        self._in_flight.popleft()
        return StepResult(step, flight.tokens, flight.statuses, flight.cost_s)

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        self._check_usable()
        return self._memory().store.export(blocks)

    def import_blocks(self, blocks: Sequence[int], payload: bytes) -> None:
        self._check_usable()
        self._memory().store.load(blocks, payload)

    def close(self) -> None:
        """Every later call fails; a collection that waits for a hung step ends."""
        self._gone = self._gone or "the runner is closed"
        self._closed.set()

    def _begin(self, start: SlotStart) -> None:
        slot = start.slot
        self._plain_numbers[slot] = start.number
        self._plain_num_prompt[slot] = start.num_prompt
        length = self.lengths.get((start.request_id, start.choice)) if self.lengths else None
        self._plain_end_index[slot] = _NEVER if length is None else start.num_prompt + length - 1
        self._is_scripted |= length is not None
        if self._num_failed and self._failed[slot]:
            self._failed[slot] = RowStatus.OK
            self._num_failed -= 1

    def _find_room(self, faults: Faults, flight: _Flight) -> None:
        """Before any row is computed; what the plan frees, starts and grows is done all the same."""
        plan = flight.plan
        if faults.lacks_room(plan.step, int(plan.counts.sum()), self._numbers[flight.slots]):
            if self._device is not None:
                self._update(self._device, plan)
            raise OutOfRoom(f"the device has no memory for a step of {int(plan.counts.sum())} tokens")

    def _update(self, device: Device, plan: Plan) -> None:
        try:
            device.update(plan)
        except RunnerFailed as error:
            self._gone = error.message
            raise

    def _compute(self, device: Device, flight: _Flight) -> None:
        self._update(device, flight.plan)
        try:
            if flight.few is not None:
                flight.few = device.compute_few(flight.plan)
                if flight.few is not None:
                    return
                flight.spread()
            if len(flight.slots) and (flight.live is None or len(flight.live)):
                flight.cells = device.compute(flight.plan, flight.slots, flight.ends, flight.live)
        except RunnerFailed as error:
            self._gone = error.message
            raise

    def _cost_s(self, plan: Plan) -> float:
        # With cells nothing the plan claims is taken on trust.
        work = plan.work if self._device is None else measure_work(plan.starts, plan.counts)
        profile = self.profile
        cost_s = profile.c0_s + profile.c_in_s * work.prefill_tokens + profile.c_out_s * work.decode_rows
        cost_s += profile.c_kv_s * work.kv_tokens + profile.c_att_s * work.attended
        cost_s *= self.speed
        if self.jitter:
            cost_s *= 1.0 + self._random.uniform(-self.jitter, self.jitter)
        if self.faults is not None:
            cost_s += self.faults.extra_s(plan.step)
        return cost_s

    def _now_s(self) -> float:
        if self._clock is not None:
            return self._clock.now_s()
        return time.monotonic() if self._sleep else 0.0

    def _wait(self, flight: _Flight) -> None:
        if flight.ready_s == math.inf:
            if self._sleep:
                self._closed.wait()
            self._die(f"step {flight.plan.step} never ends")
        if self._sleep:
            delay_s = flight.ready_s - self._now_s()
            if delay_s > 0.0:
                time.sleep(delay_s)

    def _draw(self, slots: IndexArray, ends: IndexArray, cells: IndexArray | None) -> IntArray:
        """Tokens of sampling rows, before masks and faults."""
        mixed: CellArray | None = None
        if self._device is None or cells is None:
            tokens = self._plain_tokens[: len(slots)].copy()
        else:
            mixed = self._device.draw(slots, ends, cells)
            raw = mixed % self._vocab_size
            tokens = self._substitutes[raw.view(np.int64)]
        if mixed is not None and self._eos_probability > 0.0:
            lucky = mix(mixed ^ np.uint64(LUCK)) < np.uint64(self._eos_luck)
            tokens[lucky & (self._end_index[slots] == _NEVER)] = self._config.eos_ids[0]
        if self._is_scripted:
            tokens[self._end_index[slots] == ends] = self._config.eos_ids[0]
        return tokens

    def _draw_few(self, rows: list[FewRow]) -> IntArray:
        """`_draw_some` of few rows; none of their slots has failed."""
        return np.array(
            [self._draw_one(slot, end, cell) if samples else -1 for slot, end, cell, samples in rows], np.int32
        )

    def _draw_one(self, slot: int, end: int, cell: int) -> int:
        mixed = self._memory().draw_one(slot, end, cell)
        last = self._plain_end_index[slot]
        if last == end or (last == _NEVER and self._eos_luck and mix_int(mixed ^ LUCK) < self._eos_luck):
            return self._config.eos_ids[0]
        return self._plain_substitutes[mixed % self._config.vocab_size]

    def _draw_some(self, flight: _Flight) -> IntArray:
        """Of all rows, those that sample and whose slots have not failed."""
        samples = flight.plan.samples
        rows = np.flatnonzero(samples) if flight.live is None else flight.live[samples[flight.live]]
        tokens = np.full(len(samples), -1, np.int32)
        if len(rows):
            cells = None if flight.cells is None else flight.cells[rows]
            tokens[rows] = self._draw(flight.slots[rows], flight.ends[rows], cells)
        return tokens

    def _judge(self, flight: _Flight, masks: Masks | None) -> None:
        """Masks, then faults; a row that fails takes its slot out of use until it is started anew."""
        assert flight.tokens is not None and flight.statuses is not None
        tokens, statuses = flight.tokens, flight.statuses
        if flight.few is not None:
            flight.spread()
        if flight.live is not None:
            statuses[:] = self._failed[flight.slots]
        for row in flight.plan.masked_rows.tolist():
            if flight.plan.samples[row] and statuses[row] == RowStatus.OK:
                tokens[row] = _masked_token(int(tokens[row]), row, masks, self._config.vocab_size)
                if tokens[row] < 0:
                    statuses[row] = RowStatus.MASK
        if self.faults is not None:
            self._inject(self.faults, flight, tokens, statuses)
        fresh = np.flatnonzero((statuses != RowStatus.OK) & (self._failed[flight.slots] == RowStatus.OK))
        tokens[statuses != RowStatus.OK] = -1
        self._failed[flight.slots[fresh]] = statuses[fresh]
        self._num_failed += len(fresh)
        if self._device is not None:
            self._append(self._device, flight)

    def _inject(self, faults: Faults, flight: _Flight, tokens: IntArray, statuses: NDArray[np.uint8]) -> None:
        slots, plan = flight.slots, flight.plan
        for row, kind in faults.rows(self._numbers[slots], flight.ends - self._num_prompt[slots]):
            if statuses[row] != RowStatus.OK:
                continue
            if kind == RANGE:
                if plan.samples[row]:
                    tokens[row] = self._config.vocab_size + 7
                continue
            statuses[row] = RowStatus.FAILED if kind == FAIL else RowStatus.NOT_FINITE
            if self._device is not None:
                self._device.scrub(int(slots[row]), int(plan.starts[row]), int(flight.ends[row]))

    def _append(self, device: Device, flight: _Flight) -> None:
        """Onto the device, so that the next plan may compute them before anybody saw them."""
        assert flight.tokens is not None
        if flight.few is not None:
            for (slot, end, _, _), token in zip(flight.few, flight.tokens.tolist(), strict=True):
                if token >= 0:
                    device.append_one(slot, end, token)
            return
        if flight.live is None and not self._num_failed and flight.samples_all:
            device.append(flight.slots, flight.ends, flight.tokens)
            return
        rows = np.flatnonzero(flight.tokens >= 0)
        device.append(flight.slots[rows], flight.ends[rows], flight.tokens[rows])

    def _memory(self) -> Device:
        if self._device is None:
            raise InvalidInput("a fake without cells has no blocks to move", param="blocks")
        return self._device

    def _check_usable(self) -> None:
        if self._gone:
            raise RunnerFailed(f"the runner is unusable: {self._gone}")

    def _die(self, why: str) -> None:
        self._gone = why
        raise RunnerFailed(why)


def _substitute(token: int, config: EngineConfig) -> int:
    """`token`, or the next id that does not end a sequence."""
    while token in config.eos_ids:
        token = (token + 1) % config.vocab_size
    return token


def _masked_token(token: int, row: int, masks: Masks | None, vocab_size: int) -> int:
    """The first allowed id at or after `token`, cyclically; -1 when there is none."""
    if masks is None:
        return -1
    places = np.flatnonzero(masks.rows == row)
    if len(places) == 0:
        return -1
    words = masks.words[places[0]].astype("<u4")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    allowed = np.flatnonzero(bits)
    if len(allowed) == 0:
        return -1
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])
