"""What is kept of a run."""

import numpy as np
import pytest

from headrace.core.event import Counters, Waits
from headrace.sim.record import Fate, Gaps, Mark, Records, RequestEnd, TraceHash

pytestmark = pytest.mark.unit


def hashed(*marks: tuple[Mark, int, int, int, int]) -> str:
    trace = TraceHash()
    for mark in marks:
        trace.mark(*mark)
    return trace.hexdigest()


def test_the_hash_is_a_constant_of_the_marks() -> None:
    """Written down, so that another Python or another machine must agree."""
    marks = ((Mark.SUBMIT, 5, 0, 1, 2), (Mark.END, 10**18, -1, 2**40, -(2**62)))
    assert hashed(*marks) == "265df5be98800bedbded4306485e6abf33ee70828aed6cd12badfd13183c1c7d"


def test_the_hash_sees_order_and_every_field() -> None:
    base = (Mark.SUBMIT, 5, 0, 1, 2)
    others = [(Mark.FIRST, 5, 0, 1, 2), (Mark.SUBMIT, 6, 0, 1, 2), (Mark.SUBMIT, 5, 1, 1, 2)]
    others += [(Mark.SUBMIT, 5, 0, 2, 2), (Mark.SUBMIT, 5, 0, 1, 3)]
    assert len({hashed(base, other) for other in others} | {hashed(other, base) for other in others}) == 10


def test_the_hash_does_not_depend_on_when_it_is_read() -> None:
    trace = TraceHash()
    for instant in range(5000):
        trace.mark(Mark.FIRST, instant, 0, instant)
        if instant % 777 == 0:
            trace.hexdigest()
    assert trace.hexdigest() == hashed(*((Mark.FIRST, instant, 0, instant, 0) for instant in range(5000)))


def end(ordinal: int, reason: str) -> RequestEnd:
    return RequestEnd(
        ordinal=ordinal,
        tenant=1,
        worker=-1,
        fate=Fate.CANCELLED,
        reason=reason,
        arrival_ns=10**17,
        first_ns=-1,
        end_ns=10**17 + 1,
        prompt_tokens=7,
        counters=Counters(1, 2, 3, 4, 5, 6),
        waits=Waits(0.5, decode_s=0.25),
        preemptions=2,
        good=True,
    )


def test_records_come_back_by_column() -> None:
    records = Records()
    assert [records.add(end(ordinal, reason)) for ordinal, reason in enumerate(("stop", "length", "stop"))] == [0, 1, 0]
    assert len(records) == 3
    assert records.column("ordinal").tolist() == [0, 1, 2]
    assert [records.reasons[code] for code in records.column("reason")] == ["stop", "length", "stop"]
    assert records.column("first_ns").tolist() == [-1] * 3
    assert records.column("end_ns").tolist() == [10**17 + 1] * 3
    assert records.column("replayed").tolist() == [6] * 3
    assert records.column("good").tolist() == [1] * 3
    assert records.seconds("wait_capacity_s").tolist() == [0.5] * 3
    assert records.seconds("decode_s").tolist() == [0.25] * 3


def test_records_grow_while_they_are_read() -> None:
    records = Records()
    records.add(end(0, "stop"))
    kept = records.column("ordinal")
    records.add(end(1, "stop"))
    assert kept.tolist() == [0] and len(records.column("ordinal")) == 2


def test_gaps_have_quantiles_to_half_a_per_cent() -> None:
    gaps = Gaps()
    times = np.random.default_rng(1).lognormal(16.0, 1.5, 100_000).astype(np.int64)
    for chunk in np.array_split(times, 1000):
        gaps.add(chunk)
    assert gaps.total == 100_000
    for share in (0.5, 0.95, 0.99):
        assert gaps.quantile_s(share) == pytest.approx(np.quantile(times, share) / 1e9, rel=0.005)
    assert gaps.mean_s() == pytest.approx(times.mean() / 1e9)


def test_gaps_of_any_size_are_counted() -> None:
    gaps = Gaps()
    gaps.add(np.array([0, 1, 10**15, 3 * 10**18]))
    gaps.add(np.zeros(100_000, np.int64))
    assert gaps.total == 100_004


def test_no_gaps_have_no_quantile() -> None:
    assert Gaps().quantile_s(0.5) is None and Gaps().mean_s() is None
