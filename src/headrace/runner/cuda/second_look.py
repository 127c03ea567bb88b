"""Rows that the graph's sampling cannot serve: rules, penalties, masks, log-probabilities; and the scores of prompts.

Their tokens are chosen again from the same logits by the sampler that every device shares. It waits for the device;
plans without such rows never come here.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.core.plan import IntArray, Masks, SlotStart
from headrace.runner.cuda.decoder import Decoder
from headrace.runner.cuda.host_slots import HostSlots
from headrace.runner.torch.sampler import Sampled, Sampler
from headrace.runner.torch.score_pile import ScorePile

# Logits of prompt positions are made this many rows at a time.
_SCORED_ROWS = 64


class SecondLook:
    """The sampler's memory is taken when the first such request comes."""

    def __init__(self, config: EngineConfig, slots: HostSlots, device: torch.device) -> None:
        self._config = config
        self._slots = slots
        self._device = device
        self._sampler: Sampler | None = None

    def begin(self, start: SlotStart) -> None:
        if not (self._slots.special[start.slot] or self._slots.scores_prompt[start.slot]):
            return
        if self._sampler is None:
            config = self._config
            self._sampler = Sampler(config.slots, config.vocab_size, config.eos_ids, self._device)
        self._sampler.begin(start)

    def sample(self, logits: Tensor, slots: IntArray, ends: IntArray, masks: Masks | None, rows: IntArray) -> Sampled:
        """`logits` [n, vocabulary] of these rows of the plan."""
        assert self._sampler is not None
        return self._sampler.sample(logits.float(), slots, ends, masks, rows)

    def score_prompt(self, pile: ScorePile, decoder: Decoder, states: Tensor, slot: int, row: int, start: int) -> None:
        """`states` [count, hidden] are the chunk's, from position `start` on; each predicts the prompt's next id."""
        assert self._sampler is not None
        prompt: NDArray[np.int32] = self._slots.ids[slot, : self._slots.num_prompt[slot]]
        stop = min(start + len(states), len(prompt) - 1)
        for low in range(start, stop, _SCORED_ROWS):
            high = min(low + _SCORED_ROWS, stop)
            logits = decoder.logits_of(states[low - start : high - start]).float()
            positions = np.arange(low + 1, high + 1, dtype=np.int32)
            pile.add(self._sampler.score_prompt(logits, slot, row, positions, prompt[low + 1 : high + 1]))
