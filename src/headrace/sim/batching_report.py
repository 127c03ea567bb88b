"""What `headrace bench batching` measures: the traces it plays and the figures it takes from each run.

Owns the definitions of occupancy, KV use and latency, the same for every policy; knows no table or picture.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec import Struct, structs

from headrace.sim.batching import FloatArray, IntArray, Machine, Policy, PolicyRun, Trace, run_policy
from headrace.sim.lengths import Lengths

SHORT_TOKENS = 20
# The steady trace's rate, as a share of what static batching served when it never ran dry.
STEADY_SHARE = 0.5
STRAGGLER_PROMPT = 100
STRAGGLER_SHORT = 5
STRAGGLER_OUTPUTS = (50, 100, 200, 500, 1000, 2000, 5000)


class Figures(Struct, frozen=True):
    """One policy on one trace. Shares are of slot-seconds or block-seconds; None where nothing ever waited.

    A slot counts as occupied while its holder is unfinished, a block as used while it holds tokens of
    an unfinished request. Short requests have at most `SHORT_TOKENS` tokens of output.
    """

    output_tokens_per_s: float
    makespan_s: float
    occupancy: float
    occupancy_while_waiting: float | None
    kv_use: float
    kv_use_while_waiting: float | None
    short_p50_s: float | None
    short_p99_s: float | None
    # As if the reply were streamed: until the last token was computed.
    short_streamed_p99_s: float | None
    ttft_p50_s: float
    ttft_p99_s: float
    steps: int
    preemptions: int
    recomputed_tokens: int


class Load(Struct, frozen=True):
    """One trace on one machine, and what each policy made of it."""

    about: str
    rate: float | None
    blocks: int
    policies: dict[Policy, Figures]

    def ratio_to_static(self, policy: Policy) -> float:
        return self.policies[policy].output_tokens_per_s / self.policies[Policy.STATIC].output_tokens_per_s


class Straggler(Struct, frozen=True):
    """One long reply beside short ones: the p99 of the short ones, and one step of a full house for scale."""

    long_output: int
    short_p99_s: dict[Policy, float]
    step_s: float


class BatchingReport(Struct, frozen=True):
    requests: int
    prompt: Lengths
    output: Lengths
    seed: int
    machine: Machine
    linger_s: float
    saturated: Load
    kv_bound: Load
    steady: Load
    straggler: tuple[Straggler, ...]


class Setting(Struct, frozen=True):
    """What a person may change. Without `rate` the first trace is all there at the start."""

    requests: int
    prompt: Lengths
    output: Lengths
    machine: Machine
    rate: float | None = None
    linger_s: float = 0.05
    kv_share: float = 0.5
    seed: int = 0
    straggler_outputs: tuple[int, ...] = STRAGGLER_OUTPUTS


@dataclass(slots=True, frozen=True)
class Comparison:
    """The same trace under every policy, with the runs themselves for the picture."""

    load: Load
    runs: dict[Policy, PolicyRun]


@dataclass(slots=True, frozen=True)
class Batching:
    report: BatchingReport
    saturated: Comparison
    kv_bound: Comparison


Progress = Callable[[str], None]


def run_batching(setting: Setting, progress: Progress) -> Batching:
    """The four parts of the benchmark, one after the other."""
    machine, seed = setting.machine, setting.seed
    trace = draw_trace(setting, setting.rate)
    progress(f"{setting.requests} requests on {machine.slots} slots under {', '.join(Policy)}")
    about = "all requests present at the start" if setting.rate is None else "Poisson arrivals"
    saturated = _compare(f"{about}, KV ample", setting, trace, setting.rate, machine)
    scarce = scarce_machine(saturated.load, trace, setting)
    progress(f"the same requests with {scarce.blocks} instead of {machine.blocks} KV blocks")
    kv_bound = _compare(f"{about}, KV for {setting.kv_share:.0%} of the slots", setting, trace, setting.rate, scarce)
    rate = STEADY_SHARE * setting.requests / saturated.load.policies[Policy.STATIC].makespan_s
    progress(f"a steady {rate:.1f} requests/s, {STEADY_SHARE:.0%} of what static batching can serve")
    steady = _compare("Poisson arrivals that every policy can serve", setting, draw_trace(setting, rate), rate, machine)
    progress("one long reply beside short ones")
    stragglers = tuple(run_straggler(long, machine, setting.linger_s) for long in setting.straggler_outputs)
    report = BatchingReport(
        setting.requests,
        setting.prompt,
        setting.output,
        seed,
        machine,
        setting.linger_s,
        saturated.load,
        kv_bound.load,
        steady.load,
        stragglers,
    )
    return Batching(report, saturated, kv_bound)


def _compare(about: str, setting: Setting, trace: Trace, rate: float | None, machine: Machine) -> Comparison:
    runs = {policy: run_policy(policy, trace, machine, setting.linger_s) for policy in Policy}
    figures = {policy: measure(run) for policy, run in runs.items()}
    return Comparison(Load(about, rate, machine.blocks, figures), runs)


def scarce_machine(ample: Load, trace: Trace, setting: Setting) -> Machine:
    """A pool that holds only `kv_share` of what full slots were seen to fill, but any one request."""
    seen = ample.policies[Policy.CONTINUOUS]
    wanted = (seen.kv_use_while_waiting or seen.kv_use) * ample.blocks
    least = int(setting.machine.blocks_for(int(trace.prompts.max()) + trace.max_output))
    return structs.replace(setting.machine, blocks=max(least, round(setting.kv_share * wanted)))


def measure(run: PolicyRun) -> Figures:
    machine, trace, spans, steps = run.machine, run.trace, run.spans, run.steps
    makespan_s = float(run.returned_s.max() - trace.arrivals_s[0])
    waiting = WaitingTime(run)
    occupied_s = waiting.overlap_s(spans.starts_s, spans.wanted_s).sum()
    kv_waiting = (steps.kv_blocks * waiting.overlap_s(steps.starts_s, steps.ends_s)).sum()
    short = trace.outputs <= SHORT_TOKENS
    latency_s, streamed_s = run.returned_s - trace.arrivals_s, run.finished_s - trace.arrivals_s
    ttft_s = run.first_s - trace.arrivals_s
    return Figures(
        output_tokens_per_s=float(trace.outputs.sum()) / makespan_s,
        makespan_s=makespan_s,
        occupancy=float((spans.wanted_s - spans.starts_s).sum()) / (machine.slots * makespan_s),
        occupancy_while_waiting=_share(occupied_s, machine.slots * waiting.total_s),
        kv_use=float((steps.kv_blocks * (steps.ends_s - steps.starts_s)).sum()) / (machine.blocks * makespan_s),
        kv_use_while_waiting=_share(kv_waiting, machine.blocks * waiting.total_s),
        short_p50_s=percentile(latency_s[short], 50),
        short_p99_s=percentile(latency_s[short], 99),
        short_streamed_p99_s=percentile(streamed_s[short], 99),
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        steps=len(steps.ends_s),
        preemptions=run.preemptions,
        recomputed_tokens=run.recomputed,
    )


class WaitingTime:
    """The instants at which at least one request had no slot though a scheduler could have given it one."""

    def __init__(self, run: PolicyRun) -> None:
        order = np.lexsort((run.spans.starts_s, run.spans.requests))
        requests = run.spans.requests[order]
        again = np.concatenate(([False], requests[1:] == requests[:-1]))
        # A preempted request waits from the end of its last seat; the others since they were noticed.
        since_s = np.where(again, np.roll(run.spans.ends_s[order], 1), run.noticed_s[requests])
        self._edges_s, self._before_s = _merge(since_s, run.spans.starts_s[order])

    @property
    def total_s(self) -> float:
        return float(self._before_s[-1]) if len(self._before_s) else 0.0

    def overlap_s(self, starts_s: FloatArray, ends_s: FloatArray) -> FloatArray:
        """How much of each interval is waiting time."""
        if not len(self._edges_s):
            return np.zeros(len(starts_s))
        ends = np.interp(ends_s, self._edges_s, self._before_s)
        return np.asarray(ends - np.interp(starts_s, self._edges_s, self._before_s))


def _merge(starts_s: FloatArray, ends_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The union of intervals as edges (start, end, start, ...) and the covered seconds before each edge."""
    real = ends_s > starts_s
    order = np.argsort(starts_s[real], kind="stable")
    starts_s, ends_s = starts_s[real][order], np.maximum.accumulate(ends_s[real][order])
    apart = np.flatnonzero(starts_s[1:] > ends_s[:-1])
    firsts = np.concatenate(([0], apart + 1)) if len(starts_s) else apart
    lasts = np.concatenate((apart, [len(starts_s) - 1])) if len(starts_s) else apart
    edges_s = np.column_stack((starts_s[firsts], ends_s[lasts])).ravel()
    covered_s = np.cumsum(np.where(np.arange(len(edges_s)) % 2, np.diff(edges_s, prepend=0.0), 0.0))
    return edges_s, covered_s


def percentile(values: FloatArray, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _share(part: float, whole: float) -> float | None:
    return float(part) / whole if whole > 0.0 else None


def draw_trace(setting: Setting, rate: float | None) -> Trace:
    """All requests present at the start, or Poisson at `rate`; the same lengths either way."""
    rng = np.random.default_rng(setting.seed)
    count = setting.requests
    prompts, outputs = setting.prompt.sample(rng, count), setting.output.sample(rng, count)
    arrivals_s = np.zeros(count) if rate is None else np.cumsum(rng.standard_exponential(count) / rate)
    return Trace(arrivals_s, prompts, outputs, setting.output.greatest)


def saturating_rate(prompt: Lengths, output: Lengths, machine: Machine) -> float:
    """A quarter above what full slots could serve, in requests/s: the queue only grows."""
    profile, slots = machine.profile, machine.slots
    prompts, outputs = float(prompt.mean()), float(output.mean())
    return 1.25 / (outputs * _full_step_s(machine, prompts + outputs / 2) / slots + prompts * profile.c_in_s)


def ample_blocks(prompt: Lengths, output: Lengths, machine: Machine) -> int:
    """Enough for the longest request in every slot, so that KV never binds."""
    return machine.slots * int(machine.blocks_for(prompt.greatest + output.greatest))


def straggler_trace(long_output: int, slots: int) -> Trace:
    """One long reply that arrives first, with a full house of short ones beside it."""
    outputs: IntArray = np.full(slots, STRAGGLER_SHORT, np.int64)
    outputs[0] = long_output
    prompts: IntArray = np.full(slots, STRAGGLER_PROMPT, np.int64)
    return Trace(np.zeros(slots), prompts, outputs, long_output)


def run_straggler(long_output: int, machine: Machine, linger_s: float) -> Straggler:
    trace = straggler_trace(long_output, machine.slots)
    blocks = machine.slots * int(machine.blocks_for(STRAGGLER_PROMPT + long_output))
    ample = structs.replace(machine, blocks=blocks)
    tails = {}
    for policy in Policy:
        run = run_policy(policy, trace, ample, linger_s)
        tails[policy] = float(np.percentile(run.returned_s[1:], 99))
    return Straggler(long_output, tails, _full_step_s(machine, STRAGGLER_PROMPT + STRAGGLER_SHORT))


def _full_step_s(machine: Machine, context: float) -> float:
    """A decode step with every slot at work."""
    profile = machine.profile
    return profile.c0_s + machine.slots * (profile.c_out_s + profile.c_kv_s * context)
