"""Where every slot's state lies on the device: one run of 32-bit words, so that a change is an address and a value.

Owns the addresses and the bits of settings. Knows neither tensors nor plans.
"""

import math
import struct

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headrace.core.plan import IntArray, SlotStart
from headrace.core.request import SamplingParams
from headrace.runner.torch import luck, penalties

# Fields of one word per slot, in the order they lie behind the seeds (two words each). `lengths` counts positions
# whose keys and values exist after the step at hand, which is also the place of the token that it samples.
FIELDS = ("lengths", "last", "temperature", "top_k", "top_p", "min_p")
_PARAMS = ("temperature", "top_k", "top_p", "min_p")
_SETTINGS = struct.Struct("=qfiff")


class SlotWords(Struct, frozen=True):
    """Addresses of `slots` slots whose tables have `width` blocks. Seeds come first: they need 8-byte alignment."""

    slots: int
    width: int

    def at(self, field: str) -> int:
        """The word of slot 0; the other slots' words follow it."""
        return (2 + FIELDS.index(field)) * self.slots

    @property
    def tables_at(self) -> int:
        return (2 + len(FIELDS)) * self.slots

    @property
    def size(self) -> int:
        return self.tables_at + self.slots * self.width

    def begin(self, start: SlotStart, vocab_size: int) -> IntArray:
        """All changes that a new occupant makes: [n, 2] addresses and values."""
        slot, blocks = start.slot, np.array(start.blocks, np.int32)
        params = settings(start.sampling, start.choice, vocab_size)
        pairs = np.empty((len(params) + 1 + len(blocks), 2), np.int32)
        pairs[:6, 0] = (2 * slot, 2 * slot + 1, *(self.at(name) + slot for name in _PARAMS))
        pairs[:6, 1] = params
        last = start.ids[-1] if start.ids else 0
        pairs[6] = (self.at("last") + slot, min(max(last, 0), vocab_size - 1))
        pairs[7:, 0] = np.arange(len(blocks), dtype=np.int32) + (self.tables_at + slot * self.width)
        pairs[7:, 1] = blocks
        return pairs


def settings(sampling: SamplingParams, choice: int, vocab_size: int) -> IntArray:
    """Seed (two words, low first), temperature, top-k, top-p and min-p as words. Temperature 0: the likeliest id.
    top-k 0, top-p 1 and min-p 0 are off."""
    temperature = sampling.temperature if luck.is_drawn(sampling) else 0.0
    assert all(map(math.isfinite, (temperature, sampling.top_p, sampling.min_p)))
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    key = luck.key(sampling.seed, choice)
    return np.frombuffer(_SETTINGS.pack(key, temperature, top_k, sampling.top_p, sampling.min_p), np.int32)


def is_special(sampling: SamplingParams) -> bool:
    """Whether all its rows are odd, and need more than the graph does: rules, penalties, masks, log-probabilities. Stops
    that come too early are a matter of its first rows alone."""
    return bool(
        sampling.masked
        or sampling.logprobs is not None
        or sampling.allowed_ids
        or sampling.logit_bias
        or penalties.asks(sampling)
    )


WordArray = NDArray[np.int32]
