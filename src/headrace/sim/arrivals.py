"""When requests arrive. Owns the arrival processes and their shapes in files.

A process yields chunks of increasing times and draws only from the generator it is given.
It knows nothing of tenants, lengths or engines.
"""

from collections.abc import Iterator
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

CHUNK = 4096
DAY_POINTS = 24

# Bounded below as well: a process that hardly ever fires would be sampled for ever.
Rate = Annotated[float, Meta(ge=1e-4, le=1e9)]
Span = Annotated[float, Meta(ge=1e-3, le=1e9)]


class _Process(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    def mean_rate(self) -> float:
        """Requests per second in the long run."""
        raise NotImplementedError

    def chunks(self, rng: np.random.Generator, until_s: float) -> Iterator[FloatArray]:
        """Arrival times from zero on, increasing within and across chunks, at least to `until_s` or its own end."""
        raise NotImplementedError


class Poisson(_Process, frozen=True, tag="poisson"):
    rate: Rate

    def mean_rate(self) -> float:
        return self.rate

    def chunks(self, rng: np.random.Generator, until_s: float) -> Iterator[FloatArray]:
        last = 0.0
        while last < until_s:
            times = last + np.cumsum(rng.standard_exponential(CHUNK) / self.rate)
            last = float(times[-1])
            yield times


class Bursty(_Process, frozen=True, tag="bursty"):
    """Poisson at `rate` while on and at `quiet_rate` while off; both spells last exponentially long."""

    rate: Rate
    quiet_rate: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    on_s: Span = 5.0
    off_s: Span = 15.0

    def mean_rate(self) -> float:
        return (self.rate * self.on_s + self.quiet_rate * self.off_s) / (self.on_s + self.off_s)

    def chunks(self, rng: np.random.Generator, until_s: float) -> Iterator[FloatArray]:
        start = 0.0
        per_pair = self.rate * self.on_s + self.quiet_rate * self.off_s
        pairs = int(np.clip(CHUNK / per_pair, 1, CHUNK))
        rates = np.tile([self.rate, self.quiet_rate], pairs)
        means = np.tile([self.on_s, self.off_s], pairs)
        while start < until_s:
            spells = rng.standard_exponential(2 * pairs) * means
            ends = start + np.cumsum(spells)
            counts = rng.poisson(rates * spells)
            # Given their number, the times of a Poisson spell are uniform over it.
            within = rng.random(int(counts.sum())) * np.repeat(spells, counts)
            start = float(ends[-1])
            yield np.sort(np.repeat(ends - spells, counts) + within)


class Diurnal(_Process, frozen=True, tag="diurnal"):
    """A rate that follows the day: a sinusoid around `rate`, or `points`, one for each hour, times `rate`.

    The sinusoid starts at its mean and rises; `period_s` shortens the day for a simulation.
    """

    rate: Rate
    amplitude: Annotated[float, Meta(ge=0, le=1)] = 0.6
    period_s: Span = 86_400.0
    points: tuple[Annotated[float, Meta(ge=0, le=1e6)], ...] = ()

    def __post_init__(self) -> None:
        if self.points and len(self.points) != DAY_POINTS:
            raise ValueError(f"points must hold {DAY_POINTS} factors, one for each hour, not {len(self.points)}")
        if self.points and not any(self.points):
            raise ValueError("points must not all be zero")

    def mean_rate(self) -> float:
        return self.rate * (sum(self.points) / DAY_POINTS if self.points else 1.0)

    def rate_at(self, times: FloatArray) -> FloatArray:
        phase = times / self.period_s
        if not self.points:
            factors: FloatArray = 1.0 + self.amplitude * np.sin(2.0 * np.pi * phase)
        else:
            factors = np.interp(phase * DAY_POINTS, np.arange(DAY_POINTS), self.points, period=DAY_POINTS)
        return self.rate * factors

    def chunks(self, rng: np.random.Generator, until_s: float) -> Iterator[FloatArray]:
        """Thinning: candidates at the day's highest rate, each kept with the share its instant has of it."""
        peak = self.rate * (max(self.points) if self.points else 1.0 + self.amplitude)
        last = 0.0
        while last < until_s:
            times = last + np.cumsum(rng.standard_exponential(CHUNK) / peak)
            last = float(times[-1])
            yield times[rng.random(CHUNK) * peak < self.rate_at(times)]


class Together(_Process, frozen=True, tag="together"):
    """`count` requests in the same instant: a backlog."""

    count: Annotated[int, Meta(ge=1, le=10_000_000)]

    def mean_rate(self) -> float:
        return 0.0

    def chunks(self, rng: np.random.Generator, until_s: float) -> Iterator[FloatArray]:
        for first in range(0, self.count, CHUNK):
            yield np.zeros(min(CHUNK, self.count - first))


class Evenly(_Process, frozen=True, tag="evenly"):
    """One request every 1 / `rate` seconds, the first at zero."""

    rate: Rate

    def mean_rate(self) -> float:
        return self.rate

    def chunks(self, rng: np.random.Generator, until_s: float) -> Iterator[FloatArray]:
        first = 0
        while first / self.rate < until_s:
            yield np.arange(first, first + CHUNK) / self.rate
            first += CHUNK


Arrivals = Poisson | Bursty | Diurnal | Together | Evenly
