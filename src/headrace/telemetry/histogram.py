"""A family of histograms that costs a bisection and two additions per observation. Knows Prometheus only to be read."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

# Seconds. From a tenth of a millisecond, which a stage may take, to minutes, which a long answer may.
SECONDS = (
    0.0001,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)


class _Series:
    __slots__ = ("counts", "sum")

    def __init__(self, num_bounds: int) -> None:
        self.counts = [0] * (num_bounds + 1)
        self.sum = 0.0


class HistogramFamily:
    """One series per tuple of label values. Use from one thread; a reader of another sees whole numbers."""

    def __init__(self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float] = SECONDS) -> None:
        self._name = name
        self._help = help
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], _Series] = {}

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series(len(self._bounds))
        series.counts[bisect_left(self._bounds, value)] += 1
        series.sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for labels, series in self._series.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*self._bounds, float("inf")), series.counts, strict=True):
                total += count
                buckets.append((_bound_text(bound), total))
            family.add_metric(labels, buckets, series.sum)
        yield family


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)
