"""The summary of a run: figures a person asks for, computed once from the book.

Owns definitions (what counts as goodput, what a percentile is over). Draws and prints nothing.
"""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.core.event import Waits
from headrace.sim.book import Book
from headrace.sim.meter import jain
from headrace.sim.record import Fate
from headrace.sim.scenario import Scenario
from headrace.sim.world import World

IntArray = NDArray[np.int64]


class Quantiles(Struct, frozen=True):
    """Seconds; None where there was nothing to measure."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    mean: float | None = None


class Fates(Struct, frozen=True):
    arrived: int
    finished: int
    cancelled: int
    failed: int
    refused: int
    invalid: int


class TenantSummary(Struct, frozen=True):
    tenant: str
    weight: float
    requests: Fates
    output_tokens: int
    output_tokens_per_s: float
    ttft_s: Quantiles
    e2e_s: Quantiles
    # Share of the arrived requests that were finished within their targets.
    good_share: float | None
    # Device time given to this tenant while anybody waited.
    contended_device_s: float
    # What it was given while backlogged, over its part by weight among the backlogged; 1 is fair.
    given_over_due: float | None
    preemptions: int


class Summary(Struct, frozen=True):
    scenario: str
    seed: int
    workers: int
    slots: int
    depth: int
    # From zero to the last end, in virtual seconds.
    virtual_s: float
    requests: Fates
    # Every time a worker said not now, clients that came back included.
    refusals: int
    reasons: dict[str, int]
    output_tokens: int
    output_tokens_per_s: float
    # Finished within their targets, per second.
    good_requests_per_s: float
    good_share: float | None
    ttft_s: Quantiles
    itl_s: Quantiles
    e2e_s: Quantiles
    # Mean seconds of finished requests in each stage of the engine.
    stages_s: dict[str, float]
    utilisation: float
    slot_occupancy: float | None
    # In steps that left somebody waiting: when an idle slot is a loss.
    slot_occupancy_while_waiting: float | None
    kv_use: float | None
    kv_use_while_waiting: float | None
    kv_use_max: float
    max_waiting: int
    max_queue_s: float
    preemptions: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    recomputed_tokens: int
    replayed_tokens: int
    replays: int
    # Jain's index over what backlogged tenants were given against their due; None without two of them.
    fairness: float | None
    tenants: tuple[TenantSummary, ...]
    trace_hash: str
    steps: int
    wall_s: float
    steps_per_s: float
    # Streams held against the truth; None when that was not asked for.
    verified: int | None = None


def summarise(world: World, wall_s: float, verified: int | None = None) -> Summary:
    book, scenario = world.book, world.scenario
    records, meter = book.records, book.meter
    end_ns = records.column("end_ns")
    virtual_s = float(end_ns.max()) / 1e9 if len(end_ns) else 0.0
    fates = records.column("fate")
    everyone = np.ones(len(fates), np.bool_)
    good = int(records.column("good").sum())
    reasons = np.bincount(records.column("reason"), minlength=len(records.reasons)).tolist()
    device_s = virtual_s * scenario.workers
    return Summary(
        scenario=scenario.name,
        seed=scenario.seed,
        workers=scenario.workers,
        slots=scenario.engine.slots,
        depth=scenario.depth,
        virtual_s=virtual_s,
        requests=_fates(fates),
        refusals=book.num_refusals,
        reasons=dict(sorted(zip(records.reasons, reasons, strict=True))),
        output_tokens=book.num_tokens,
        output_tokens_per_s=_rate(book.num_tokens, virtual_s),
        good_requests_per_s=_rate(good, virtual_s),
        good_share=good / len(fates) if len(fates) else None,
        ttft_s=_ttft(book, everyone),
        itl_s=_itl(book),
        e2e_s=_e2e(book, everyone),
        stages_s=_stages(book, fates == Fate.FINISHED),
        utilisation=_rate(meter.busy_ns / 1e9, device_s),
        slot_occupancy=meter.occupancy(),
        slot_occupancy_while_waiting=meter.occupancy(contended=True),
        kv_use=meter.kv_use(),
        kv_use_while_waiting=meter.kv_use(contended=True),
        kv_use_max=meter.max_used_blocks / scenario.engine.blocks,
        max_waiting=meter.max_waiting,
        max_queue_s=meter.max_queue_s,
        preemptions=int(records.column("preemptions").sum()),
        prompt_tokens_computed=int(records.column("prompt_computed").sum()),
        prompt_tokens_cached=int(records.column("prompt_cached").sum()),
        recomputed_tokens=int(records.column("recomputed").sum()),
        replayed_tokens=int(records.column("replayed").sum()),
        replays=int(records.column("replays").sum()),
        fairness=_fairness(book),
        tenants=_tenants(book, scenario, virtual_s),
        trace_hash=book.trace_hash.hexdigest(),
        steps=meter.num_steps,
        wall_s=wall_s,
        steps_per_s=_rate(meter.num_steps, wall_s),
        verified=verified,
    )


def _tenants(book: Book, scenario: Scenario, virtual_s: float) -> tuple[TenantSummary, ...]:
    records = book.records
    weights = {tenant.name: tenant.weight for tenant in scenario.tenants}
    owner, fates, good = records.column("tenant"), records.column("fate"), records.column("good")
    # What a stream had from a worker that died was replayed, not emitted again; it was delivered all the same.
    delivered = records.column("emitted") + records.column("replayed")
    preemptions = records.column("preemptions")
    rows = []
    for index, name in enumerate(book.tenants):
        mine = owner == index
        count = int(mine.sum())
        tokens = int(delivered[mine].sum())
        rows.append(
            TenantSummary(
                tenant=name,
                weight=weights.get(name, 1.0),
                requests=_fates(fates[mine]),
                output_tokens=tokens,
                output_tokens_per_s=_rate(tokens, virtual_s),
                ttft_s=_ttft(book, mine),
                e2e_s=_e2e(book, mine),
                good_share=int(good[mine].sum()) / count if count else None,
                contended_device_s=book.service.seconds(index),
                given_over_due=book.service.given_over_due(index),
                preemptions=int(preemptions[mine].sum()),
            )
        )
    return tuple(rows)


def _fairness(book: Book) -> float | None:
    ratios = [book.service.given_over_due(index) for index in range(len(book.tenants))]
    known = [ratio for ratio in ratios if ratio is not None]
    return jain(known) if len(known) > 1 else None


def _fates(fates: IntArray) -> Fates:
    counts = np.bincount(fates, minlength=len(Fate)).tolist()
    return Fates(
        arrived=len(fates),
        finished=counts[Fate.FINISHED],
        cancelled=counts[Fate.CANCELLED],
        failed=counts[Fate.FAILED],
        refused=counts[Fate.REFUSED],
        invalid=counts[Fate.INVALID],
    )


def _ttft(book: Book, chosen: NDArray[np.bool_]) -> Quantiles:
    """Arrival to first token, over every request that had one."""
    first_ns = book.records.column("first_ns")
    served = chosen & (first_ns >= 0)
    return _quantiles((first_ns - book.records.column("arrival_ns"))[served])


def _e2e(book: Book, chosen: NDArray[np.bool_]) -> Quantiles:
    """Arrival to end, over finished requests."""
    done = chosen & (book.records.column("fate") == Fate.FINISHED)
    return _quantiles((book.records.column("end_ns") - book.records.column("arrival_ns"))[done])


def _itl(book: Book) -> Quantiles:
    gaps = book.gaps
    return Quantiles(
        gaps.quantile_s(0.5), gaps.quantile_s(0.95), gaps.quantile_s(0.99), gaps.quantile_s(1.0), gaps.mean_s()
    )


def _stages(book: Book, finished: NDArray[np.bool_]) -> dict[str, float]:
    if not finished.any():
        return {}
    return {name: float(book.records.seconds(name)[finished].mean()) for name in Waits.__struct_fields__}


def _quantiles(times_ns: IntArray) -> Quantiles:
    if not len(times_ns):
        return Quantiles()
    p50, p95, p99 = np.quantile(times_ns, (0.5, 0.95, 0.99), method="inverted_cdf").tolist()
    return Quantiles(p50 / 1e9, p95 / 1e9, p99 / 1e9, float(times_ns.max()) / 1e9, float(times_ns.mean()) / 1e9)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0.0 else 0.0
