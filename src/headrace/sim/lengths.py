"""Prompt and output lengths as distributions.

Owns their shapes in files and flags, their exact means where these exist, sampling and quadrature.
Knows nothing of time, cost or arrivals: the planner integrates over `support`, the simulator draws
from `sample`, and both see the same distribution.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.core.errors import InvalidInput

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_LENGTH = 10_000_000
MAX_PARTS = 64
MAX_DEPTH = 4
# Standard deviations beyond which a log-normal has no mass that a plan could notice.
_TAIL = 9.0


class _Distribution(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Lengths are whole numbers from `least` to `greatest`, both at least 1."""

    @property
    def least(self) -> int:
        raise NotImplementedError

    @property
    def greatest(self) -> int:
        raise NotImplementedError

    def mean(self) -> Fraction | float:
        """Exact as a Fraction where the distribution is rational, else a float."""
        raise NotImplementedError

    def cdf(self, length: int) -> float:
        raise NotImplementedError

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        raise NotImplementedError

    def support(self, points: int) -> tuple[FloatArray, FloatArray]:
        """Lengths and weights (sum 1) for integrals; about `points` of them, fewer where exact."""
        raise NotImplementedError

    def quantile(self, p: float) -> int:
        """The smallest length that a share `p` of all lengths does not exceed."""
        if not 0.0 <= p <= 1.0:
            raise ValueError("a quantile is asked for a share from 0 to 1")
        low, high = self.least, self.greatest
        while low < high:
            middle = (low + high) // 2
            if self.cdf(middle) >= p - 1e-12:
                high = middle
            else:
                low = middle + 1
        return low


class Fixed(_Distribution, frozen=True, tag="fixed"):
    value: int

    def __post_init__(self) -> None:
        _check_length("value", self.value)

    @property
    def least(self) -> int:
        return self.value

    @property
    def greatest(self) -> int:
        return self.value

    def mean(self) -> Fraction:
        return Fraction(self.value)

    def cdf(self, length: int) -> float:
        return float(length >= self.value)

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        return np.full(n, self.value, dtype=np.int64)

    def support(self, points: int) -> tuple[FloatArray, FloatArray]:
        return np.array([float(self.value)]), np.ones(1)


class Uniform(_Distribution, frozen=True, tag="uniform"):
    """Every whole number from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)

    @property
    def least(self) -> int:
        return self.low

    @property
    def greatest(self) -> int:
        return self.high

    def mean(self) -> Fraction:
        return Fraction(self.low + self.high, 2)

    def cdf(self, length: int) -> float:
        share = (length - self.low + 1) / (self.high - self.low + 1)
        return min(1.0, max(0.0, share))

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        return rng.integers(self.low, self.high, size=n, dtype=np.int64, endpoint=True)

    def support(self, points: int) -> tuple[FloatArray, FloatArray]:
        count = self.high - self.low + 1
        if count <= points:
            values = np.arange(self.low, self.high + 1, dtype=np.float64)
        else:
            values = self.low - 0.5 + count * (np.arange(points) + 0.5) / points
        return values, np.full(len(values), 1.0 / len(values))


class LogNormal(_Distribution, frozen=True, tag="lognormal"):
    """exp(normal) around `median`, rounded, and clipped to `low`..`high`: the tails gather there."""

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _check_range(self.low, self.high)
        check_between("median", self.median, 1e-3, MAX_LENGTH)
        check_between("sigma", self.sigma, 1e-3, 10.0)

    @property
    def least(self) -> int:
        return self.low

    @property
    def greatest(self) -> int:
        return self.high

    def mean(self) -> float:
        """Of the clipped variable in closed form; rounding moves it by less than quadrature would."""
        low, high = self._score(self.low), self._score(self.high)
        inside = _normal_between(low - self.sigma, high - self.sigma)
        body = self.median * math.exp(self.sigma**2 / 2) * inside
        return self.low * _normal_cdf(low) + body + self.high * _normal_cdf(-high)

    def cdf(self, length: int) -> float:
        if length < self.low:
            return 0.0
        return 1.0 if length >= self.high else _normal_cdf(self._score(length + 0.5))

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        drawn = self.median * np.exp(np.minimum(self.sigma * rng.standard_normal(n), 100.0))
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)

    def support(self, points: int) -> tuple[FloatArray, FloatArray]:
        """Equal steps of the normal score, so that the thin tail that carries the moments is covered."""
        low, high = self._score(self.low), self._score(self.high)
        edges = np.linspace(_clip_score(low), _clip_score(high), points + 1)
        below = np.array([_normal_cdf(float(edge)) for edge in edges])
        inner = self.median * np.exp(self.sigma * (edges[1:] + edges[:-1]) / 2)
        values = np.concatenate(([self.low], np.clip(inner, self.low, self.high), [self.high]))
        weights = np.concatenate(([below[0]], np.diff(below), [1.0 - below[-1]]))
        return values, weights / weights.sum()

    def _score(self, length: float) -> float:
        return math.log(length / self.median) / self.sigma


class Empirical(_Distribution, frozen=True, tag="empirical"):
    """Lengths as they were seen: either `values`, or `histogram` pairs of length and count."""

    values: tuple[int, ...] = ()
    histogram: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.histogram):
            raise ValueError("give either values or histogram, and at least one length")
        for value in self.values:
            _check_length("values", value)
        for value, count in self.histogram:
            _check_length("histogram", value)
            check_between("histogram count", count, 1, 10**12)

    @property
    def least(self) -> int:
        return int(self._pairs()[0].min())

    @property
    def greatest(self) -> int:
        return int(self._pairs()[0].max())

    def mean(self) -> Fraction:
        if self.values:
            return Fraction(sum(self.values), len(self.values))
        total = sum(value * count for value, count in self.histogram)
        return Fraction(total, sum(count for _, count in self.histogram))

    def cdf(self, length: int) -> float:
        values, weights = self._pairs()
        return float(weights[values <= length].sum())

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        values, weights = self._pairs()
        return rng.choice(values, size=n, p=weights)

    def support(self, points: int) -> tuple[FloatArray, FloatArray]:
        values, weights = self._pairs()
        return values.astype(np.float64), weights

    def _pairs(self) -> tuple[IntArray, FloatArray]:
        if self.values:
            values, counts = np.unique(np.array(self.values, dtype=np.int64), return_counts=True)
        else:
            values, counts = np.array(self.histogram, dtype=np.int64).T
        return values, counts / counts.sum()


class Mixture(_Distribution, frozen=True, tag="mixture"):
    """`parts` are pairs of weight and distribution; weights count against their sum."""

    parts: "tuple[tuple[float, Lengths], ...]"

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= MAX_PARTS:
            raise ValueError(f"parts must hold 1 to {MAX_PARTS} pairs of weight and distribution")
        for weight, _ in self.parts:
            check_between("weight", weight, 1e-9, 1e9)
        if self.depth > MAX_DEPTH:
            raise ValueError(f"mixtures may be nested {MAX_DEPTH} deep")

    @property
    def depth(self) -> int:
        return 1 + max(part.depth if isinstance(part, Mixture) else 0 for _, part in self.parts)

    @property
    def least(self) -> int:
        return min(part.least for _, part in self.parts)

    @property
    def greatest(self) -> int:
        return max(part.greatest for _, part in self.parts)

    def mean(self) -> Fraction | float:
        return weighted_mean([(weight, part.mean()) for weight, part in self.parts])

    def cdf(self, length: int) -> float:
        shares = self._shares()
        return float(sum(s * part.cdf(length) for s, (_, part) in zip(shares, self.parts, strict=True)))

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        chosen = rng.choice(len(self.parts), size=n, p=self._shares())
        drawn = np.empty(n, dtype=np.int64)
        for index, (_, part) in enumerate(self.parts):
            mine = chosen == index
            drawn[mine] = part.sample(rng, int(mine.sum()))
        return drawn

    def support(self, points: int) -> tuple[FloatArray, FloatArray]:
        pairs = [part.support(max(16, points // len(self.parts))) for _, part in self.parts]
        values = np.concatenate([values for values, _ in pairs])
        shares = self._shares()
        weights = np.concatenate([s * w for s, (_, w) in zip(shares, pairs, strict=True)])
        return values, weights

    def _shares(self) -> FloatArray:
        weights: FloatArray = np.array([weight for weight, _ in self.parts], dtype=np.float64)
        return weights / float(weights.sum())


Lengths = Fixed | Uniform | LogNormal | Empirical | Mixture


def weighted_mean(pairs: list[tuple[float, Fraction | float]]) -> Fraction | float:
    """Exact when every mean is: a weight written 0.9 counts as nine tenths, not as its nearest double."""
    weights = [Fraction(repr(float(weight))) for weight, _ in pairs]
    exact = [(weight, mean) for weight, (_, mean) in zip(weights, pairs, strict=True) if _is_exact(mean)]
    if len(exact) == len(pairs):
        return sum((weight * Fraction(mean) for weight, mean in exact), Fraction(0)) / sum(weights)
    total = float(sum(weights))
    return sum(float(weight) * float(mean) for weight, (_, mean) in zip(weights, pairs, strict=True)) / total


def check_between(name: str, value: Any, low: float, high: float) -> None:
    """Raises ValueError, which msgspec turns into an error that names the place in the file."""
    # NaN is in no range; an integer may be too large for a float, so that none is made of it.
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low:,.12g} to {high:,.12g}, not {str(value)[:40]}")


def parse_lengths(text: str, param: str) -> Lengths:
    """Read the short form: 25, uniform:1:9, lognormal:60:1.0:5:500, empirical:3,4,4, mix:0.9*...+0.1*..."""
    try:
        return _parse(text.strip())
    except ValueError as error:
        raise InvalidInput(f"{param}: {error}", param=param) from None


def _parse(text: str) -> Lengths:
    if len(text) > 10_000:
        raise ValueError("a distribution in text form has at most 10,000 characters")
    kind, _, rest = text.partition(":")
    if not rest:
        return Fixed(_whole(kind))
    if kind == "mix":
        # A plus sign parts two terms only where a weight follows: 1e+3 holds one that does not.
        return Mixture(tuple(_parse_part(part) for part in re.split(r"\+(?=[0-9.eE-]+\*)", rest)))
    if kind == "empirical":
        return Empirical(values=tuple(_whole(value) for value in rest.split(",")))
    if kind not in _SHAPES:
        raise ValueError(f"no distribution is called {kind[:40]!r}; there are {', '.join(_SHAPES)}, empirical, mix")
    names, build = _SHAPES[kind]
    arguments = rest.split(":")
    if len(arguments) != len(names):
        raise ValueError(f"{kind} takes {':'.join(names)}")
    return build(*arguments)


def _parse_part(text: str) -> tuple[float, Lengths]:
    weight, star, rest = text.partition("*")
    if not star:
        raise ValueError("a mix is written mix:0.9*DISTRIBUTION+0.1*DISTRIBUTION")
    if rest.startswith("mix:"):
        raise ValueError("a mix inside a mix needs a mix file")
    return _number(weight), _parse(rest)


_SHAPES: dict[str, tuple[tuple[str, ...], Callable[..., Lengths]]] = {
    "fixed": (("value",), lambda value: Fixed(_whole(value))),
    "uniform": (("low", "high"), lambda low, high: Uniform(_whole(low), _whole(high))),
    "lognormal": (
        ("median", "sigma", "low", "high"),
        lambda median, sigma, low, high: LogNormal(_number(median), _number(sigma), _whole(low), _whole(high)),
    ),
}


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,12}", text.strip()):
        raise ValueError(f"expected a whole number of tokens, not {text[:40]!r}")
    return int(text)


def _number(text: str) -> float:
    if not re.fullmatch(r"[0-9]{0,12}\.?[0-9]{0,18}([eE][+-]?[0-9]{1,2})?", text.strip()) or not text.strip(" ."):
        raise ValueError(f"expected a positive number, not {text[:40]!r}")
    return float(text)


def _is_exact(mean: Fraction | float) -> bool:
    return isinstance(mean, Fraction)


def _check_length(name: str, value: int) -> None:
    check_between(name, value, 1, MAX_LENGTH)


def _check_range(low: int, high: int) -> None:
    _check_length("low", low)
    _check_length("high", high)
    if low > high:
        raise ValueError(f"low ({low}) must not exceed high ({high})")


def _normal_cdf(score: float) -> float:
    return 0.5 * math.erfc(-score / math.sqrt(2.0))


def _normal_between(low: float, high: float) -> float:
    """Taken from the nearer tail, so that two values close to 1 are never subtracted."""
    return _normal_cdf(-low) - _normal_cdf(-high) if low > 0.0 else _normal_cdf(high) - _normal_cdf(low)


def _clip_score(score: float) -> float:
    return min(_TAIL, max(-_TAIL, score))
