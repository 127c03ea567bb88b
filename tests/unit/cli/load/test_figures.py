"""Figures of known outcomes are known."""

from array import array

import pytest

from headrace.cli.load.drive import Count, RunRecord
from headrace.cli.load.figures import Slo, figures_of, parse_slo, percentiles, summarise
from headrace.cli.load.outcome import Outcome, State
from headrace.cli.load.plan import Shot
from headrace.cli.load.process import Usage
from headrace.core.errors import InvalidInput
from headrace.sim.arrivals import Poisson, Together
from tests.unit.cli.load.stub import plan

pytestmark = pytest.mark.unit


def outcome(number: int, pieces_s: list[float], *, intended_s: float = 100.0, state: State = State.FINISHED) -> Outcome:
    made = Outcome(Shot(number, 0, intended_s - 100.0, 5, len(pieces_s), 0, 0), intended_s, counted=True)
    made.pieces_s = array("d", pieces_s)
    made.sent_s = intended_s + 0.5
    made.ended_s = pieces_s[-1] if pieces_s else intended_s + 1.0
    made.output_tokens, made.state = len(pieces_s), state
    return made


def test_percentiles_are_values_that_were_measured() -> None:
    found = percentiles([float(value) for value in range(1, 101)])
    assert found is not None
    assert (found.p50, found.p90, found.p95, found.p99, found.max) == (50.0, 90.0, 95.0, 99.0, 100.0)
    assert (found.mean, found.count) == (50.5, 100)
    assert percentiles([]) is None


def test_latencies_count_from_the_intended_time() -> None:
    figures = summarise([outcome(0, [101.0, 101.5, 103.0])], 10.0, None)
    assert figures.ttft_s is not None and figures.ttft_s.p50 == pytest.approx(1.0)
    assert figures.e2e_s is not None and figures.e2e_s.p50 == pytest.approx(3.0)
    assert figures.itl_s is not None and (figures.itl_s.p50, figures.itl_s.max) == (0.5, 1.5)
    assert figures.tpot_s is not None and figures.tpot_s.p50 == pytest.approx(1.0)
    assert figures.lateness_s is not None and figures.lateness_s.p50 == pytest.approx(0.5)
    assert figures.service_s is not None and figures.service_s.p50 == pytest.approx(2.5)
    assert figures.output_tokens_per_s == pytest.approx(0.3)


def test_goodput_counts_what_met_every_limit() -> None:
    fast, slow_start, slow_gaps = outcome(0, [100.1, 100.2]), outcome(1, [102.0, 102.1]), outcome(2, [100.1, 101.1])
    refused, left = outcome(3, [], state=State.REFUSED), outcome(4, [100.1], state=State.LEFT)
    figures = summarise([fast, slow_start, slow_gaps, refused, left], 2.0, Slo(ttft=0.5, itl=0.5))
    assert figures.goodput_per_s == pytest.approx(0.5)
    # The client that left cannot be served well or badly; the refused one was not.
    assert figures.good_share == pytest.approx(0.25)


def test_errors_are_counted_by_status_and_code() -> None:
    refused = outcome(0, [], state=State.REFUSED)
    refused.status, refused.code = 503, "queue_full"
    failed = outcome(1, [100.5], state=State.FAILED)
    failed.status, failed.code = 200, "runner_failed"
    figures = summarise([refused, failed, outcome(2, [100.2])], 1.0, None)
    assert figures.errors == {"503 queue_full": 1, "200 runner_failed": 1}
    assert figures.states == {"refused": 1, "failed": 1, "finished": 1}
    assert figures.finished_per_s == 1.0


def test_what_was_offered_is_by_the_time_of_the_arrivals() -> None:
    record = RunRecord(99.0, [outcome(0, [100.2]), outcome(1, [109.0])], Count(100.0), Count(109.0), {}, {}, {}, 1, 1)
    timed = figures_of(record, plan(Poisson(1.0), duration_s=4.0), None, streamed=True).overall
    assert timed.offered_per_s == 0.5 and timed.finished_per_s == pytest.approx(2 / 9)
    assert figures_of(record, plan(users=2, duration_s=4.0), None, streamed=True).overall.offered_per_s is None
    assert figures_of(record, plan(Together(2)), None, streamed=True).overall.offered_per_s is None


def test_cpu_is_that_of_the_counted_time() -> None:
    def usage(cpu_s: float, descriptors: int) -> dict[int, Usage]:
        return {9: Usage(9, "headrace: gateway", cpu_s, 1 << 20, descriptors, 1)}

    record = RunRecord(
        started_s=99.0,
        outcomes=[outcome(0, [100.2, 100.4])],
        began=Count(100.0, ended=10, frames=100, client_cpu_s=1.0, usages=usage(5.0, 30)),
        ended=Count(104.0, ended=210, frames=4100, client_cpu_s=1.2, usages=usage(7.0, 30)),
        before=usage(4.0, 10),
        after=usage(7.5, 11),
        peak_rss_bytes={9: 3 << 20},
        received_bytes=1,
        dialled=1,
    )
    run = figures_of(record, plan(users=1), None, streamed=True)
    assert run.seconds == 4.0
    assert run.gateway is not None
    assert (run.gateway.cpu_s, run.gateway.requests_per_cpu_s, run.gateway.frames_per_cpu_s) == (2.0, 100.0, 2000.0)
    assert run.gateway.descriptors == (10, 11) and run.gateway.peak_rss_bytes == 3 << 20
    assert run.client.cpu_us_per_frame == pytest.approx(50.0)


def test_a_request_without_end_is_found_and_told() -> None:
    lost = outcome(3, [100.5], state=State.BROKEN)
    lost.message = "the connection closed"
    doubled = outcome(4, [100.5], state=State.FAILED)
    doubled.violation = "a second error frame"
    record = RunRecord(99.0, [lost, doubled, outcome(5, [100.5])], Count(100.0), Count(101.0), {}, {}, {}, 0, 0)
    run = figures_of(record, plan(users=1), None, streamed=True)
    assert run.without_end == 2
    assert "request 3" in run.examples[0] and "the connection closed" in run.examples[0]
    assert "a second error frame" in run.examples[1]


def test_slo_in_words() -> None:
    assert parse_slo("ttft=0.5, itl=0.1") == Slo(ttft=0.5, itl=0.1)
    for wrong in ("ttft", "ttft=", "ttft=nan", "ttft=-1", "speed=1"):
        with pytest.raises(InvalidInput):
            parse_slo(wrong)
