"""Whole scenarios under the virtual clock: the real engine, seeded load, clients and trouble."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.config import CostProfile, EngineConfig
from headrace.sim.arrivals import Poisson, Together
from headrace.sim.record import Fate
from headrace.sim.report import Summary, summarise
from headrace.sim.scenario import (
    Cancels,
    Drift,
    Prefix,
    Readers,
    Retries,
    Scenario,
    SlowReaders,
    SlowWorker,
    TenantLoad,
    WorkerDeath,
    check_scenario,
    read_scenario,
)
from headrace.sim.traces import TraceRow, write_trace
from headrace.sim.world import World

pytestmark = pytest.mark.sim

STEP_S = 0.01
# A step takes ten milliseconds whatever it holds, so that times can be counted in steps.
EVEN = CostProfile(c0_s=STEP_S, c_in_s=0.0, c_out_s=0.0, c_kv_s=0.0, c_att_s=0.0)
ENGINE = EngineConfig(slots=8, blocks=256, context_len=1024, vocab_size=500)
EXAMPLES = Path(__file__).parents[2] / "examples"


def load(rate: float = 40.0, **others: object) -> TenantLoad:
    return replace(TenantLoad("a", Poisson(rate), "uniform:5:60", "uniform:2:40", stop_share=0.5), **others)


def scenario(*tenants: TenantLoad, **others: object) -> Scenario:
    made = replace(Scenario(requests=150, engine=ENGINE, tenants=tenants or (load(),)), **others)
    check_scenario(made)
    return made


def traced(tmp_path: Path, *rows: TraceRow, **others: object) -> Scenario:
    write_trace(tmp_path / "t.jsonl", rows)
    return replace(Scenario(trace=str(tmp_path / "t.jsonl"), engine=replace(ENGINE, profile=EVEN)), **others)


def ran(asked: Scenario, *, verified: bool = True) -> World:
    """Run to the end; in detail every stream is held against its truth."""
    world = World(asked, detail=verified)
    world.run()
    if verified:
        world.verify()
    assert len(world.book.records) == world.book.num_arrived
    return world


def summary(world: World) -> Summary:
    return summarise(world, 1.0)


def fates(world: World) -> dict[str, int]:
    return summary(world).reasons


def ended_at(world: World) -> dict[int, float]:
    records = world.book.records
    return dict(zip(records.column("ordinal").tolist(), (records.column("end_ns") / 1e9).tolist(), strict=True))


def times_of(world: World, ordinal: int) -> list[float]:
    return [instant / 1e9 for instant in world.book.streams[ordinal].times_ns.tolist()]


def test_a_single_request_takes_a_step_a_token(tmp_path: Path) -> None:
    world = ran(traced(tmp_path, TraceRow(1.0, 20, 5)))
    assert times_of(world, 0) == pytest.approx([1.01, 1.02, 1.03, 1.04, 1.05])
    told = summary(world)
    assert told.ttft_s.p50 == pytest.approx(0.01)
    assert told.itl_s.p50 == pytest.approx(0.01, rel=0.005)
    assert told.e2e_s.max == pytest.approx(0.05)
    assert (told.steps, told.output_tokens, told.requests.finished) == (5, 5, 1)
    assert told.good_share == 1.0


def test_requests_of_one_instant_share_their_first_step(tmp_path: Path) -> None:
    world = ran(traced(tmp_path, *[TraceRow(0.0, 10, 3)] * 8))
    assert all(times_of(world, ordinal) == pytest.approx([0.01, 0.02, 0.03]) for ordinal in range(8))


@pytest.mark.parametrize("long_output", [50, 500])
def test_a_straggler_holds_up_nobody(tmp_path: Path, long_output: int) -> None:
    rows = [TraceRow(0.0, 10, long_output), *[TraceRow(0.0, 10, 5)] * 31]
    world = ran(traced(tmp_path, *rows, engine=replace(ENGINE, slots=8, profile=EVEN)))
    for ordinal in range(1, 32):
        times = times_of(world, ordinal)
        assert times[-1] - times[0] == pytest.approx(4 * STEP_S)
    # Seven short ones at a time beside the long one, each batch of them in the step after the last.
    assert max(ended_at(world)[ordinal] for ordinal in range(1, 32)) == pytest.approx(25 * STEP_S)


@pytest.mark.parametrize("depth", [1, 2])
def test_everything_at_once_is_still_right(depth: int) -> None:
    """Little memory, prefixes, stops, cancels, slow readers and two deaths: every token as if alone."""
    tenants = (
        load(200.0, prefix=Prefix(32, groups=2, share=0.5), cancels=Cancels(0.1, after_tokens="uniform:1:20")),
        load(200.0, name="b", tier="free", slow_readers=SlowReaders(0.2, 30.0), cancels=Cancels(0.1, after_s=0.2)),
        load(50.0, name="c", tier="batch", admission="guaranteed"),
    )
    asked = scenario(
        *tenants,
        workers=3,
        depth=depth,
        requests=300,
        engine=replace(ENGINE, blocks=24, slots=6),
        readers=Readers(bound_tokens=8, limit_s=2.0),
        happenings=(WorkerDeath(0.3, 0, restart_s=0.5), WorkerDeath(0.6, 2, restart_s=0.3)),
    )
    world = ran(asked)
    told = summary(world)
    assert told.preemptions > 0 and told.replays > 0 and told.prompt_tokens_cached > 0
    assert told.requests.finished > 200 and told.requests.cancelled > 10
    assert told.requests.failed == told.requests.invalid == 0


def test_same_seed_same_hash() -> None:
    asked = scenario(load(cancels=Cancels(0.2, after_s=0.1)), load(name="b"), workers=2, depth=2)
    hashes = [summary(ran(asked, verified=verified)).trace_hash for verified in (True, False, False)]
    assert len(set(hashes)) == 1
    assert summary(ran(replace(asked, seed=1), verified=False)).trace_hash != hashes[0]


def test_cells_change_no_decision() -> None:
    """Nor do they where memory is short and what was preempted finds its blocks again."""
    engine = replace(ENGINE, blocks=16, slots=8)
    asked = scenario(load(400.0, prefix=Prefix(32, groups=2, share=0.5), output="uniform:30:90"), engine=engine)
    told = [summary(ran(replace(asked, cells=cells), verified=False)) for cells in (True, False)]
    assert told[0].trace_hash == told[1].trace_hash
    assert told[0].prompt_tokens_cached == told[1].prompt_tokens_cached > 0
    assert told[0].preemptions > 0


def test_a_saved_trace_gives_the_same_run(tmp_path: Path) -> None:
    from headrace.sim.workload import draw_rows

    asked = scenario(load(), load(name="b", weight=2.0))
    write_trace(tmp_path / "t.jsonl", draw_rows(asked))
    silent = tuple(replace(tenant, arrivals=None) for tenant in asked.tenants)
    replayed = replace(asked, tenants=silent, trace=str(tmp_path / "t.jsonl"))
    assert summary(ran(replayed)).trace_hash == summary(ran(asked)).trace_hash


def test_a_dead_workers_streams_go_on_elsewhere(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 10, 40), TraceRow(0.0, 10, 40)]
    asked = traced(tmp_path, *rows, workers=2, happenings=(WorkerDeath(0.205, 0),))
    world = ran(asked)
    records = world.book.records
    moved = int(records.column("ordinal")[records.column("replays") == 1][0])
    times = times_of(world, moved)
    assert len(times) == 40 and times[19] == pytest.approx(0.2)
    assert times[20] < 0.25
    assert records.column("replayed").sum() == 20
    assert records.column("worker").tolist() == [1, 1]
    assert summary(world).requests.finished == 2


def test_with_no_worker_left_clients_wait_for_one(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 10, 40), TraceRow(0.3, 10, 5), TraceRow(0.4, 10, 5, cancel_after_s=0.1)]
    asked = traced(tmp_path, *rows, happenings=(WorkerDeath(0.2, 0, restart_s=1.0),))
    world = ran(asked)
    assert fates(world) == {"length": 2, "cancelled": 1}
    assert ended_at(world)[2] == pytest.approx(0.5)
    assert times_of(world, 0)[-1] > 1.2 and times_of(world, 1)[0] == pytest.approx(1.21)


def test_with_no_worker_ever_again_clients_are_told(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 10, 40), TraceRow(0.3, 10, 5)]
    world = ran(traced(tmp_path, *rows, happenings=(WorkerDeath(0.2, 0),)))
    assert fates(world) == {"no_worker": 2}
    assert summary(world).requests.failed == 2


def test_cancels_end_their_streams_and_no_other(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 10, 40, cancel_after_s=0.1), TraceRow(0.0, 10, 40, cancel_after_tokens=7)]
    rows += [TraceRow(0.0, 10, 40, cancel_after_s=5.0), TraceRow(0.0, 10, 40, cancel_after_tokens=41)]
    world = ran(traced(tmp_path, *rows))
    assert [len(world.book.streams[ordinal].tokens) for ordinal in range(4)] == [9, 7, 40, 40]
    assert fates(world) == {"cancelled": 2, "length": 2}


def test_a_slow_reader_pauses_its_own_stream_only(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 10, 100, reader_tokens_per_s=20.0), TraceRow(0.0, 10, 100)]
    world = ran(traced(tmp_path, *rows, readers=Readers(bound_tokens=10, limit_s=5.0)))
    slow, quick = times_of(world, 0), times_of(world, 1)
    assert quick[-1] == pytest.approx(1.0)
    # It reads twenty a second and may be ten tokens behind.
    assert 4.0 < slow[-1] < 5.2
    delivered = np.arange(1, 101) - 20.0 * np.array(slow)
    assert delivered.max() <= 12
    assert world.book.records.seconds("paused_s").max() > 2.0


def test_a_reader_that_never_reads_is_sent_away(tmp_path: Path) -> None:
    row = TraceRow(0.0, 10, 100, reader_tokens_per_s=0.0)
    world = ran(traced(tmp_path, row, readers=Readers(bound_tokens=10, limit_s=5.0)))
    assert fates(world) == {"slow_reader": 1}
    assert ended_at(world)[0] == pytest.approx(5.11)


def test_a_sleeping_worker_wakes_for_a_deadline(tmp_path: Path) -> None:
    row = TraceRow(0.0, 10, 100, reader_tokens_per_s=0.0, deadline_s=3.0)
    world = ran(traced(tmp_path, row, readers=Readers(bound_tokens=10, limit_s=5.0)))
    assert fates(world) == {"deadline_exceeded": 1}
    assert ended_at(world)[0] == pytest.approx(3.0)


def test_waiting_too_long_ends_a_request(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 10, 200), TraceRow(0.1, 10, 5, queue_timeout_s=0.5)]
    world = ran(traced(tmp_path, *rows, engine=replace(ENGINE, slots=1, profile=EVEN)))
    assert fates(world) == {"length": 1, "timed_out": 1}
    assert ended_at(world)[1] == pytest.approx(0.6, abs=2 * STEP_S)


def test_bad_requests_are_counted_and_hold_nothing(tmp_path: Path) -> None:
    world = ran(traced(tmp_path, TraceRow(0.0, 5000, 5), TraceRow(0.0, 10, 5), TraceRow(0.0, 10, 2000)))
    assert fates(world) == {"context_length_exceeded": 2, "length": 1}
    assert summary(world).requests.invalid == 2


def test_refused_clients_may_come_back() -> None:
    engine = replace(ENGINE, slots=2, max_queue_s=0.2)
    backlog = load(arrivals=Together(200), output=20, stop_share=0.0)
    once = ran(scenario(backlog, engine=engine, requests=None), verified=False)
    again = ran(scenario(backlog, engine=engine, requests=None, retries=Retries(1.0, tries=100)), verified=False)
    assert summary(once).requests.refused > 10
    assert summary(once).refusals == summary(once).requests.refused
    assert summary(again).requests.finished > summary(once).requests.finished
    assert summary(again).refusals > summary(again).requests.refused


def test_slow_workers_and_drift_take_their_time(tmp_path: Path) -> None:
    happenings = (SlowWorker(0.1, 3.0, until_s=0.25), Drift(0.45, 2.0))
    world = ran(traced(tmp_path, TraceRow(0.0, 10, 40), happenings=happenings))
    gaps = np.diff(times_of(world, 0)).round(6)
    assert [float(gap) for gap in np.unique(gaps)] == [0.01, 0.02, 0.03]
    assert gaps[-1] == 0.02
    assert (gaps == 0.03).sum() == 5


def test_time_on_the_host_counts_only_where_nothing_hides_it(tmp_path: Path) -> None:
    ends = [ended_at(ran(traced(tmp_path, TraceRow(0.0, 10, 20), depth=depth, host_s=0.004)))[0] for depth in (1, 2)]
    assert ends[0] == pytest.approx(20 * 0.01 + 19 * 0.004)
    assert ends[1] < 0.21


def test_work_is_spread_over_workers() -> None:
    world = ran(scenario(load(200.0), workers=4, requests=400), verified=False)
    counts = np.bincount(world.book.records.column("worker"), minlength=4)
    assert counts.min() > 50


def test_occupancy_and_waits_are_those_of_the_steps(tmp_path: Path) -> None:
    rows = [TraceRow(0.0, 10, 10), TraceRow(0.0, 10, 10), TraceRow(0.0, 10, 10)]
    told = summary(ran(traced(tmp_path, *rows, engine=replace(ENGINE, slots=2, profile=EVEN))))
    assert told.slot_occupancy == pytest.approx((2 * 10 + 1 * 10) / (2 * 20))
    assert told.slot_occupancy_while_waiting == 1.0
    assert told.utilisation == pytest.approx(1.0)
    assert told.max_waiting == 1
    assert told.stages_s["wait_capacity_s"] + told.stages_s["wait_fairness_s"] == pytest.approx(0.1 / 3)


def test_fairness_is_measured_where_tenants_wait() -> None:
    """Backlogs of small and large requests, by weight; the third never waits and owes nothing."""
    small = load(arrivals=Together(300), prompt=20, output=10, stop_share=0.0, ttft_target_s=1e4)
    large = replace(small, name="large", arrivals=Together(60), output=100, weight=2.0)
    calm = load(2.0, name="calm", tier="enterprise", stop_s=3.0, prompt=5, output=2, stop_share=0.0)
    engine = replace(ENGINE, max_queue_s=1e4, queue_timeout_s=1e4, ageing_s=1e4)
    told = summary(ran(scenario(small, large, calm, requests=None, engine=engine), verified=False))
    assert told.fairness is not None and told.fairness > 0.99
    ratios = {tenant.tenant: tenant.given_over_due for tenant in told.tenants}
    assert ratios["a"] == pytest.approx(1.0, abs=0.1) and ratios["large"] == pytest.approx(1.0, abs=0.1)


def test_a_replay_keeps_its_deadline(tmp_path: Path) -> None:
    row = TraceRow(0.0, 10, 400, deadline_s=1.0)
    asked = traced(tmp_path, row, workers=2, happenings=(WorkerDeath(0.5, 0),))
    world = ran(asked)
    assert fates(world) == {"deadline_exceeded": 1}
    assert ended_at(world)[0] == pytest.approx(1.0, abs=STEP_S)


def test_a_wrong_token_is_found() -> None:
    world = ran(scenario(requests=20))
    world.book.streams[7].tokens[1] ^= 1
    with pytest.raises(AssertionError, match=r"request 7.*first wrong at 1"):
        world.verify()


def test_a_missing_token_is_found() -> None:
    world = ran(scenario(requests=20))
    world.book.streams[3].tokens = world.book.streams[3].tokens[:-1]
    with pytest.raises(AssertionError, match="request 3"):
        world.verify()


def test_the_mini_trace_runs(tmp_path: Path) -> None:
    asked = Scenario(trace=str(EXAMPLES / "traces/mini.jsonl"), engine=replace(ENGINE, profile=EVEN))
    world = ran(replace(asked, readers=Readers(bound_tokens=64)))
    assert fates(world) == {"cancelled": 2, "length": 8, "stop": 2}
    assert summary(world).prompt_tokens_cached == 96


def test_worker_death_example_loses_nothing() -> None:
    asked = replace(read_scenario(EXAMPLES / "scenarios/worker-death.toml"), requests=400)
    told = summary(ran(asked))
    assert told.requests.failed == told.requests.refused == 0
    assert told.replays >= 5


def test_overload_keeps_goodput_and_passes() -> None:
    """Five times the load for a minute: goodput stays near its peak, the queue bounded, calm returns within seconds."""
    peak_rate = 30.0
    sizes: dict[str, object] = {"prompt": "uniform:20:100", "output": "uniform:10:50", "stop_share": 0.0}
    engine = replace(ENGINE, max_queue_s=1.0)
    calm = load(peak_rate * 0.9, stop_s=100.0, **sizes)
    surge = load(peak_rate * 4.1, name="surge", start_s=20.0, stop_s=80.0, **sizes)
    world = ran(scenario(calm, surge, engine=engine, requests=None, cells=False), verified=False)
    records = world.book.records
    ended_s = records.column("end_ns") / 1e9
    good = records.column("good") == 1
    before = (good & (ended_s > 5) & (ended_s < 20)).sum() / 15.0
    during = (good & (ended_s > 22) & (ended_s < 80)).sum() / 58.0
    assert during >= 0.9 * before
    assert world.book.meter.max_queue_s < 2 * 1.0 + 0.5
    assert summary(world).reasons["queue_full"] > 1000
    late = (records.column("arrival_ns") / 1e9 > 85.0) & (records.column("fate") == Fate.FINISHED)
    waited_s = (records.column("first_ns") - records.column("arrival_ns"))[late] / 1e9
    assert len(waited_s) > 200 and np.quantile(waited_s, 0.99) < 0.2


def test_what_the_tenants_got_is_all_that_was_delivered() -> None:
    """Also of streams that moved to another worker."""
    world = World(replace(read_scenario(EXAMPLES / "scenarios" / "worker-death.toml"), requests=600, cells=False))
    world.run()
    summary = summarise(world, wall_s=1.0)
    assert summary.replayed_tokens > 0
    assert sum(tenant.output_tokens for tenant in summary.tenants) == summary.output_tokens
