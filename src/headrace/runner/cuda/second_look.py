"""Rows that the graph's sampling cannot serve: rules, penalties, masks, log-probabilities; and the scores of prompts.

Their tokens are chosen again from the same logits by the sampler that every device shares. It waits for the device;
plans without such rows never come here. It is the one part of a step that takes memory: what finds none is done in
smaller pieces, and a row that finds none alone fails alone.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.core.plan import IntArray, Masks, RowStatus, SlotStart
from headrace.runner.cuda.decoder import Decoder
from headrace.runner.cuda.host_slots import HostSlots
from headrace.runner.cuda.shortage import Reclaim, fits_at_last, in_pieces
from headrace.runner.torch.sampler import Sampler
from headrace.runner.torch.score_pile import ScorePile

# Rows that are looked at together: what that takes must not grow with the slots.
_LOOKED_ROWS = 32
# Copies of their logits in float32 that the sampler makes, at most, and what it keeps to weigh whole rows in.
_COPIES = 8
_URN_BYTES = 16 << 20
# Logits of prompt positions are made this many rows at a time.
_SCORED_ROWS = 64


def look_bytes(config: EngineConfig) -> int:
    """The most that looking again takes: a few rows, and a count of every id for every slot, while their pool grows."""
    row = 4 * config.vocab_size
    return _URN_BYTES + min(config.slots, _LOOKED_ROWS) * _COPIES * row + config.slots * row * 3 // 2


class SecondLook:
    """The sampler's memory is taken when the first such request comes. `reclaim` gives back what nobody uses."""

    def __init__(self, config: EngineConfig, slots: HostSlots, device: torch.device, reclaim: Reclaim) -> None:
        self._config = config
        self._slots = slots
        self._device = device
        self._reclaim = reclaim
        self._sampler: Sampler | None = None
        self._served = np.zeros(config.slots, np.bool_)

    def begin(self, start: SlotStart) -> None:
        """An occupant that the sampler has no memory for has failed before its first row."""
        slot = start.slot
        wanted = bool(self._slots.special_until[slot] or self._slots.scores_prompt[slot])
        if not wanted and not self._served[slot]:
            return
        # Who wants nothing of the sampler still takes from it what the slot held for the one before.
        self._served[slot] = wanted
        if not fits_at_last(lambda: self._begin(start), self._reclaim):
            self._slots.failed[slot] = RowStatus.OUT_OF_ROOM
            self._slots.special_until[slot] = 0
            self._slots.scores_prompt[slot] = False

    def _begin(self, start: SlotStart) -> None:
        if self._sampler is None:
            config = self._config
            self._sampler = Sampler(config.slots, config.vocab_size, config.eos_ids, self._device)
        self._sampler.begin(start)

    def sample(
        self,
        logits: Tensor,
        which: NDArray[np.intp],
        slots: IntArray,
        ends: IntArray,
        masks: Masks | None,
        rows: IntArray,
        pile: ScorePile,
    ) -> tuple[IntArray, NDArray[np.uint8]]:
        """Tokens and statuses of the samples `which` of `logits` [samples, vocabulary], which are these rows of the plan."""
        sampler = self._sampler
        assert sampler is not None
        tokens, statuses = np.full(len(which), -1, np.int32), np.full(len(which), RowStatus.OUT_OF_ROOM, np.uint8)

        def look(part: slice) -> None:
            found = logits.index_select(0, torch.from_numpy(which[part]).to(self._device)).float()
            sampled = sampler.sample(found, slots[part], ends[part], masks, rows[part])
            tokens[part], statuses[part] = sampled.tokens, sampled.statuses
            if sampled.scores is not None:
                pile.add(sampled.scores)

        in_pieces(len(which), _LOOKED_ROWS, look, self._reclaim)
        return tokens, statuses

    def score_prompt(self, pile: ScorePile, decoder: Decoder, states: Tensor, slot: int, row: int, start: int) -> bool:
        """`states` [count, hidden] are the chunk's, from position `start` on; each predicts the prompt's next id. False
        where there was no memory for one of them."""
        sampler = self._sampler
        assert sampler is not None
        prompt: NDArray[np.int32] = self._slots.ids[slot, : self._slots.num_prompt[slot]]
        count = min(len(states), len(prompt) - 1 - start)

        def score(part: slice) -> None:
            logits = decoder.logits_of(states[part]).float()
            positions = np.arange(start + 1 + part.start, start + 1 + part.stop, dtype=np.int32)
            pile.add(sampler.score_prompt(logits, slot, row, positions, prompt[positions]))

        return not in_pieces(count, _SCORED_ROWS, score, self._reclaim)
