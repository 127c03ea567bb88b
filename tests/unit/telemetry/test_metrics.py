"""Counts and histograms: right sums, bounded labels, text that Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from headrace.core.event import EngineLoad
from headrace.core.messages import DeviceHealth
from headrace.core.stages import Stage
from headrace.telemetry.histogram import HistogramFamily
from headrace.telemetry.metrics import Metrics, Sample


def read(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    family = HistogramFamily("x", "", ("name",), (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        family.observe(("a",), value)
    (metric,) = family.collect()
    counts = {sample.labels["le"]: sample.value for sample in metric.samples if sample.name == "x_bucket"}
    assert counts == {"1.0": 2, "2.0": 4, "+Inf": 5}
    assert next(sample.value for sample in metric.samples if sample.name == "x_sum") == 14.0


def test_a_request_is_counted_once_with_its_tokens_and_times() -> None:
    metrics = Metrics(["m"], ["t"])
    metrics.observe(Sample("/say", "t", "m", 200, 1.0, {Stage.DECODE: 0.9}, 7, 11, first_s=0.2, last_s=1.2))
    found = read(metrics)
    assert list(found["headrace_requests_total"].values()) == [1.0]
    assert sorted(found["headrace_tokens_total"].values()) == [7.0, 11.0]
    assert list(found["headrace_time_to_first_token_seconds_sum"].values()) == [0.2]
    assert abs(next(iter(found["headrace_inter_token_seconds_sum"].values())) - 0.1) < 1e-9
    assert list(found["headrace_stage_seconds_sum"].values()) == [0.9]


def test_one_without_a_stream_is_counted_and_no_more() -> None:
    metrics = Metrics(["m"], ["t"])
    metrics.observe(Sample("/say", "t", "m", 503, 1.0, has_stream=False))
    found = read(metrics)
    assert list(found["headrace_requests_total"].values()) == [1.0]
    assert "headrace_request_seconds_count" not in found


def test_names_that_nobody_configured_make_no_series() -> None:
    metrics = Metrics(["m"], ["t"])
    for number in range(1000):
        metrics.observe(Sample("other", f"tenant{number}", f"model{number}", 404, 0.1, {Stage.RECEIVE: 0.1}))
    assert len(metrics.text().splitlines()) < 150
    assert b"model7" not in metrics.text()


def test_gauges_are_read_when_asked_for() -> None:
    class View:
        name, model, is_ready = "m-0", "m", True
        load = EngineLoad(1.5, 2.5, 3, 4, 5, 6, 7, 8)
        device = None

    metrics = Metrics()
    metrics.watch_replicas(lambda: [View()])
    metrics.watch_loop(lambda: 0.125)
    metrics.watch_open(lambda: 3)
    metrics.observe_lag(0.5)
    found = read(metrics)
    assert found["headrace_replica_queue_seconds"] == {("m", "m-0"): 1.5}
    assert found["headrace_replica_total_blocks"] == {("m", "m-0"): 8.0}
    assert found["headrace_loop_lag_seconds"] == {(): 0.125}
    assert found["headrace_loop_lag_sampled_seconds_sum"] == {(): 0.5}
    assert found["headrace_open_streams"] == {(): 3.0}


def test_a_card_has_a_series_for_each_figure_that_it_tells() -> None:
    class View:
        name, model, is_ready = "m-0", "m", True
        load = EngineLoad(1.5, 2.5, 3, 4, 5, 6, 7, 8)
        device = DeviceHealth("X", 3, 80, 41.0, None, 2, fault="X must be reset")

    metrics = Metrics()
    metrics.watch_replicas(lambda: [View()])
    found = {name: series for name, series in read(metrics).items() if name.startswith("headrace_card")}
    assert found == {
        "headrace_card_healthy": {("m", "m-0"): 0.0},
        "headrace_card_memory_used_bytes": {("m", "m-0"): 3.0},
        "headrace_card_memory_total_bytes": {("m", "m-0"): 80.0},
        "headrace_card_temperature_celsius": {("m", "m-0"): 41.0},
        "headrace_card_ecc_uncorrected_total": {("m", "m-0"): 2.0},
    }
