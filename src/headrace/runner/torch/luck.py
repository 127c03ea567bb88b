"""Random numbers by counter: a token's number is a function of (seed, choice, position) and of nothing else.

splitmix64 in wrapping int64 arithmetic, and integers all the way to the draw: the same bits on every
device and in every batch. Knows no slot and no distribution.
"""

import torch
from torch import Tensor

from headrace.core.request import SamplingParams
from headrace.runner.cells import MASK_64, mix_int

# splitmix64's step between positions, and another odd step between the tries at one position.
_STEP = 0x9E3779B97F4A7C15
_RETRY = 0xD1342543DE82EF95
# A lower temperature leaves nothing to chance but overflows.
_COLDEST = 1e-5
# `below` multiplies a total by 32 bits in an int64.
MAX_TOTAL = 2**31


def is_drawn(sampling: SamplingParams) -> bool:
    """Whether chance has a say: these settings leave nothing but the likeliest id otherwise."""
    return sampling.temperature >= _COLDEST and sampling.top_k != 1 and sampling.top_p > 0.0


def signed(value: int) -> int:
    """The same 64 bits as an int64 holds them."""
    value &= MASK_64
    return value - 2**64 if value >= 2**63 else value


def key(seed: int, choice: int) -> int:
    """Where the numbers of one choice of one request start; neighbouring seeds and choices start far apart."""
    return signed(mix_int(mix_int(seed + _STEP) + choice))


def bits(keys: Tensor, positions: Tensor) -> Tensor:
    """64 random bits per (key, position), both int64."""
    return _mix(keys + (positions + 1) * signed(_STEP))


def again(first: Tensor, attempt: int) -> Tensor:
    """Fresh bits for another try at the same token."""
    return _mix(first + signed(attempt * _RETRY))


def below(random: Tensor, totals: Tensor) -> Tensor:
    """Uniform integers in [0, total), for totals from 1 to MAX_TOTAL."""
    return (_shift(random, 32) * totals) >> 32


def _shift(values: Tensor, count: int) -> Tensor:
    """Shift right with zeros: int64's own shift copies the sign."""
    return (values >> count) & ((1 << (64 - count)) - 1)


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shift(values, 30)) * signed(0xBF58476D1CE4E5B9)
    values = (values ^ _shift(values, 27)) * signed(0x94D049BB133111EB)
    return torch.bitwise_xor(values, _shift(values, 31))
