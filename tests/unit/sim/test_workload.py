"""The load of a scenario: drawn lazily, by seed, and independently for each purpose."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.sim import workload
from headrace.sim.arrivals import Evenly, Poisson, Together
from headrace.sim.scenario import Cancels, Prefix, Scenario, SlowReaders, TenantLoad
from headrace.sim.traces import TraceRow, write_trace
from headrace.sim.workload import Prompts, draw_rows

pytestmark = pytest.mark.unit


def load(name: str = "a", rate: float = 100.0, **others: object) -> TenantLoad:
    return replace(TenantLoad(name, Poisson(rate), "uniform:5:50", "uniform:1:20"), **others)


def rows(*tenants: TenantLoad, **others: object) -> list[TraceRow]:
    return list(draw_rows(replace(Scenario(requests=500, tenants=tenants), **others)))


def test_tenants_merge_in_order_of_arrival() -> None:
    drawn = rows(load("a"), load("b", 300.0))
    times = [row.arrival_s for row in drawn]
    assert times == sorted(times)
    assert 0.65 < sum(row.tenant == "b" for row in drawn) / len(drawn) < 0.85


def test_a_seed_fixes_everything() -> None:
    tenant = load(stop_share=0.5, cancels=Cancels(0.5, after_s=1.0), prefix=Prefix(4, groups=3))
    assert rows(tenant) == rows(tenant)
    assert rows(tenant) != rows(tenant, seed=1)


def test_one_tenants_draws_do_not_move_anothers() -> None:
    alone = rows(load("a"), requests=100)
    together = [row for row in rows(load("a"), load("b", stop_share=0.5)) if row.tenant == "a"]
    assert together[:100] == alone


def test_one_kind_of_draw_does_not_move_another() -> None:
    plain, changed = rows(load()), rows(load(cancels=Cancels(1.0, after_tokens=3), stop_share=1.0))
    assert [row.prompt_tokens for row in plain] == [row.prompt_tokens for row in changed]
    assert [row.arrival_s for row in plain] == [row.arrival_s for row in changed]


def test_arrivals_end_with_the_duration_and_the_count() -> None:
    assert all(row.arrival_s < 2.0 for row in rows(load(), requests=None, duration_s=2.0))
    assert len(rows(load(requests=7))) == 7
    assert {row.arrival_s for row in rows(load(arrivals=Together(3), start_s=4.0))} == {4.0}
    assert [row.arrival_s for row in rows(load(arrivals=Evenly(2.0), stop_s=1.4))] == [0.0, 0.5, 1.0]


def test_shares_are_kept() -> None:
    drawn = rows(
        load(
            stop_share=0.25,
            max_tokens=99,
            prefix=Prefix(4, groups=2, share=0.5),
            cancels=Cancels(0.25, after_tokens="uniform:1:5"),
            slow_readers=SlowReaders(0.75, 10.0),
        ),
        requests=4000,
    )
    stopping = [row for row in drawn if row.ends == "stop"]
    assert len(stopping) / 4000 == pytest.approx(0.25, abs=0.03)
    assert {row.max_tokens for row in stopping} == {99}
    assert {row.max_tokens for row in drawn if row.ends == "length"} == {None}
    assert sum(row.prefix_group is not None for row in drawn) / 4000 == pytest.approx(0.5, abs=0.03)
    assert {row.cancel_after_tokens for row in drawn} == {None, 1, 2, 3, 4, 5}
    assert sum(row.reader_tokens_per_s == 10.0 for row in drawn) / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_saved_load_replays_as_it_was_drawn(tmp_path: Path) -> None:
    drawn = rows(load(stop_share=0.5, cancels=Cancels(0.5, after_s=1.0)), load("b"))
    write_trace(tmp_path / "t.jsonl", drawn)
    assert rows(trace=str(tmp_path / "t.jsonl")) == drawn


def test_a_trace_and_tenants_mix(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", [TraceRow(0.0, 1, 1, "old"), TraceRow(9.0, 1, 1, "old")])
    drawn = rows(load(arrivals=Evenly(1.0)), trace=str(tmp_path / "t.jsonl"), requests=None, duration_s=3.0)
    assert [row.tenant for row in drawn] == ["old", "a", "a", "a"]


def test_rows_are_drawn_lazily() -> None:
    endless = draw_rows(Scenario(requests=10**9, tenants=(load(),)))
    assert len(list(islice(endless, 10_000))) == 10_000


def test_prompts_follow_from_seed_and_request() -> None:
    prompts, again = Prompts(1, 1000, real=True), Prompts(1, 1000, real=True)
    row = TraceRow(0.0, 200, 1)
    assert prompts.ids(3, row) == again.ids(3, row)
    assert prompts.ids(3, row) != Prompts(2, 1000, real=True).ids(3, row)
    seen = np.array([prompts.ids(ordinal, row) for ordinal in range(50)])
    assert seen.min() >= 0 and seen.max() < 1000
    assert len({tuple(ids[20:40]) for ids in seen.tolist()}) == 50


def test_prompts_of_a_group_share_their_prefix_and_nothing_else() -> None:
    prompts = Prompts(1, 1000, real=True)
    first, second, other = (
        prompts.ids(ordinal, TraceRow(0.0, 40, 1, prefix_group=group, prefix_tokens=16))
        for ordinal, group in ((0, 1), (1, 1), (2, 2))
    )
    assert first[:16] == second[:16] != other[:16]
    assert first[16:] != second[16:]
    stranger = prompts.ids(3, TraceRow(0.0, 40, 1, tenant="b", prefix_group=1, prefix_tokens=16))
    assert stranger[:16] != first[:16]


def test_without_cells_prompts_of_one_length_are_one_object() -> None:
    prompts = Prompts(1, 1000, real=False)
    assert prompts.ids(0, TraceRow(0.0, 9, 1)) is prompts.ids(1, TraceRow(0.0, 9, 2))


def test_prompts_that_are_kept_to_be_shared_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_MOST_KEPT", 100)
    blank, shared = Prompts(1, 1000, real=False), Prompts(1, 1000, real=True)
    rows = [TraceRow(0.0, 40, 1, prefix_group=group, prefix_tokens=40) for group in range(9)]
    first = [shared.ids(0, row) for row in rows]
    assert [shared.ids(0, row) for row in rows] == first
    assert [len(blank.ids(0, TraceRow(0.0, length, 1))) for length in range(30, 60)] == list(range(30, 60))
    assert len(shared._prefixes) <= 2 and len(blank._blank) <= 3
