"""The mix of requests a service sees: kinds of requests, each with its two length distributions.

Owns the shape of a mix file and the correlation of prompt and output lengths, which exists only
between kinds. Knows nothing of arrivals or cost.
"""

from fractions import Fraction

import msgspec
import numpy as np
from msgspec import Struct

from headrace.core.closed_set import complete
from headrace.core.errors import InvalidInput
from headrace.sim.lengths import MAX_PARTS, IntArray, Lengths, check_between, parse_lengths, weighted_mean


class RequestClass(Struct, frozen=True):
    """One kind of request; within it prompt and output lengths are independent."""

    prompt: Lengths
    output: Lengths
    weight: float = 1.0


class RequestMix(Struct, frozen=True):
    """Kinds of requests and how often each comes; this is where prompt and output correlate."""

    classes: tuple[RequestClass, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.classes) <= MAX_PARTS:
            raise ValueError(f"classes must hold 1 to {MAX_PARTS} kinds of requests")
        for kind in self.classes:
            check_between("weight", kind.weight, 1e-9, 1e9)

    def shares(self) -> tuple[float, ...]:
        total = sum(kind.weight for kind in self.classes)
        return tuple(kind.weight / total for kind in self.classes)

    def prompt_mean(self) -> Fraction | float:
        return weighted_mean([(kind.weight, kind.prompt.mean()) for kind in self.classes])

    def output_mean(self) -> Fraction | float:
        return weighted_mean([(kind.weight, kind.output.mean()) for kind in self.classes])

    def longest(self) -> int:
        """Tokens of the longest request there can be, prompt and output."""
        return max(kind.prompt.greatest + kind.output.greatest for kind in self.classes)

    def sample(self, rng: np.random.Generator, n: int) -> tuple[IntArray, IntArray]:
        """Prompt and output lengths of `n` requests."""
        chosen = rng.choice(len(self.classes), size=n, p=self.shares())
        prompts, outputs = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
        for index, kind in enumerate(self.classes):
            mine = chosen == index
            count = int(mine.sum())
            prompts[mine], outputs[mine] = kind.prompt.sample(rng, count), kind.output.sample(rng, count)
        return prompts, outputs


def single_mix(prompt: Lengths, output: Lengths) -> RequestMix:
    return RequestMix((RequestClass(prompt, output),))


def load_mix(raw: object, where: str) -> RequestMix:
    """Check what a mix file held: prompt and output, or a list of classes of them with weights."""
    has_classes = isinstance(raw, dict) and "classes" in raw
    try:
        specs = msgspec.convert(raw, _MixSpec).classes if has_classes else (msgspec.convert(raw, _ClassSpec),)
        return RequestMix(tuple(_resolve(spec) for spec in specs))
    except (InvalidInput, msgspec.ValidationError, ValueError, RecursionError) as error:
        told = complete(error, _MixSpec if has_classes else _ClassSpec)
        raise InvalidInput(f"{where}: {told}", param=where) from None


class _ClassSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """As written in a file, where the short text form may stand for a distribution."""

    prompt: Lengths | str | int
    output: Lengths | str | int
    weight: float = 1.0


class _MixSpec(Struct, frozen=True, forbid_unknown_fields=True):
    classes: tuple[_ClassSpec, ...]


def _resolve(spec: _ClassSpec) -> RequestClass:
    return RequestClass(_written("prompt", spec.prompt), _written("output", spec.output), spec.weight)


def _written(name: str, value: Lengths | str | int) -> Lengths:
    return parse_lengths(str(value), name) if isinstance(value, str | int) else value
