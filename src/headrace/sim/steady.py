"""The steady state of one replica under continuous batching, by mean field.

Owns the balance of a step: with x requests/s, each bringing w seconds of device work, a busy replica
spends x·w of every second on work and the rest on c0, so a step lasts c0 / (1 - x·w) and the rows in
it follow from Little's law. Knows lengths only through their moments, and neither price nor fleet.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import Struct

from headrace.core.config import CostProfile
from headrace.core.errors import InvalidInput
from headrace.sim.lengths import FloatArray
from headrace.sim.mix import RequestMix
from headrace.sim.profile import ReplicaProfile, Targets, check_replica, check_targets

Role = Literal["generate", "prefill", "decode"]
Limit = Literal["slots", "kv", "step_tokens", "itl", "ttft", "compute"]

_POINTS = 256
# A prompt is followed through at most so many chunks; smaller ones change no figure that is shown.
_MAX_CHUNKS = 256
# The engine keeps a step under this share of the TTFT target: a newcomer waits for the step in flight.
_TTFT_SHARE = 5


class RequestWork(Struct, frozen=True):
    """What a mean request takes: steps in a slot, and device seconds beside the fixed cost of steps."""

    prefill_steps: float
    prefill_s: float
    decode_steps: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


class Operating(Struct, frozen=True):
    """One replica at one arrival rate: means over steps, but `itl_s` over tokens, slots and KV over time."""

    rate_per_s: float
    work: RequestWork
    step_s: float
    itl_s: float
    decode_rows: float
    used_slots: float
    kv_tokens: float
    busy_share: float
    # Of all time: work for tokens. The rest of busy time is the fixed cost of steps.
    work_share: float
    ttft_s: float
    # Of a prompt that 95 % of prompts do not exceed.
    long_ttft_s: float


class Saturation(Struct, frozen=True):
    """The most a replica sustains, and what stops it."""

    limit: Limit
    at: Operating


@dataclass(frozen=True, slots=True)
class _Demand:
    """What a mean request asks of a replica besides its prefill, in seconds, steps and token·steps."""

    prompts: FloatArray
    weights: FloatArray
    prompt_mean: float
    long_prompt: float
    # KV that stays empty while the next prompt in line does not fit: half of it, and long ones stand longer.
    kv_unused: float
    decode_steps: float
    decode_s: float
    decode_kv_steps: float
    # 1 for outputs of one length: how much longer than the mean the rest of a running output is.
    output_spread: float


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Prefill of a mean request when a step leaves a given room; `long_*` of a long prompt."""

    steps: float
    work_s: float
    # Mean squares in s²: of a whole prefill, and summed over the chunks of one.
    work_square: float
    chunk_square: float
    kv_steps: float
    long_steps: float
    long_work_s: float


@dataclass(frozen=True, slots=True)
class _Balance:
    """A step in balance at some rate, before it is checked against slots and KV."""

    rate_per_s: float
    step_s: float
    load: float
    # A step without prefill, one that prompts fill, and the share of time that passes in such.
    base_s: float
    full_s: float
    full_share: float
    prefill: _Prefill


class SteadyModel:
    """One replica of one role under one mix. Pure: the same question has the same answer."""

    def __init__(self, profile: ReplicaProfile, mix: RequestMix, targets: Targets, role: Role = "generate") -> None:
        check_replica(profile)
        check_targets(targets)
        self.profile = profile
        self.role = role
        self.cap_limit, self.cap_s = _step_cap(profile, targets, role)
        self._demand = _measure_demand(profile.cost, mix, role)
        self._prefills: dict[tuple[float, int], _Prefill] = {}
        self._check_reachable()

    def operate(self, rate_per_s: float) -> Operating | None:
        """The steady state at a rate, or None where there is none."""
        balance = self._balance(rate_per_s)
        if balance is None or max(self._shares(balance)) > 1.0:
            return None
        return self._describe(balance)

    def saturate(self) -> Saturation:
        """The highest rate that has a steady state, by bisection."""
        demand, prefills = self._demand, self.role != "decode"
        low = 0.0
        high = self.profile.slots / (self.profile.cost.c0_s * (demand.decode_steps + prefills))
        while high - low > 1e-5 * high:
            middle = (low + high) / 2 if low else high / 8
            if self.operate(middle) is None:
                high = middle
            else:
                low = middle
        balance = self._balance_or_fail(low)
        return Saturation(self._binding(balance), self._describe(balance))

    def _check_reachable(self) -> None:
        """Refuse a target that a row alone in its step would miss: no number of replicas helps."""
        cost, demand = self.profile.cost, self._demand
        chunk_s = cost.c_in_s + cost.c_kv_s * float(demand.prompts.max()) if self.role != "decode" else 0.0
        row_s = demand.decode_s / demand.decode_steps if demand.decode_steps else 0.0
        least_s = cost.c0_s + max(chunk_s, row_s)
        if self.cap_s > least_s:
            return
        name = {"itl": "slo_itl", "ttft": "slo_ttft"}.get(self.cap_limit, "max_step_s")
        share = f"a fifth of {name}" if self.cap_limit == "ttft" else name
        message = f"{name} cannot be kept: one row alone makes a step of {least_s:.3g} s, {share} is {self.cap_s:.3g} s"
        raise InvalidInput(message, param=name)

    def _balance_or_fail(self, rate_per_s: float) -> _Balance:
        balance = self._balance(rate_per_s)
        assert balance is not None, "asked for the balance of a rate that has none"
        return balance

    def _balance(self, rate_per_s: float) -> _Balance | None:
        """Step time and prefill chunks settle each other: longer steps leave less room for chunks."""
        cost, demand = self.profile.cost, self._demand
        step_s = cost.c0_s
        for _ in range(30):
            rows_s = rate_per_s * step_s * demand.decode_s
            room_s = self.cap_s - cost.c0_s - rows_s
            room_tokens = self.profile.max_step_tokens - int(rate_per_s * step_s * demand.decode_steps)
            if room_s <= 0.0 or room_tokens < 1:
                return None
            prefill = self._prefill(room_s, room_tokens)
            load = rate_per_s * (demand.decode_s + prefill.work_s)
            next_s = cost.c0_s / (1.0 - load) if load < 1.0 else math.inf
            if next_s > self.cap_s:
                return None
            settled = abs(next_s - step_s) < 1e-6 * step_s
            step_s = next_s if settled else (step_s + next_s) / 2
            if settled:
                break
        base_s = cost.c0_s + rows_s
        room_s = min(room_s, room_tokens * prefill.work_s / demand.prompt_mean)
        full_share = rate_per_s * prefill.work_s * (base_s + room_s) / room_s if prefill.work_s else 0.0
        if full_share >= 1.0:
            return None
        return _Balance(rate_per_s, step_s, load, base_s, base_s + room_s, full_share, prefill)

    def _prefill(self, room_s: float, room_tokens: int) -> _Prefill:
        if self.role == "decode":
            return _Prefill(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        # To three digits, so that a search which closes in on a rate asks for few different rooms.
        key = float(f"{room_s:.3g}"), int(float(f"{room_tokens:.3g}"))
        if key not in self._prefills:
            self._prefills[key] = _chunk_prompts(self._demand, self.profile.cost, *key)
        return self._prefills[key]

    def _held(self, balance: _Balance) -> tuple[float, float]:
        """Slots and KV tokens held on average; a prompt that waits for room waits outside."""
        demand, prefill = self._demand, balance.prefill
        started = balance.rate_per_s * balance.step_s
        slot_steps = demand.decode_steps + prefill.steps
        half_block = (self.profile.block_tokens - 1) / 2
        return started * slot_steps, started * (demand.decode_kv_steps + prefill.kv_steps + slot_steps * half_block)

    def _shares(self, balance: _Balance) -> tuple[float, float]:
        slots, kv_tokens = self._held(balance)
        return slots / self.profile.slots, kv_tokens / self._kv_usable()

    def _kv_usable(self) -> float:
        return max(self.profile.kv_tokens - self._demand.kv_unused, self.profile.kv_tokens / 2)

    def _binding(self, balance: _Balance) -> Limit:
        slots, kv = self._shares(balance)
        tokens = balance.rate_per_s * balance.step_s * (self._demand.decode_steps + self._demand.prompt_mean)
        shares: dict[Limit, float] = {
            "slots": slots,
            "kv": kv,
            "step_tokens": tokens / self.profile.max_step_tokens if self.role != "decode" else 0.0,
            self.cap_limit: balance.step_s / self.cap_s,
        }
        return max(shares, key=lambda limit: shares[limit])

    def _describe(self, balance: _Balance) -> Operating:
        demand, cost, prefill = self._demand, self.profile.cost, balance.prefill
        busy = self._busy_share(balance)
        steps_per_s = (busy - balance.load) / cost.c0_s
        step_s = busy / steps_per_s
        wait_s = self._start_wait_s(balance, busy * step_s) + self._slot_wait_s(balance)
        prefill_s = prefill.steps * balance.base_s + prefill.work_s
        itl_s = self._itl_s(balance)
        slots, kv_tokens = self._held(balance)
        used_slots = min(balance.rate_per_s * (demand.decode_steps * itl_s + prefill_s), float(self.profile.slots))
        return Operating(
            rate_per_s=balance.rate_per_s,
            work=RequestWork(prefill.steps, prefill.work_s, demand.decode_steps, demand.decode_s),
            step_s=step_s,
            itl_s=itl_s,
            decode_rows=balance.rate_per_s * demand.decode_steps / steps_per_s,
            used_slots=used_slots,
            kv_tokens=min(kv_tokens * used_slots / slots, float(self.profile.kv_tokens)),
            busy_share=busy,
            work_share=balance.load,
            ttft_s=wait_s + prefill_s,
            long_ttft_s=wait_s + prefill.long_steps * balance.base_s + prefill.long_work_s,
        )

    def _itl_s(self, balance: _Balance) -> float:
        """The mean step as rows meet it: crowded steps more often than empty ones, and full ones in a row.

        Prompts of many chunks fill steps for a while. A sequence shorter than that while sees either full
        steps or free ones, and full ones pass slowly; a longer one sees the mean of all steps.
        """
        demand, prefill = self._demand, balance.prefill
        free = max(0.0, 1.0 - max(self._shares(balance)))
        row_s = demand.decode_s / demand.decode_steps if demand.decode_steps else 0.0
        mean_s = balance.step_s + free * row_s / (1.0 - balance.load)
        alone_s = balance.full_share * balance.full_s + (1.0 - balance.full_share) * balance.base_s
        while_s = max(0.0, prefill.steps - 1.0) * balance.full_s / (2.0 * (1.0 - balance.full_share))
        share = while_s / (while_s + demand.decode_steps * mean_s) if while_s else 0.0
        return min(self.cap_s, mean_s + share * max(0.0, alone_s - mean_s))

    def _start_wait_s(self, balance: _Balance, step_s: float) -> float:
        """The step in flight, what else arrived during it, and full steps while older prompts go first.

        A newcomer meets long steps more often than short ones: E[step²] / E[step] on average. Prompts queue
        for the room of steps as for one server; what fits beside others does not queue while there is room.
        """
        prefill, rate_per_s, full = balance.prefill, balance.rate_per_s, balance.full_share
        in_flight_s = min(self.cap_s, step_s + rate_per_s * prefill.chunk_square)
        beside_s = rate_per_s * in_flight_s * prefill.work_s
        queued = prefill.work_square - (1.0 - full) * prefill.chunk_square
        stretch = full / (rate_per_s * prefill.work_s) if full else 0.0
        return in_flight_s / 2 + beside_s + rate_per_s * queued * stretch**2 / (2.0 * (1.0 - full))

    def _busy_share(self, balance: _Balance) -> float:
        """Prefills follow one another, so they leave 1 - x·w of the time; what decodes overlaps.

        Of that rest nobody decodes for a share e^-n, with n decoding on average. Prefills of others
        stretch that decoding, about half of it in time that is counted as theirs already.
        """
        demand, prefill, rate_per_s = self._demand, balance.prefill, balance.rate_per_s
        overlapping_s = (demand.decode_steps + prefill.steps) * self.profile.cost.c0_s + demand.decode_s
        decoding = rate_per_s * overlapping_s / (1.0 - rate_per_s * (demand.decode_s + prefill.work_s / 2))
        busy = 1.0 - (1.0 - rate_per_s * prefill.work_s) * math.exp(-decoding)
        # No step is without a row, and none is longer than the cap.
        least = balance.load / (1.0 - self.profile.cost.c0_s / self.cap_s)
        most = rate_per_s * (overlapping_s + prefill.work_s)
        return max(least, min(1.0, most, busy))

    def _slot_wait_s(self, balance: _Balance) -> float:
        """Mean wait for a slot or for KV, whichever is scarcer: Sakasegawa's form of the many-server queue.

        KV counts as servers of the size of the prompt that stands in line, where long ones stand longer.
        """
        slots, kv_tokens = self._held(balance)
        if not slots:
            return 0.0
        hold_s = self._demand.output_spread * slots / balance.rate_per_s
        size_tokens = max(kv_tokens / slots, 2.0 * self._demand.kv_unused)
        slot_share, kv_share = self._shares(balance)
        kv_wait = _queue(self._kv_usable() / size_tokens, kv_share)
        return hold_s * max(_queue(self.profile.slots, slot_share), kv_wait)


def _queue(servers: float, load: float) -> float:
    """Mean wait in holding times."""
    load = min(load, 1.0 - 1e-6)
    return math.pow(load, math.sqrt(2.0 * (servers + 1.0)) - 1.0) / (servers * (1.0 - load))


def _step_cap(profile: ReplicaProfile, targets: Targets, role: Role) -> tuple[Limit, float]:
    """The longest step the role may plan, and the promise it comes from."""
    caps: list[tuple[float, Limit]] = [(profile.max_step_s, "compute")]
    if targets.itl_s is not None and role != "prefill":
        caps.append((targets.itl_s, "itl"))
    if targets.ttft_s is not None and role != "decode":
        caps.append((targets.ttft_s / _TTFT_SHARE, "ttft"))
    cap_s, limit = min(caps)
    return limit, cap_s


def _measure_demand(cost: CostProfile, mix: RequestMix, role: Role) -> _Demand:
    """The i-th decode step of a request reads its prompt and i tokens; the first output token is prefill's."""
    prompts, weights = [], []
    steps = square = context_steps = 0.0
    for share, kind in zip(mix.shares(), mix.classes, strict=True):
        values, part = kind.prompt.support(_POINTS)
        prompts.append(values)
        weights.append(share * part)
        outputs, chances = kind.output.support(8 * _POINTS)
        later = float((chances * (outputs - 1.0)).sum())
        pairs = float((chances * outputs * (outputs - 1.0)).sum()) / 2
        steps += share * later
        square += share * float((chances * (outputs - 1.0) ** 2).sum())
        context_steps += share * (later * float((part * values).sum()) + pairs)
    decodes = float(role != "prefill")
    lengths, chance = _gather(np.concatenate(prompts), np.concatenate(weights))
    return _Demand(
        prompts=lengths,
        weights=chance,
        prompt_mean=float((lengths * chance).sum()),
        long_prompt=float(lengths[np.searchsorted(np.cumsum(chance), 0.95).clip(0, len(lengths) - 1)]),
        kv_unused=float((lengths**2 * chance).sum() / (lengths * chance).sum() / 2),
        decode_steps=decodes * steps,
        decode_s=decodes * (cost.c_out_s * steps + cost.c_kv_s * context_steps),
        decode_kv_steps=decodes * context_steps,
        output_spread=(1.0 + max(0.0, square / steps**2 - 1.0)) / 2 if steps else 0.5,
    )


def _gather(values: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Sort points and merge equal ones, and neighbours where there are too many."""
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    bins = np.minimum((np.cumsum(weights) * 4 * _POINTS).astype(np.int64), 4 * _POINTS - 1)
    keys = np.unique(values, return_inverse=True)[1] if len(values) <= 4 * _POINTS else bins
    total: FloatArray = np.bincount(keys, weights).astype(np.float64)
    sums: FloatArray = np.bincount(keys, weights * values).astype(np.float64)
    kept = total > 0.0
    return sums[kept] / total[kept], total[kept]


def _chunk_prompts(demand: _Demand, cost: CostProfile, room_s: float, room_tokens: int) -> _Prefill:
    """Follow every prompt of the mix through its chunks: each the largest whose time fits the room."""
    prompts = np.append(demand.prompts, demand.long_prompt)
    weights = np.append(demand.weights, 0.0)
    least = max(1.0, float(prompts.max()) / _MAX_CHUNKS)
    left = prompts.copy()
    steps, work_s, squares = np.zeros_like(prompts), np.zeros_like(prompts), np.zeros_like(prompts)
    while left.any():
        start = prompts - left
        size = np.clip(_largest_chunks(cost, start, room_s), least, max(least, room_tokens))
        size = np.minimum(size, left)
        end = start + size
        chunk_s = (size > 0.0) * (cost.c_in_s * size + cost.c_kv_s * end + cost.c_att_s * size * end)
        steps += size > 0.0
        work_s += chunk_s
        squares += chunk_s**2
        left -= size
    return _Prefill(
        steps=float((weights * steps).sum()),
        work_s=float((weights * work_s).sum()),
        work_square=float((weights * work_s**2).sum()),
        chunk_square=float((weights * squares).sum()),
        kv_steps=float((weights * steps * prompts).sum()),
        long_steps=float(steps[-1]),
        long_work_s=float(work_s[-1]),
    )


def _largest_chunks(cost: CostProfile, start: FloatArray, room_s: float) -> FloatArray:
    """Solve c_att·n² + (c_in + c_kv + c_att·start)·n + c_kv·start = room for n, whole tokens."""
    linear = cost.c_in_s + cost.c_kv_s + cost.c_att_s * start
    room = np.maximum(room_s - cost.c_kv_s * start, 0.0)
    below = linear + np.sqrt(linear**2 + 4.0 * cost.c_att_s * room)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.where(below > 0.0, 2.0 * room / below, math.inf)
    return np.floor(size)
