"""Figures of a run, computed from its record after it is over. Owns their definitions; prints nothing.

TTFT, E2E: from the intended time of sending. ITL: each gap between two pieces of a reply that brought tokens.
TPOT: a request's mean time per token after the first. Goodput: requests that finished within every limit, per second.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.cli.load.drive import Count, RunRecord
from headrace.cli.load.outcome import Outcome, State
from headrace.cli.load.plan import LoadPlan, TenantLoad
from headrace.cli.load.process import is_gateway
from headrace.core.errors import InvalidInput
from headrace.sim.arrivals import Together

FloatArray = NDArray[np.float64]
# Ends that a server which keeps its promises never causes.
_NO_ENDS = (State.BROKEN, State.HUNG)
_MOST_EXAMPLES = 5


class Slo(Struct, frozen=True):
    """Limits in seconds; `itl` is of a request's mean gap (TPOT)."""

    ttft: float = math.inf
    itl: float = math.inf
    e2e: float = math.inf


class Percentiles(Struct, frozen=True):
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    mean: float
    count: int


class Figures(Struct, frozen=True):
    """Of one tenant, or of all together. Seconds throughout; None where there was nothing to measure."""

    requests: int
    states: dict[str, int]
    # Refusals and failures by status and code, as "503 queue_full".
    errors: dict[str, int]
    finished_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Percentiles | None
    itl_s: Percentiles | None
    tpot_s: Percentiles | None
    e2e_s: Percentiles | None
    # From the intended time to the first byte written, and from then to the end: how much of E2E is the client's.
    lateness_s: Percentiles | None
    service_s: Percentiles | None
    good_share: float | None
    goodput_per_s: float | None
    # Of arrivals at times fixed in advance: requests by the time in which they came, without that of the last replies.
    offered_per_s: float | None = None


class ProcessFigures(Struct, frozen=True):
    """One process while the load was counted, and before and after the whole run."""

    pid: int
    title: str
    cpu_s: float
    requests_per_cpu_s: float | None
    frames_per_cpu_s: float | None
    rss_bytes: tuple[int, int]
    peak_rss_bytes: int
    descriptors: tuple[int, int]
    threads: tuple[int, int]


class ClientFigures(Struct, frozen=True):
    """What the load tool itself used; when it is busy all the time, it measures itself."""

    cpu_s: float
    cpu_share: float
    cpu_us_per_frame: float | None
    received_bytes: int
    connections: int


class RunFigures(Struct, frozen=True):
    """`seconds` runs from the end of the warm-up to the last reply's end."""

    streamed: bool
    seconds: float
    frames: int
    frames_per_s: float
    overall: Figures
    tenants: dict[str, Figures]
    processes: list[ProcessFigures]
    gateway: ProcessFigures | None
    client: ClientFigures
    # Of all requests, the warm-up's as well: those without exactly one proper end.
    without_end: int
    examples: list[str]


def parse_slo(text: str) -> Slo:
    """`ttft=0.5,itl=0.1,e2e=10`, each in seconds and each optional."""
    limits = {}
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in Slo.__struct_fields__ or not limit > 0:
            raise InvalidInput(f"--slo is written ttft=0.5,itl=0.1,e2e=10, not {text[:80]!r}", param="--slo")
        limits[name] = limit
    return Slo(**limits)


def figures_of(record: RunRecord, plan: LoadPlan, slo: Slo | None, *, streamed: bool) -> RunFigures:
    counted = [outcome for outcome in record.outcomes if outcome.counted]
    seconds = max(1e-9, record.ended.at_s - record.began.at_s)
    by_tenant: dict[str, list[Outcome]] = {load.name: [] for load in plan.tenants}
    for outcome in counted:
        by_tenant[plan.tenants[outcome.shot.tenant].name].append(outcome)
    processes = _processes(record)
    # A foreign server with one process is its own gateway.
    gateways = [process for process in processes if is_gateway(process.title)] or processes
    frames = record.ended.frames - record.began.frames
    bad = [outcome for outcome in record.outcomes if is_without_end(outcome)]
    return RunFigures(
        streamed=streamed,
        seconds=seconds,
        frames=frames,
        frames_per_s=frames / seconds,
        overall=summarise(counted, seconds, slo, _arrival_s(counted, plan.tenants, plan)),
        tenants={
            load.name: summarise(theirs, seconds, slo, _arrival_s(theirs, (load,), plan))
            for load, theirs in zip(plan.tenants, by_tenant.values(), strict=True)
        },
        processes=processes,
        gateway=gateways[0] if len(gateways) == 1 else None,
        client=_client(record, seconds, frames),
        without_end=len(bad),
        examples=[_example(outcome) for outcome in bad[:_MOST_EXAMPLES]],
    )


def is_without_end(outcome: Outcome) -> bool:
    return outcome.state is None or outcome.state in _NO_ENDS or bool(outcome.violation)


def summarise(outcomes: Sequence[Outcome], seconds: float, slo: Slo | None, arrival_s: float | None = None) -> Figures:
    finished = [outcome for outcome in outcomes if outcome.state is State.FINISHED]
    judged = [outcome for outcome in outcomes if outcome.state not in (State.LEFT, State.TIMED_OUT)]
    good = None if slo is None else sum(_is_good(outcome, slo) for outcome in finished)
    return Figures(
        requests=len(outcomes),
        states={str(state): count for state, count in Counter(outcome.state for outcome in outcomes).items()},
        errors=dict(Counter(f"{o.status} {o.code}" for o in outcomes if o.state in (State.REFUSED, State.FAILED))),
        finished_per_s=len(finished) / seconds,
        prompt_tokens_per_s=sum(outcome.prompt_tokens for outcome in outcomes) / seconds,
        output_tokens_per_s=sum(_tokens(outcome) for outcome in outcomes) / seconds,
        ttft_s=percentiles(outcome.ttft_s for outcome in outcomes),
        itl_s=percentiles(gaps(outcomes)),
        tpot_s=percentiles(outcome.mean_itl_s for outcome in finished),
        e2e_s=percentiles(outcome.e2e_s for outcome in finished),
        lateness_s=percentiles(o.sent_s - o.intended_s for o in outcomes if o.sent_s is not None),
        service_s=percentiles(o.ended_s - o.sent_s for o in finished if o.sent_s is not None and o.ended_s is not None),
        good_share=None if good is None or not judged else good / len(judged),
        goodput_per_s=None if good is None else good / seconds,
        offered_per_s=None if arrival_s is None else len(outcomes) / arrival_s,
    )


def _arrival_s(outcomes: Iterable[Outcome], loads: Iterable[TenantLoad], plan: LoadPlan) -> float | None:
    """In how much time they came; None where that follows from the replies, or where all came at once."""
    if any(load.is_closed or isinstance(load.arrivals, Together) for load in loads):
        return None
    if plan.duration_s is not None and all(load.requests is None and load.trace is None for load in loads):
        return plan.duration_s
    last_s = max((outcome.shot.at_s for outcome in outcomes), default=0.0) - plan.warmup_s
    return last_s if last_s > 0 else None


def gaps(outcomes: Iterable[Outcome]) -> FloatArray:
    """All gaps between pieces, request after request."""
    parts = [np.diff(np.frombuffer(outcome.pieces_s)) for outcome in outcomes if len(outcome.pieces_s) > 1]
    return np.concatenate(parts) if parts else np.zeros(0)


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Nearest rank: every figure is one that was measured."""
    known = values if isinstance(values, np.ndarray) else np.array([v for v in values if v is not None], np.float64)
    if not len(known):
        return None
    ranks = np.percentile(known, [50, 90, 95, 99, 100], method="inverted_cdf")
    p50, p90, p95, p99, most = (float(value) for value in ranks)
    return Percentiles(p50, p90, p95, p99, most, float(known.mean()), len(known))


def _is_good(outcome: Outcome, slo: Slo) -> bool:
    """A reply that came whole has no first piece: all of it came when it ended."""
    limits = ((outcome.ttft_s or outcome.e2e_s, slo.ttft), (outcome.mean_itl_s, slo.itl), (outcome.e2e_s, slo.e2e))
    return all(value is None or value <= limit for value, limit in limits)


def _tokens(outcome: Outcome) -> int:
    """As the server counted them, or, where the client went before it said, as many as came."""
    ids = sum(len(ids) for ids in outcome.ids.values())
    return outcome.output_tokens or ids or len(outcome.pieces_s)


def _processes(record: RunRecord) -> list[ProcessFigures]:
    found = []
    for pid, end in record.ended.usages.items():
        start, before = record.began.usages.get(pid), record.before.get(pid)
        after = record.after.get(pid, end)
        if start is None or before is None:
            continue
        cpu_s = end.cpu_s - start.cpu_s
        found.append(
            ProcessFigures(
                pid=pid,
                title=end.title,
                cpu_s=cpu_s,
                requests_per_cpu_s=_per(record, cpu_s, lambda count: count.ended),
                frames_per_cpu_s=_per(record, cpu_s, lambda count: count.frames),
                rss_bytes=(before.rss_bytes, after.rss_bytes),
                peak_rss_bytes=max(record.peak_rss_bytes.get(pid, 0), before.rss_bytes, end.rss_bytes),
                descriptors=(before.descriptors, after.descriptors),
                threads=(before.threads, after.threads),
            )
        )
    return found


def _per(record: RunRecord, cpu_s: float, number: Callable[[Count], int]) -> float | None:
    """The kernel counts in hundredths: less than ten of them say nothing."""
    return (number(record.ended) - number(record.began)) / cpu_s if cpu_s >= 0.1 else None


def _client(record: RunRecord, seconds: float, frames: int) -> ClientFigures:
    cpu_s = record.ended.client_cpu_s - record.began.client_cpu_s
    per_frame = cpu_s / frames * 1e6 if frames else None
    return ClientFigures(cpu_s, cpu_s / seconds, per_frame, record.received_bytes, record.dialled)


def _example(outcome: Outcome) -> str:
    what = outcome.violation or outcome.message or "no end"
    return f"request {outcome.shot.number} ({outcome.request_id or 'no id'}, {outcome.state}): {what}"
