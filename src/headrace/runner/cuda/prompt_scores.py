"""Log-probabilities of the ids of prompts, by the operators that every device shares.

Seldom asked for, of many rows at once, and it waits for the device; steps without such rows never come here. It is the
one part of a step that takes memory beside its graph: what finds none is done in smaller pieces, and a row that finds none
alone fails alone.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.core.plan import RowStatus
from headrace.runner.cuda.decoder import Decoder
from headrace.runner.cuda.host_slots import HostSlots
from headrace.runner.cuda.shortage import Reclaim, in_pieces
from headrace.runner.torch.sampler_ranks import padded
from headrace.runner.torch.sampler_scores import Asked, score
from headrace.runner.torch.score_pile import ScorePile

# Logits of prompt positions are made this many rows at a time.
_SCORED_ROWS = 64
# Of these rows in float32: their logits, themselves in whole blocks, and what is made of a quarter of them at a time.
_COPIES = 3


def prompt_bytes(config: EngineConfig) -> int:
    """The most that scoring prompts takes."""
    return _SCORED_ROWS * _COPIES * 4 * config.vocab_size


class PromptScores:
    """`reclaim` gives back the memory that nobody uses."""

    def __init__(self, slots: HostSlots, device: torch.device, reclaim: Reclaim) -> None:
        self._slots = slots
        self._device = device
        self._reclaim = reclaim

    def score(self, pile: ScorePile, decoder: Decoder, states: Tensor, slot: int, row: int, start: int) -> int:
        """`states` [count, hidden] are the chunk's, from position `start` on; each predicts the prompt's next id. What is to
        be said of the row: that there was no memory for one of them, or that one is no number."""
        prompt: NDArray[np.int32] = self._slots.ids[slot, : self._slots.num_prompt[slot]]
        count = min(len(states), len(prompt) - 1 - start)
        alternatives = int(self._slots.prompt_alternatives[slot])
        status = RowStatus.OK

        def score_part(part: slice) -> None:
            nonlocal status
            logits = padded(decoder.logits_of(states[part]).float())
            positions = np.arange(start + 1 + part.start, start + 1 + part.stop, dtype=np.int32)
            asked = Asked(
                owners=np.full(len(positions), row, np.int64),
                positions=positions,
                alternatives=np.full(len(positions), alternatives, np.int64),
            )
            ids = torch.from_numpy(prompt[positions].astype(np.int64)).to(self._device)
            scores = score(logits, ids, asked)
            if np.isnan(scores.logprobs).any():
                status = RowStatus.NOT_FINITE
            pile.add(scores)

        return RowStatus.OUT_OF_ROOM if in_pieces(count, _SCORED_ROWS, score_part, self._reclaim) else status
