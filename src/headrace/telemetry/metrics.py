"""What a gateway counts. Owns names, labels and bounds; a request is counted once, at its end.

Label values come from the configuration alone: a name that is not in it is counted as `other`, so that no client
can make series.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.core.event import EngineLoad
from headrace.core.messages import DeviceHealth
from headrace.core.stages import Stage
from headrace.telemetry.histogram import HistogramFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
# Seconds between tokens, and those a loop is late, are shorter than seconds of requests.
_SHORT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


# An enumeration looks for a value by way of several calls.
_STAGES = {stage: stage.value for stage in Stage}


class Sample(Struct, frozen=True):
    """One request that is over. Times are seconds since its first byte; the first and the last token may be missing.
    One that had no stream is counted, and no more: how soon it was refused says nothing of its model."""

    route: str
    tenant: str
    model: str
    status: int
    wall_s: float
    stages: Mapping[Stage, float] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    has_stream: bool = True


class ReplicaView(Protocol):
    """What is shown of a replica."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def load(self) -> EngineLoad: ...

    @property
    def device(self) -> DeviceHealth | None: ...


def _zero() -> float:
    return 0.0


def _true() -> bool:
    return True


def _no_replicas() -> Iterable[ReplicaView]:
    return ()


class Metrics:
    """Use from the loop's thread. `know` says which names may be labels, again after a reload. `index` is that of the
    gateway among those behind its port."""

    def __init__(self, models: Iterable[str] = (), tenants: Iterable[str] = (), *, index: int = 0) -> None:
        self._index = index
        self.know(models, tenants)
        self._requests: dict[tuple[str, str, str, str], int] = {}
        self._tokens: dict[tuple[str, str, str], int] = {}
        by_model = ("model", "tenant")
        self._wall = HistogramFamily("headrace_request_seconds", "First byte in to last byte out", by_model)
        self._ttft = HistogramFamily(
            "headrace_time_to_first_token_seconds", "First byte in to first token out", by_model
        )
        self._itl = HistogramFamily(
            "headrace_inter_token_seconds", "Mean time between the tokens of a stream", by_model, _SHORT_BOUNDS
        )
        self._stages = HistogramFamily("headrace_stage_seconds", "Time of a request in a stage", ("model", "stage"))
        self._lags = HistogramFamily(
            "headrace_loop_lag_sampled_seconds", "How late each beat of the loop came", (), _SHORT_BOUNDS
        )
        self._lag_s: Callable[[], float] = _zero
        self._num_open: Callable[[], float] = _zero
        self._replicas: Callable[[], Iterable[ReplicaView]] = _no_replicas
        self._is_keeping: Callable[[], bool] = _true
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def know(self, models: Iterable[str], tenants: Iterable[str]) -> None:
        """All names that may be labels."""
        self._models = frozenset(models)
        self._tenants = frozenset(tenants)

    def watch_loop(self, lag_s: Callable[[], float]) -> None:
        self._lag_s = lag_s

    def watch_open(self, num_open: Callable[[], float]) -> None:
        self._num_open = num_open

    def watch_journal(self, is_keeping: Callable[[], bool]) -> None:
        self._is_keeping = is_keeping

    def watch_replicas(self, replicas: Callable[[], Iterable[ReplicaView]]) -> None:
        self._replicas = replicas

    def observe(self, sample: Sample) -> None:
        model = sample.model if sample.model in self._models else OTHER if sample.model else ""
        tenant = sample.tenant if sample.tenant in self._tenants else OTHER if sample.tenant else ""
        key = (sample.route, model, tenant, _STATUS_CLASSES.get(sample.status // 100, OTHER))
        self._requests[key] = self._requests.get(key, 0) + 1
        if not model or not sample.has_stream:
            return
        by_model = (model, tenant)
        self._wall.observe(by_model, sample.wall_s)
        self._count_tokens((model, tenant, "in"), sample.prompt_tokens)
        self._count_tokens((model, tenant, "out"), sample.completion_tokens)
        if sample.first_s is not None:
            self._ttft.observe(by_model, sample.first_s)
            if sample.last_s is not None and sample.completion_tokens > 1:
                self._itl.observe(by_model, (sample.last_s - sample.first_s) / (sample.completion_tokens - 1))
        for stage, seconds in sample.stages.items():
            if seconds > 0.0:
                self._stages.observe((model, _STAGES[stage]), seconds)

    def observe_lag(self, lag_s: float) -> None:
        self._lags.observe((), lag_s)

    def _count_tokens(self, key: tuple[str, str, str], tokens: int) -> None:
        self._tokens[key] = self._tokens.get(key, 0) + tokens

    def text(self) -> bytes:
        """In the exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "headrace_requests", "Requests that are over", labels=("route", "model", "tenant", "status")
        )
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        tokens = CounterMetricFamily("headrace_tokens", "Tokens in and out", labels=("model", "tenant", "direction"))
        for token_labels, count in self._tokens.items():
            tokens.add_metric(token_labels, count)
        yield tokens
        for family in (self._wall, self._ttft, self._itl, self._stages, self._lags):
            yield from family.collect()
        yield GaugeMetricFamily("headrace_open_streams", "Answers that wait for a model", self._num_open())
        yield GaugeMetricFamily("headrace_loop_lag_seconds", "How late the event loop runs", self._lag_s())
        yield GaugeMetricFamily("headrace_loop_tasks", "Tasks of the event loop", _num_tasks())
        keeping = "Whether what streams say is kept, to be read on after this gateway is gone"
        yield GaugeMetricFamily("headrace_journal_keeping", keeping, float(self._is_keeping()))
        process = GaugeMetricFamily("headrace_gateway", "Which of the gateways these figures are of", labels=("index",))
        process.add_metric((str(self._index),), 1.0)
        yield process
        yield from self._collect_replicas()
        yield from self._collect_cards()

    def _collect_replicas(self) -> Iterator[Metric]:
        labels = ("model", "replica")
        gauges = {
            name: GaugeMetricFamily(f"headrace_replica_{name}", text, labels=labels)
            for name, text in (
                ("ready", "Whether requests are sent to it"),
                ("queue_seconds", "Work that waits, in predicted seconds"),
                ("running_seconds", "Work that is left of what runs, in predicted seconds"),
                ("waiting", "Sequences that wait"),
                ("running", "Sequences that run"),
                ("free_blocks", "KV blocks nobody holds"),
                ("total_blocks", "KV blocks there are"),
            )
        }
        for replica in self._replicas():
            load = replica.load
            values = (
                float(replica.is_ready), load.queue_s, load.running_s, load.waiting, load.running, load.free_blocks, load.total_blocks,
            )  # fmt: skip
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.add_metric((replica.model, replica.name), value)
        yield from gauges.values()

    def _collect_cards(self) -> Iterator[Metric]:
        """What is not told has no series."""
        labels = ("model", "replica")
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            name: GaugeMetricFamily(f"headrace_card_{name}", text, labels=labels)
            for name, text in (
                ("healthy", "Whether the replica's card can go on being used"),
                ("memory_used_bytes", "Memory of the card that is taken, by whatever process"),
                ("memory_total_bytes", "Memory of the card"),
                ("temperature_celsius", "Of the card"),
                ("power_watts", "That the card draws"),
            )
        }
        families["ecc"] = CounterMetricFamily(
            "headrace_card_ecc_uncorrected", "Memory errors that could not be corrected since the driver's start", labels=labels
        )  # fmt: skip
        for replica in self._replicas():
            health = replica.device
            if health is None:
                continue
            values = (
                float(not health.fault), health.memory_used_bytes, health.memory_total_bytes, health.temperature_c, health.power_w, health.ecc_uncorrected,
            )  # fmt: skip
            for family, value in zip(families.values(), values, strict=True):
                if value is not None:
                    family.add_metric((replica.model, replica.name), value)
        yield from families.values()


_STATUS_CLASSES = {1: "1xx", 2: "2xx", 3: "3xx", 4: "4xx", 5: "5xx"}


def _num_tasks() -> int:
    """Of the loop that asks; none where there is no loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
