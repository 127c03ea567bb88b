"""From a load to replicas, utilisation and cost, with the arithmetic in words.

Owns two plans: from a measured throughput, in exact rationals, and from a replica's profile, by the
steady state that `steady` finds. Pure: reads no file, prints nothing, knows no clock.
"""

import math
from fractions import Fraction
from typing import Literal

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.sim.exact import (
    Number,
    Quantity,
    check_number,
    measure,
    round_up,
    show,
    show_money,
    show_ms,
    show_percent,
)
from headrace.sim.mix import RequestMix
from headrace.sim.profile import ReplicaProfile, Targets
from headrace.sim.steady import Operating, Saturation, SteadyModel

Count = Literal["both", "output"]

MAX_REPLICAS = 10**9
_LIMITS = {
    "slots": "all slots are taken",
    "kv": "the KV cache is full",
    "step_tokens": "a step takes no more tokens",
    "itl": "a longer step would miss the inter-token target",
    "ttft": "a longer step would take more than a fifth of the TTFT target",
    "compute": "the device has no time left",
}


class Load(Struct, frozen=True):
    """What is asked: the requests, how many, how much to spare, what a GPU costs, how many are given."""

    mix: RequestMix
    rate_per_s: Fraction
    headroom: Fraction = Fraction(0)
    price_per_hour: Fraction | None = None
    gpus: int | None = None


class Throughput(Struct, frozen=True):
    """What one GPU was measured to do; `count` says whether its tokens include the prompts'."""

    tokens_per_s: Fraction
    count: Count = "both"
    batching: Fraction = Fraction(1)


class Cost(Struct, frozen=True):
    """Of all planned GPUs; per million tokens served, input and output each for its part of the device."""

    per_hour: Quantity
    per_day: Quantity
    per_million_input_tokens: Quantity
    per_million_output_tokens: Quantity
    per_million_tokens: Quantity


class Split(Struct, frozen=True):
    """Prefill and decode in pools of their own, sized for the same load and headroom."""

    prefill_replicas: int
    decode_replicas: int
    together_replicas: int
    pays: bool


class ReplicaPlan(Struct, frozen=True):
    """What only a profile can tell. `planned` is None where the rate cannot be sustained."""

    saturated: Saturation
    planned: Operating | None
    ttft_met: bool | None
    split: Split | None


class PlanReport(Struct, frozen=True):
    """The plan. A GPU is a replica unless the profile says that a replica takes several."""

    source: Literal["throughput", "profile"]
    rate_per_s: Quantity
    input_tokens_per_request: Quantity
    output_tokens_per_request: Quantity
    sustained_rate_per_s_per_replica: Quantity
    headroom: Quantity
    replicas_needed: int
    replicas_with_headroom: int
    replicas: int
    gpus: int
    gpus_given: bool
    utilisation: Quantity
    output_tokens_per_s: Quantity
    tokens_per_s: Quantity
    cost: Cost | None
    replica: ReplicaPlan | None
    lines: tuple[str, ...]


def plan_throughput(load: Load, throughput: Throughput) -> PlanReport:
    """Plan from tokens/s per GPU; exact where the mean lengths are."""
    check_load(load)
    check_number(throughput.tokens_per_s, "tokens_per_s", Fraction(1, 1000), 10**9)
    check_number(throughput.batching, "batching", Fraction(1, 1000), 1000)
    prompt, output = load.mix.prompt_mean(), load.mix.output_mean()
    counted = prompt + output if throughput.count == "both" else output
    tokens_per_s = throughput.tokens_per_s * throughput.batching
    sustained = tokens_per_s / counted
    fleet = _size_fleet(load, sustained, 1)
    lines = [*_throughput_words(load, throughput, sustained), *_fleet_words(load, fleet, "GPU")]
    # Whatever is counted costs the same; what is not counted costs nothing.
    input_share = prompt / counted if throughput.count == "both" else Fraction(0)
    cost = _price(load, fleet, input_share)
    return _report("throughput", load, fleet, cost, None, [*lines, *_cost_words(load, fleet, cost, "GPU")])


def plan_profile(load: Load, profile: ReplicaProfile, targets: Targets) -> PlanReport:
    """Plan from the cost model of a replica: the same equations that the engine's steps obey."""
    check_load(load)
    _check_fits(load.mix, profile)
    model = SteadyModel(profile, load.mix, targets)
    saturated = model.saturate()
    fleet = _size_fleet(load, saturated.at.rate_per_s, profile.gpus_per_replica)
    split = _plan_split(load, profile, targets, fleet.with_headroom)
    fleet, ttft_met = _widen_for_ttft(load, fleet, model, targets)
    planned = model.operate(float(load.rate_per_s) / fleet.replicas)
    cost = _price(load, fleet, _input_share(planned or saturated.at))
    lines = [
        *_replica_words(load, profile, saturated, model.cap_s),
        *_fleet_words(load, fleet, "replica"),
        *_operating_words(planned, targets, ttft_met),
        *_cost_words(load, fleet, cost, "GPU"),
        *_split_words(split, profile),
    ]
    replica = ReplicaPlan(saturated, planned, ttft_met, split)
    return _report("profile", load, fleet, cost, replica, lines)


def check_load(load: Load) -> None:
    check_number(load.rate_per_s, "rate", Fraction(1, 10**6), 10**9)
    check_number(load.headroom, "headroom", 0, 10)
    if load.price_per_hour is not None:
        check_number(load.price_per_hour, "price", 0, 10**6)
    if load.gpus is not None:
        check_number(load.gpus, "gpus", 1, MAX_REPLICAS)


def _check_fits(mix: RequestMix, profile: ReplicaProfile) -> None:
    if mix.longest() > profile.kv_tokens:
        message = (
            f"kv_tokens: the longest request takes {mix.longest():,} tokens, a replica holds {profile.kv_tokens:,}"
        )
        raise InvalidInput(message, param="kv_tokens")


class _Fleet(Struct, frozen=True):
    """How many replicas of which rate: `need` is the fraction of them before rounding up."""

    sustained: Number
    need: Number
    needed: int
    with_headroom: int
    replicas: int
    gpus_per_replica: int

    @property
    def gpus(self) -> int:
        return self.replicas * self.gpus_per_replica

    @property
    def utilisation(self) -> Number:
        return self.need / self.replicas

    def served(self, rate_per_s: Fraction) -> Number:
        return min(rate_per_s, self.sustained * self.replicas)


def _size_fleet(load: Load, sustained: Number, gpus_per_replica: int) -> _Fleet:
    need = load.rate_per_s / sustained
    needed, with_headroom = max(1, round_up(need)), max(1, round_up(need * (1 + load.headroom)))
    if with_headroom > MAX_REPLICAS:
        raise InvalidInput(f"rate needs {with_headroom:,} replicas, more than a plan is made for", param="rate")
    if load.gpus is not None and load.gpus < gpus_per_replica:
        raise InvalidInput(f"gpus: one replica takes {gpus_per_replica}", param="gpus")
    replicas = with_headroom if load.gpus is None else load.gpus // gpus_per_replica
    return _Fleet(sustained, need, needed, with_headroom, replicas, gpus_per_replica)


def _widen_for_ttft(load: Load, fleet: _Fleet, model: SteadyModel, targets: Targets) -> tuple[_Fleet, bool | None]:
    """The fewest replicas that also keep the TTFT target; the fleet as it is where none do or it is given."""
    if targets.ttft_s is None:
        return fleet, None

    def met(replicas: int) -> bool:
        at = model.operate(float(load.rate_per_s) / replicas)
        return at is not None and at.long_ttft_s <= float(targets.ttft_s or 0.0)

    low, high = fleet.replicas, fleet.replicas * 16
    if met(low) or load.gpus is not None or not met(high):
        return fleet, met(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if met(middle) else (middle, high)
    return _Fleet(fleet.sustained, fleet.need, fleet.needed, fleet.with_headroom, high, fleet.gpus_per_replica), True


def _plan_split(load: Load, profile: ReplicaProfile, targets: Targets, together: int) -> Split | None:
    """None where outputs of one token leave nothing to decode."""
    if load.mix.output_mean() <= 1:
        return None
    wanted = float(load.rate_per_s * (1 + load.headroom))
    prefill = SteadyModel(profile, load.mix, targets, "prefill").saturate()
    decode = SteadyModel(profile, load.mix, targets, "decode").saturate()
    apart = [max(1, round_up(wanted / pool.at.rate_per_s)) for pool in (prefill, decode)]
    return Split(apart[0], apart[1], together, pays=sum(apart) < together)


def _input_share(at: Operating) -> float:
    """The part of a replica's busy time that prompts take: their work, and c0 by the row."""
    rows = at.work.prefill_steps + at.work.decode_steps
    fixed_share = at.busy_share - at.work_share
    prompts_share = at.rate_per_s * at.work.prefill_s + fixed_share * at.work.prefill_steps / rows
    return prompts_share / at.busy_share


def _price(load: Load, fleet: _Fleet, input_share: Number) -> Cost | None:
    if load.price_per_hour is None:
        return None
    per_hour = load.price_per_hour * fleet.gpus
    prompt, output = load.mix.prompt_mean(), load.mix.output_mean()
    per_request = per_hour / (fleet.served(load.rate_per_s) * 3600)
    return Cost(
        per_hour=measure(per_hour),
        per_day=measure(per_hour * 24),
        per_million_input_tokens=measure(per_request * input_share / prompt * 10**6),
        per_million_output_tokens=measure(per_request * (1 - input_share) / output * 10**6),
        per_million_tokens=measure(per_request / (prompt + output) * 10**6),
    )


def _report(
    source: Literal["throughput", "profile"],
    load: Load,
    fleet: _Fleet,
    cost: Cost | None,
    replica: ReplicaPlan | None,
    lines: list[str],
) -> PlanReport:
    prompt, output = load.mix.prompt_mean(), load.mix.output_mean()
    served = fleet.served(load.rate_per_s)
    return PlanReport(
        source=source,
        rate_per_s=measure(load.rate_per_s),
        input_tokens_per_request=measure(prompt),
        output_tokens_per_request=measure(output),
        sustained_rate_per_s_per_replica=measure(fleet.sustained),
        headroom=measure(load.headroom),
        replicas_needed=fleet.needed,
        replicas_with_headroom=fleet.with_headroom,
        replicas=fleet.replicas,
        gpus=fleet.gpus,
        gpus_given=load.gpus is not None,
        utilisation=measure(fleet.utilisation),
        output_tokens_per_s=measure(served * output),
        tokens_per_s=measure(served * (prompt + output)),
        cost=cost,
        replica=replica,
        lines=tuple(lines),
    )


def _throughput_words(load: Load, throughput: Throughput, sustained: Number) -> list[str]:
    prompt, output = load.mix.prompt_mean(), load.mix.output_mean()
    if throughput.count == "both":
        counted = prompt + output
        lines = [f"{show(prompt)} tokens in + {show(output)} tokens out = {show(counted)} tokens a request"]
    else:
        counted = output
        lines = [f"{show(output)} output tokens a request; prompts are not counted in the throughput"]
    tokens_per_s = throughput.tokens_per_s * throughput.batching
    if throughput.batching != 1:
        measured, times = show(throughput.tokens_per_s), show(throughput.batching)
        lines.append(f"{measured} tokens/s × {times} by batching = {show(tokens_per_s)} tokens/s per GPU")
    lines.append(f"{show(tokens_per_s)} tokens/s / {show(counted)} = {show(sustained)} requests/s per GPU")
    return lines


def _fleet_words(load: Load, fleet: _Fleet, noun: str) -> list[str]:
    rate, sustained, need = show(load.rate_per_s), _show_rate(fleet.sustained), show(fleet.need)
    rounded = "" if need == f"{fleet.needed:,}" else f"{need}, rounded up "
    lines = [f"{rate} requests/s / {sustained} = {rounded}{_many(fleet.needed, noun)}"]
    if load.headroom:
        wanted = show(fleet.need * (1 + load.headroom))
        rounded = "" if wanted == f"{fleet.with_headroom:,}" else f"{wanted}, rounded up "
        spare = f"{need} × {show(1 + load.headroom)} = {rounded}{_many(fleet.with_headroom, noun)}"
        lines.append(f"with {show_percent(load.headroom)} headroom: {spare}")
    share = f"{need} / {fleet.replicas:,} = {show_percent(fleet.utilisation)}"
    if load.gpus is not None:
        made = "" if noun == "GPU" else f" make {_many(fleet.replicas, noun)}"
        lines.append(f"{_many(load.gpus, 'GPU')} given{made}: utilisation {share}")
    else:
        if fleet.replicas > fleet.with_headroom:
            lines.append(f"{_many(fleet.replicas, noun)} keep the TTFT target, fewer do not")
        lines.append(f"utilisation {share}")
    if fleet.utilisation > 1:
        short = fleet.needed - fleet.replicas
        served = show(fleet.served(load.rate_per_s))
        lines.append(f"over 100 %: {_many(short, noun)} short, only {served} of {rate} requests/s can be served")
    return lines


def _cost_words(load: Load, fleet: _Fleet, cost: Cost | None, noun: str) -> list[str]:
    if cost is None or load.price_per_hour is None:
        return []
    per_hour = load.price_per_hour * fleet.gpus
    tokens = load.mix.prompt_mean() + load.mix.output_mean()
    served = fleet.served(load.rate_per_s)
    price = show_money(load.price_per_hour)
    return [
        f"{_many(fleet.gpus, noun)} × {price} an hour = {show_money(per_hour)} an hour; × 24 = {show_money(per_hour * 24)} a day",
        f"{show(served)} × {show(tokens)} tokens × 3,600 s = {show(served * tokens * 3600)} tokens an hour: "
        f"{show_money(cost.per_million_tokens.value)} per million tokens "
        f"(input {show_money(cost.per_million_input_tokens.value)}, output {show_money(cost.per_million_output_tokens.value)})",
    ]


def _replica_words(load: Load, profile: ReplicaProfile, saturated: Saturation, cap_s: float) -> list[str]:
    at, cost = saturated.at, profile.cost
    work, fixed = at.work, show_ms(cost.c0_s)
    rate, total, step = _show_rate(at.rate_per_s), show_ms(work.total_s), show_ms(at.step_s)
    prompt, output = show(load.mix.prompt_mean()), show(load.mix.output_mean())
    return [
        f"{prompt} tokens in and {output} tokens out a request on average",
        f"a request takes {show_ms(work.prefill_s)} of the device for its prompt, in {show(work.prefill_steps)} steps, "
        f"and {show_ms(work.decode_s)} for {show(work.decode_steps)} decode steps: {total} of work",
        f"every step costs {fixed} besides, shared by its rows: at x requests/s a step lasts {fixed} / (1 - x × {total})",
        f"one replica sustains {rate} requests/s: then {_LIMITS[saturated.limit]} "
        f"({show(at.used_slots)} of {profile.slots:,} slots, {show(at.kv_tokens)} of {profile.kv_tokens:,} KV tokens, "
        f"step {step} of at most {show_ms(cap_s)})",
        f"check: {fixed} / (1 - {rate} × {total}) = {step}; "
        f"{rate} × {show(work.decode_steps)} steps × {step} = {show(at.decode_rows)} rows decode together",
    ]


def _operating_words(planned: Operating | None, targets: Targets, ttft_met: bool | None) -> list[str]:
    if planned is None:
        return ["at this rate a replica has no steady state: its queue grows without end"]
    lines = [
        f"each replica gets {show(planned.rate_per_s)} requests/s and is busy {show_percent(planned.busy_share)} of the "
        f"time: {show(planned.decode_rows)} decode rows in a step of {show_ms(planned.step_s)}",
        f"mean inter-token time {show_ms(planned.itl_s)}; TTFT {show_ms(planned.ttft_s)} on average, "
        f"{show_ms(planned.long_ttft_s)} for a prompt longer than 95 % of all",
    ]
    if ttft_met is False:
        lines.append(f"that misses the TTFT target of {show_ms(float(targets.ttft_s or math.nan))} for long prompts")
    return lines


def _split_words(split: Split | None, profile: ReplicaProfile) -> list[str]:
    if split is None:
        return ["outputs are one token long: prefill is all there is, nothing to split"]
    apart = split.prefill_replicas + split.decode_replicas
    sizes = f"{split.prefill_replicas:,} for prefill + {split.decode_replicas:,} for decode = {apart:,}"
    if split.pays:
        verdict = f"splitting saves {_many(split.together_replicas - apart, 'replica')}, before the cost of moving KV"
    else:
        verdict = (
            f"splitting does not pay: each pool pays its own {show_ms(profile.cost.c0_s)} a step and rounds up alone"
        )
    return [f"prefill and decode in separate pools: {sizes} replicas against {split.together_replicas:,}; {verdict}"]


def _show_rate(rate_per_s: Number) -> str:
    """A rate that was found is shown with digits enough to divide by."""
    found = isinstance(rate_per_s, float) and rate_per_s < 100.0
    return f"{rate_per_s:.5g}" if found else show(rate_per_s)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
