"""Arrival processes: their rates, their order, and that a seed fixes them."""

from itertools import chain, islice

import msgspec
import numpy as np
import pytest

from headrace.sim.arrivals import Arrivals, Bursty, Diurnal, Evenly, FloatArray, Poisson, Together
from headrace.sim.workload import generator

pytestmark = pytest.mark.unit

PROCESSES: list[Arrivals] = [
    Poisson(50.0),
    Bursty(100.0, 5.0, on_s=2.0, off_s=4.0),
    Diurnal(40.0, amplitude=0.9, period_s=20.0),
    Diurnal(40.0, period_s=24.0, points=tuple(float(hour) for hour in range(24))),
    Evenly(30.0),
]


def times_until(process: Arrivals, until_s: float, seed: int = 0) -> FloatArray:
    chunks = process.chunks(generator(seed, "test"), until_s)
    times = np.concatenate([np.zeros(0), *chunks])
    return times[times < until_s]


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: type(process).__name__)
def test_times_increase_and_come_at_the_mean_rate(process: Arrivals) -> None:
    times = times_until(process, 2400.0)
    assert (np.diff(times) >= 0).all()
    assert len(times) / 2400.0 == pytest.approx(process.mean_rate(), rel=0.05)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: type(process).__name__)
def test_a_seed_fixes_the_times(process: Arrivals) -> None:
    assert (times_until(process, 50.0, seed=3) == times_until(process, 50.0, seed=3)).all()


def test_another_seed_gives_other_times() -> None:
    assert times_until(Poisson(50.0), 1.0, seed=1)[0] != times_until(Poisson(50.0), 1.0, seed=2)[0]


def test_bursts_are_burstier_than_poisson() -> None:
    """Variance over mean of counts per second: 1 for Poisson."""
    for process, least, most in ((Poisson(50.0), 0.8, 1.2), (PROCESSES[1], 10.0, 1e3)):
        counts = np.bincount(times_until(process, 1000.0).astype(int), minlength=1000)
        assert least < counts.var() / counts.mean() < most


def test_the_day_peaks_where_the_sine_does() -> None:
    phase = times_until(Diurnal(100.0, amplitude=0.8, period_s=100.0), 1000.0) % 100.0
    rising, falling = ((phase < 50.0).sum(), (phase >= 50.0).sum())
    assert rising / falling == pytest.approx((1 + 0.8 * 2 / np.pi) / (1 - 0.8 * 2 / np.pi), rel=0.1)


def test_hours_are_joined_around_midnight() -> None:
    day = Diurnal(1.0, period_s=24.0, points=(4.0, *[0.0] * 22, 2.0))
    assert day.rate_at(np.array([0.0, 0.5, 12.0, 23.0, 23.5])).tolist() == [4.0, 2.0, 0.0, 2.0, 3.0]


def test_together_is_one_instant() -> None:
    assert times_until(Together(10_000), 1.0).tolist() == [0.0] * 10_000


def test_a_process_is_lazy() -> None:
    first = next(iter(Poisson(1e6).chunks(generator(0, "test"), float("inf"))))
    assert len(first) == 4096
    assert len(list(islice(chain.from_iterable(Poisson(1.0).chunks(generator(0, "t"), float("inf"))), 9000))) == 9000


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"kind": "poisson", "rate": -1}', "rate"),
        ('{"kind": "poisson"}', "rate"),
        ('{"kind": "tidal", "rate": 1}', "kind"),
        ('{"kind": "bursty", "rate": 1, "on_s": 0}', "on_s"),
        ('{"kind": "diurnal", "rate": 1, "points": [1, 2]}', "points"),
        ('{"kind": "diurnal", "rate": 1, "amplitude": 1.5}', "amplitude"),
        ('{"kind": "poisson", "rate": 1, "speed": 2}', "speed"),
    ],
)
def test_a_malformed_process_names_its_field(text: str, field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(text, type=Arrivals)
