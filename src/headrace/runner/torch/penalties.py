"""Repetition, presence and frequency penalties: counts of ids in rows of a pool, for slots that ask.

Repetition looks at prompt and output, presence and frequency at output alone. A row is touched only at
the ids its sequence holds, never over the vocabulary. Knows no other sampling setting.
"""

import numpy as np
import torch
from torch import Tensor

from headrace.core.plan import IntArray, SlotStart
from headrace.core.request import SamplingParams


def asks(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class PenaltyPool:
    """Grows by doubling to the most slots that ever asked at once."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._line_of = np.full(slots, -1, np.int64)
        self._free: list[int] = []
        self._size = 0
        # A line: how often each id was put out; and the ids to look at, those of the prompt once each, then
        # the output in order. Places past a line's length repeat its first id.
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._ids = torch.zeros(0, 64, dtype=torch.int64, device=device)
        self._lengths = np.zeros(0, np.int64)
        self._factors = torch.ones(0, 3, dtype=torch.float32, device=device)

    def begin(self, start: SlotStart) -> None:
        """The slot's new occupant inherits nothing; without penalties it holds no line."""
        line = int(self._line_of[start.slot])
        if not asks(start.sampling):
            if line >= 0:
                self._free.append(line)
                self._line_of[start.slot] = -1
            return
        if line < 0:
            line = self._take_line()
            self._line_of[start.slot] = line
        # An id outside the vocabulary fails its row elsewhere; here it must only do no harm.
        held = np.clip(np.array(start.ids, np.int64), 0, self._vocab_size - 1)
        output = held[start.num_prompt :]
        seen = np.concatenate([np.unique(held[: start.num_prompt]), output])
        self._reserve(len(seen) + 1)
        self._ids[line] = int(seen[0])
        self._ids[line, : len(seen)] = torch.from_numpy(seen).to(self._device)
        self._lengths[line] = len(seen)
        ids, counts = np.unique(output, return_counts=True)
        self._counts[line] = 0
        self._counts[line, torch.from_numpy(ids).to(self._device)] = torch.from_numpy(counts.astype(np.int32)).to(
            self._device
        )
        sampling = start.sampling
        self._factors[line] = torch.tensor(
            (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        )

    def apply(self, logits: Tensor, rows: Tensor, slots: IntArray) -> None:
        """Penalise `rows` of the logits, which belong to `slots`, in place."""
        lines = torch.from_numpy(self._line_of[slots]).to(self._device)
        longest = int(self._lengths[self._line_of[slots]].max())
        ids = self._ids[lines, :longest]  # [n, longest]
        counts = self._counts[lines[:, None], ids]
        repetition, frequency, presence = self._factors[lines].unsqueeze(-1).unbind(1)  # [n, 1] each
        values = logits[rows[:, None], ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0)
        # An id that stands in several places gets the same value from each.
        logits[rows[:, None], ids] = values

    def note(self, slots: IntArray, tokens: Tensor) -> None:
        """`tokens` (int64) were put out by `slots`, each of which holds a line."""
        lines = self._line_of[slots]
        self._reserve(int(self._lengths[lines].max()) + 1)
        at = torch.from_numpy(lines).to(self._device)
        # The counts last: everything before them can be done again where memory runs out.
        self._ids[at, torch.from_numpy(self._lengths[lines]).to(self._device)] = tokens
        self._counts[at, tokens] += 1
        self._lengths[lines] += 1

    def _take_line(self) -> int:
        if not self._free:
            more = max(4, self._size)
            # All of it or nothing: memory may run out.
            grown = (
                torch.cat([self._counts, self._counts.new_zeros(more, self._vocab_size)]),
                torch.cat([self._ids, self._ids.new_zeros(more, self._ids.shape[1])]),
                torch.cat([self._factors, self._factors.new_ones(more, 3)]),
            )
            self._counts, self._ids, self._factors = grown
            self._lengths = np.concatenate([self._lengths, np.zeros(more, np.int64)])
            self._free = list(range(self._size + more - 1, self._size - 1, -1))
            self._size += more
        return self._free.pop()

    def _reserve(self, length: int) -> None:
        """Room for lines of `length` ids."""
        if length > self._ids.shape[1]:
            more = max(length, 2 * self._ids.shape[1]) - self._ids.shape[1]
            self._ids = torch.cat([self._ids, self._ids[:, :1].expand(-1, more)], 1)
