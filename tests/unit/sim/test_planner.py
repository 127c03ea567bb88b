"""The planner: exact arithmetic against hand-worked numbers, steady state against a loop of steps."""

import math
from collections import deque
from fractions import Fraction
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from headrace.core.config import CostProfile
from headrace.core.errors import InvalidInput
from headrace.sim.lengths import Fixed, Lengths, LogNormal, Mixture, Uniform
from headrace.sim.mix import RequestClass, RequestMix, single_mix
from headrace.sim.planner import Load, PlanReport, Throughput, plan_profile, plan_throughput
from headrace.sim.profile import ReplicaProfile, Targets
from headrace.sim.steady import SteadyModel

COST = CostProfile(c0_s=5e-3, c_in_s=2e-5, c_out_s=3e-5, c_kv_s=2e-8, c_att_s=2e-10)
SEEDED = single_mix(Fixed(25), Fixed(50))
PEAK = single_mix(Fixed(500), Fixed(1000))


def make_profile(slots: int = 32, kv_tokens: int = 1_000_000) -> ReplicaProfile:
    return ReplicaProfile(COST, slots, kv_tokens)


def plan_seeded(headroom: str = "0", batching: int = 1) -> PlanReport:
    load = Load(SEEDED, Fraction(4000), Fraction(headroom))
    return plan_throughput(load, Throughput(Fraction(10_000), batching=Fraction(batching)))


def plan_peak(batching: int = 1, gpus: int | None = None) -> PlanReport:
    load = Load(PEAK, Fraction(50_000), price_per_hour=Fraction(2), gpus=gpus)
    return plan_throughput(load, Throughput(Fraction(1000), "output", Fraction(batching)))


def test_measured_throughput_gives_exact_requests_per_gpu() -> None:
    report = plan_seeded()
    assert report.sustained_rate_per_s_per_replica.exact == "400/3"
    assert report.sustained_rate_per_s_per_replica.value == pytest.approx(133.3333, abs=1e-4)
    assert "10,000 tokens/s / 75 = 133.33 requests/s per GPU" in report.lines
    assert "4,000 requests/s / 133.33 = 30 GPUs" in report.lines


@pytest.mark.parametrize(("headroom", "batching", "gpus"), [("0", 1, 30), ("0.2", 1, 36), ("0", 2, 15), ("0.2", 2, 18)])
def test_four_thousand_requests_a_second(headroom: str, batching: int, gpus: int) -> None:
    assert plan_seeded(headroom, batching).gpus == gpus


def test_a_float_would_have_bought_one_gpu_too_many() -> None:
    assert math.ceil(100 * 1.1) == 111
    load = Load(SEEDED, Fraction(100), headroom=Fraction("0.1"))
    assert plan_throughput(load, Throughput(Fraction(75))).gpus == 110


def test_peak_needs_fifty_thousand_gpus_and_an_eighth_of_them_with_batching() -> None:
    assert plan_peak().gpus == 50_000
    report = plan_peak(batching=8)
    assert report.gpus == 6_250
    assert report.cost is not None and report.cost.per_day.exact == "300000"
    assert report.utilisation.exact == "1"


def test_given_gpus_are_priced_as_given_and_their_overload_is_said() -> None:
    report = plan_peak(batching=8, gpus=6_000)
    assert report.cost is not None and report.cost.per_day.exact == "288000"
    assert report.utilisation.exact == "25/24"
    assert any("104.17 %" in line for line in report.lines)
    assert any("over 100 %: 250 GPUs short" in line for line in report.lines)


def test_tokens_that_are_not_counted_cost_nothing() -> None:
    report = plan_peak(batching=8)
    assert report.cost is not None
    assert report.cost.per_million_input_tokens.exact == "0"
    # $12,500 an hour over 50,000 × 1,000 × 3,600 output tokens an hour.
    assert report.cost.per_million_output_tokens.exact == str(Fraction(12_500 * 10**6, 50_000 * 1000 * 3600))


def test_inexact_lengths_give_no_pretended_fractions() -> None:
    mix = single_mix(LogNormal(60, 1.0, 5, 500), Fixed(50))
    report = plan_throughput(Load(mix, Fraction(4000)), Throughput(Fraction(10_000)))
    assert report.sustained_rate_per_s_per_replica.exact is None
    assert report.rate_per_s.exact == "4000"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"rate_per_s": Fraction(-1)}, "rate"),
        ({"rate_per_s": Fraction(0)}, "rate"),
        ({"rate_per_s": Fraction(10**10)}, "rate"),
        ({"headroom": Fraction(-1, 5)}, "headroom"),
        ({"price_per_hour": Fraction(-2)}, "price"),
        ({"gpus": 0}, "gpus"),
    ],
)
def test_absurd_loads_are_refused_by_name(changes: dict[str, Fraction | int], param: str) -> None:
    load = msgspec.structs.replace(Load(SEEDED, Fraction(4000)), **changes)
    with pytest.raises(InvalidInput, match=param) as refused:
        plan_throughput(load, Throughput(Fraction(10_000)))
    assert refused.value.param == param


def test_a_plan_for_more_replicas_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidInput, match="rate"):
        plan_throughput(Load(PEAK, Fraction(10**9)), Throughput(Fraction(1)))


CHAT = single_mix(LogNormal(120, 0.8, 10, 2000), LogNormal(60, 1.0, 5, 500))
DOCUMENTS = single_mix(LogNormal(3000, 0.7, 500, 8000), LogNormal(30, 0.6, 5, 200))
BIMODAL = RequestMix(
    (
        RequestClass(Uniform(50, 300), Uniform(20, 200), 0.9),
        RequestClass(Uniform(3000, 5000), Uniform(200, 500), 0.1),
    )
)
TWO_HUMPS = single_mix(
    Mixture(((0.8, LogNormal(100, 0.5, 10, 500)), (0.2, Uniform(1000, 3000)))),
    Mixture(((0.7, Uniform(5, 30)), (0.3, LogNormal(200, 0.4, 50, 500)))),
)


class Case(NamedTuple):
    mix: RequestMix
    slots: int
    kv_tokens: int
    targets: Targets
    limit: str


CASES = {
    "chat": Case(CHAT, 32, 1_000_000, Targets(), "slots"),
    "documents": Case(DOCUMENTS, 32, 1_000_000, Targets(itl_s=0.03), "itl"),
    "bimodal": Case(BIMODAL, 24, 1_000_000, Targets(2.0, 0.1), "slots"),
    "kv": Case(TWO_HUMPS, 64, 20_000, Targets(5.0, 0.1), "kv"),
}


class Measured(NamedTuple):
    rate_per_s: float
    decode_rows: float
    step_s: float


class StepLoop:
    """Continuous batching, one step after another: the reference, which shares no equation with the planner.

    A free slot takes the head of the queue if its prompt fits the KV; a step decodes one token of every row and
    spends what is left of its time on prompts, oldest first; where KV runs out the youngest starts over.
    """

    def __init__(self, profile: ReplicaProfile, mix: RequestMix, cap_s: float) -> None:
        self.profile, self.mix, self.cap_s = profile, mix, cap_s
        self.rng = np.random.default_rng(7)
        self.queue: deque[tuple[int, int]] = deque()
        slots = profile.slots
        self.prompt, self.end = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.computed, self.age = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.active = np.zeros(slots, np.bool_)
        self.admitted = 0

    def run(self, steps: int, rate_per_s: float | None = None) -> Measured:
        """Saturated without a rate. The first fifth of the steps is not counted."""
        warm = steps // 5
        now = next_s = counted_s = rows = finished = begun_s = 0.0
        for step in range(steps):
            if step == warm:
                begun_s = now
            if rate_per_s is None:
                self._arrive(self.profile.slots - len(self.queue))
            elif not self.queue and not self.active.any():
                now = max(now, next_s)
            while rate_per_s is not None and next_s <= now:
                self._arrive(1)
                next_s += self.rng.exponential(1.0 / rate_per_s)
            self._make_room()
            self._admit()
            step_s, decoding, ended = self._step()
            now += step_s
            if step >= warm:
                counted_s, rows, finished = counted_s + step_s, rows + decoding, finished + ended
        return Measured(finished / (now - begun_s), rows / (steps - warm), counted_s / (steps - warm))

    def _arrive(self, count: int) -> None:
        if count > 0:
            prompts, outputs = self.mix.sample(self.rng, count)
            self.queue.extend(zip(prompts.tolist(), outputs.tolist(), strict=True))

    def _blocks(self) -> int:
        held = np.maximum(self.computed, self.prompt)[self.active]
        return int((held // self.profile.block_tokens + 1).sum())

    def _make_room(self) -> None:
        while self._blocks() > self.profile.kv_tokens // self.profile.block_tokens:
            victim = int(np.where(self.active, self.age, -1).argmax())
            held = max(int(self.computed[victim]), int(self.prompt[victim]))
            self.queue.appendleft((held, int(self.end[victim]) - held))
            self.active[victim] = False

    def _admit(self) -> None:
        if not self.queue or self.active.all():
            return
        size = self.profile.block_tokens
        free = self.profile.kv_tokens // size - self._blocks()
        for slot in np.flatnonzero(~self.active):
            if not self.queue or (self.queue[0][0] // size + 2 > free and self.active.any()):
                return
            prompt, output = self.queue.popleft()
            free -= prompt // size + 1
            self.admitted += 1
            self.active[slot], self.computed[slot], self.age[slot] = True, 0, self.admitted
            self.prompt[slot], self.end[slot] = prompt, prompt + output

    def _step(self) -> tuple[float, int, int]:
        cost = self.profile.cost
        decoding = self.active & (self.computed >= self.prompt)
        rows = int(decoding.sum())
        step_s = cost.c0_s + rows * cost.c_out_s + cost.c_kv_s * (float(self.computed[decoding].sum()) + rows)
        advance = decoding.astype(np.int64)
        prefilling = np.flatnonzero(self.active & ~decoding)
        tokens = self.profile.max_step_tokens - rows
        for slot in prefilling[np.argsort(self.age[prefilling])].tolist():
            start = int(self.computed[slot])
            count = min(int(self.prompt[slot]) - start, tokens, self._fitting(start, self.cap_s - step_s))
            if count < 1:
                break
            advance[slot] = count
            tokens -= count
            step_s += self._chunk_s(start, count)
        self.computed += advance
        ended = self.active & (advance > 0) & (self.computed + 1 >= self.end)
        self.active &= ~ended
        return step_s, rows, int(ended.sum())

    def _chunk_s(self, start: int, count: int) -> float:
        cost, end = self.profile.cost, start + count
        return cost.c_in_s * count + cost.c_kv_s * end + cost.c_att_s * count * end

    def _fitting(self, start: int, room_s: float) -> int:
        low, high = 0, self.profile.max_step_tokens
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._chunk_s(start, middle) <= room_s else (low, middle - 1)
        return low


@pytest.mark.parametrize("name", CASES)
def test_saturation_agrees_with_a_loop_of_steps(name: str) -> None:
    case = CASES[name]
    profile = make_profile(case.slots, case.kv_tokens)
    model = SteadyModel(profile, case.mix, case.targets)
    planned = model.saturate()
    measured = StepLoop(profile, case.mix, model.cap_s).run(4000)
    assert planned.limit == case.limit
    assert planned.at.rate_per_s == pytest.approx(measured.rate_per_s, rel=0.1)
    assert planned.at.decode_rows == pytest.approx(measured.decode_rows, rel=0.1)
    assert planned.at.step_s == pytest.approx(measured.step_s, rel=0.1)


@pytest.mark.parametrize("name", CASES)
def test_half_load_agrees_with_a_loop_of_steps(name: str) -> None:
    case = CASES[name]
    profile = make_profile(case.slots, case.kv_tokens)
    model = SteadyModel(profile, case.mix, case.targets)
    half = model.saturate().at.rate_per_s / 2
    measured = StepLoop(profile, case.mix, model.cap_s).run(6000, half)
    # At the rate that came, which is not quite the rate that was asked for.
    planned = model.operate(measured.rate_per_s)
    assert planned is not None
    assert planned.decode_rows == pytest.approx(measured.decode_rows, rel=0.1)
    assert planned.step_s == pytest.approx(measured.step_s, rel=0.1)


def test_a_step_that_takes_few_tokens_is_named_as_the_limit() -> None:
    profile = msgspec.structs.replace(make_profile(), max_step_tokens=256)
    model = SteadyModel(profile, DOCUMENTS, Targets())
    planned = model.saturate()
    measured = StepLoop(profile, DOCUMENTS, model.cap_s).run(3000)
    assert planned.limit == "step_tokens"
    assert planned.at.rate_per_s == pytest.approx(measured.rate_per_s, rel=0.1)


def test_long_outputs_count_by_the_steps_they_stay() -> None:
    """Same means, more spread: contexts are longer on average over steps, so decoding reads more KV."""
    even = SteadyModel(make_profile(), single_mix(Fixed(100), Fixed(500)), Targets()).saturate()
    spread = Mixture(((0.5, Fixed(20)), (0.5, Fixed(980))))
    uneven = SteadyModel(make_profile(), single_mix(Fixed(100), spread), Targets()).saturate()
    assert uneven.at.work.decode_steps == pytest.approx(even.at.work.decode_steps)
    assert uneven.at.kv_tokens > 1.3 * even.at.kv_tokens
    assert uneven.at.rate_per_s < even.at.rate_per_s


def plan_chat(rate: int = 300, **changes: object) -> PlanReport:
    load = Load(CHAT, Fraction(rate), Fraction(1, 5), Fraction(2))
    profile, targets = make_profile(), Targets(1.0, 0.05)
    return plan_profile(msgspec.structs.replace(load, **changes), profile, targets)


def test_a_profile_gives_replicas_utilisation_and_cost_that_hang_together() -> None:
    report = plan_chat()
    assert report.replica is not None and report.replica.planned is not None and report.cost is not None
    sustained = report.sustained_rate_per_s_per_replica.value
    assert report.replicas_needed == math.ceil(300 / sustained)
    assert report.replicas == report.replicas_with_headroom == math.ceil(360 / sustained)
    assert report.utilisation.value == pytest.approx(300 / sustained / report.replicas)
    at = report.replica.planned
    assert at.step_s == pytest.approx(COST.c0_s / (1 - at.rate_per_s * at.work.total_s), rel=1e-3)
    assert at.decode_rows == pytest.approx(at.rate_per_s * at.work.decode_steps * at.step_s, rel=1e-3)
    hourly = (
        300
        * 3600
        * (
            report.input_tokens_per_request.value * report.cost.per_million_input_tokens.value
            + report.output_tokens_per_request.value * report.cost.per_million_output_tokens.value
        )
    )
    assert hourly / 10**6 == pytest.approx(report.cost.per_hour.value)


def test_too_few_given_replicas_have_no_steady_state() -> None:
    report = plan_chat(gpus=2)
    assert report.replica is not None and report.replica.planned is None
    assert report.utilisation.value > 1
    assert any("queue grows without end" in line for line in report.lines)


def test_replicas_of_several_gpus_are_bought_whole() -> None:
    load = Load(CHAT, Fraction(300))
    four = msgspec.structs.replace(make_profile(), gpus_per_replica=4)
    one, whole = plan_profile(load, make_profile(), Targets()), plan_profile(load, four, Targets())
    assert whole.replicas == one.replicas and whole.gpus == 4 * one.gpus
    given = plan_profile(msgspec.structs.replace(load, gpus=11), four, Targets())
    assert given.replicas == 2
    with pytest.raises(InvalidInput, match="gpus"):
        plan_profile(msgspec.structs.replace(load, gpus=3), four, Targets())


def test_a_tight_ttft_buys_replicas_that_the_rate_alone_would_not() -> None:
    load = Load(DOCUMENTS, Fraction(200))
    loose = plan_profile(load, make_profile(), Targets())
    tight = plan_profile(load, make_profile(), Targets(ttft_s=0.32))
    assert loose.replica is not None and tight.replica is not None and tight.replica.planned is not None
    assert tight.replica.ttft_met
    assert tight.replica.planned.long_ttft_s <= 0.32
    assert tight.replicas > tight.replicas_with_headroom


def test_a_ttft_that_nothing_can_keep_is_said_rather_than_bought() -> None:
    load = Load(DOCUMENTS, Fraction(20))
    report = plan_profile(load, make_profile(), Targets(ttft_s=0.1))
    assert report.replica is not None and report.replica.ttft_met is False
    assert report.replicas == report.replicas_with_headroom
    assert any("misses the TTFT target" in line for line in report.lines)


def test_splitting_prefill_from_decode_is_judged_in_words() -> None:
    small = plan_chat(rate=10)
    assert small.replica is not None and small.replica.split is not None
    assert not small.replica.split.pays
    assert any("splitting does not pay" in line for line in small.lines)
    # Long prompts under a tight inter-token target: together, their chunks crawl and hold KV meanwhile.
    long = single_mix(Uniform(3000, 8000), LogNormal(300, 0.4, 5, 1000))
    large = plan_profile(Load(long, Fraction(3000)), make_profile(64, 200_000), Targets(2.0, 0.02))
    assert large.replica is not None and large.replica.split is not None
    assert large.replica.split.pays
    assert any("splitting saves" in line for line in large.lines)
    only = plan_profile(Load(single_mix(Fixed(100), Fixed(1)), Fraction(30)), make_profile(), Targets())
    assert only.replica is not None and only.replica.split is None


@pytest.mark.parametrize(
    ("prompt", "profile", "targets", "param"),
    [
        (Fixed(100), make_profile(slots=0), Targets(), "slots"),
        (Fixed(100), make_profile(kv_tokens=-5), Targets(), "kv_tokens"),
        (Fixed(2000), make_profile(kv_tokens=2010), Targets(), "kv_tokens"),
        (Fixed(100), make_profile(slots=100_000), Targets(), "max_step_tokens"),
        (Fixed(100), ReplicaProfile(CostProfile(c0_s=0.0), 32, 10_000), Targets(), "profile.c0_s"),
        (Fixed(100), ReplicaProfile(CostProfile(c_in_s=math.nan), 32, 10_000), Targets(), "profile.c_in_s"),
        (Fixed(100), make_profile(), Targets(itl_s=math.nan), "slo_itl"),
        (Fixed(100), make_profile(), Targets(itl_s=0.004), "slo_itl"),
        (Fixed(100), make_profile(), Targets(ttft_s=0.02), "slo_ttft"),
        (Fixed(100), make_profile(), Targets(ttft_s=-1.0), "slo_ttft"),
    ],
)
def test_what_no_replica_can_do_is_refused_by_name(
    prompt: Lengths, profile: ReplicaProfile, targets: Targets, param: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        plan_profile(Load(single_mix(prompt, Fixed(50)), Fraction(10)), profile, targets)
    assert refused.value.param == param


def test_a_report_survives_json() -> None:
    report = plan_chat()
    assert msgspec.json.decode(msgspec.json.encode(report), type=PlanReport) == report
