"""Device memory of odd rows: those that a step cannot sample alone, because of rules, penalties, masks, log-probabilities.

Owns how their packet is divided, the lines that slots have in pools, and room to change a few rows' logits in. A pool is
taken when the first request asks for it, and whole, so that no step has to ask for memory. Knows neither plans nor
requests; needs no Triton.
"""

from dataclasses import dataclass

import torch
from msgspec import Struct
from torch import Tensor

from headrace.core.config import EngineConfig
from headrace.core.request import MAX_LOGPROBS

# In a line of counts: how often an id was put out, and a bit for ids of the prompt.
PROMPT_BIT = 1 << 30
# Rows that are changed together: the room for it must not grow with the slots.
_PIECE = 64
# Sections begin at 16 bytes: kernels are compiled once for that, and again for every other case.
_ALIGNED = 4
# Sections of a packet, a word for each row: of rows under rules, then of rows with scores.
FIELDS = ("places", "slots", "bias", "limits", "counts", "repetition", "frequency", "presence", "masks")
_SCORED = ("scored", "alternatives")


@dataclass(slots=True, frozen=True)
class Rules:
    """Pools and, by row, the lines in them (-1: none).

    `bias` [pool, vocabulary] float32. `limits` and `masks` [pool, words] int32: bit v of a line, little end first, says
    that v may be taken; a row heeds a line of each. `counts` [pool, vocabulary] int32, `factors` [3, rows] float32:
    repetition, frequency, presence.
    """

    bias: Tensor
    bias_lines: Tensor
    limits: Tensor
    limit_lines: Tensor
    masks: Tensor
    mask_lines: Tensor
    counts: Tensor
    count_lines: Tensor
    factors: Tensor


@dataclass(slots=True, frozen=True)
class RuledRows:
    """Samples that rules change: their `places` among the step's and their slots, both -1 for padding; and room for their
    logits [rows, vocabulary] float32 under the rules."""

    places: Tensor
    slots: Tensor
    rules: Rules
    logits: Tensor


@dataclass(slots=True, frozen=True)
class ScoredRows:
    """Samples that log-probabilities were asked of: their `places` among the step's, -1 for padding, and how many
    `alternatives`. `logprobs` [rows], `top_ids` and `top_logprobs` [rows, MAX_LOGPROBS] are what comes of it."""

    places: Tensor
    alternatives: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def score_words(rows: int) -> int:
    """What the scores of so many rows take of an answer."""
    return _aligned(rows) + 2 * rows * MAX_LOGPROBS


def score_parts(words: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, alternatives and theirs, of so many rows, in words of an answer: on the device and on the host."""
    at, size = _aligned(rows), rows * MAX_LOGPROBS
    tops = words[at : at + 2 * size].view(2, rows, MAX_LOGPROBS)
    return words[:rows].view(torch.float32), tops[0], tops[1].view(torch.float32)


def odd_bytes(config: EngineConfig) -> int:
    """The most that odd rows take: once all pools are there."""
    line, slots = 4 * config.vocab_size, config.slots
    limits = 4 * 2 * mask_words(config.vocab_size) * slots
    packet = 4 * OddLayout(slots, config.vocab_size).size
    return 2 * slots * line + limits + packet + min(slots, _PIECE) * line


class OddLayout(Struct, frozen=True):
    """Where everything lies in a packet of odd rows: sections of one length, then the masks that the host made."""

    slots: int
    vocab_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many sections, and how long each is."""
        return len(FIELDS) + len(_SCORED), _aligned(self.slots)

    def at(self, field: str) -> int:
        return (*FIELDS, *_SCORED).index(field) * _aligned(self.slots)

    @property
    def masks_at(self) -> int:
        sections, length = self.shape
        return sections * length

    @property
    def size(self) -> int:
        """With a mask for every slot."""
        return self.masks_at + self.slots * mask_words(self.vocab_size)


class OddSpace:
    """A slot's line has its number; of `limits` it has two, for tokens before a position and for those after."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.layout = OddLayout(slots, vocab_size)
        self.inbox = torch.zeros(self.layout.size, dtype=torch.int32, device=device)
        self._bias: Tensor | None = None
        self._limits: Tensor | None = None
        self._counts: Tensor | None = None
        rows = min(slots, _PIECE)
        self._logits = torch.zeros(rows, vocab_size, dtype=torch.float32, device=device)
        # By how many rows there are; made anew where a pool was taken.
        self._ruled: dict[int, list[RuledRows]] = {}

    def set_bias(self, line: int, ids: Tensor, values: Tensor) -> None:
        """`ids` (each once) are favoured by `values`, and all others by nothing. All three setters put it on the lane, and
        can be called again where they found no memory."""
        if self._bias is None:
            self._bias = self._pool(self.layout.slots, self.layout.vocab_size, torch.float32)
        self._bias[line].zero_().index_copy_(0, self._here(ids).long(), self._here(values))

    def set_limit(self, line: int, words: Tensor) -> None:
        if self._limits is None:
            self._limits = self._pool(2 * self.layout.slots, mask_words(self.layout.vocab_size), torch.int32)
        self._limits[line].copy_(words, non_blocking=True)

    def set_counts(self, line: int, ids: Tensor, num_prompt: int) -> None:
        """`ids` are a prompt's, then those that were put out since."""
        if self._counts is None:
            self._counts = self._pool(self.layout.slots, self.layout.vocab_size, torch.int32)
        held = self._here(ids).long()
        put_out = held[num_prompt:]
        ones = torch.ones_like(put_out, dtype=torch.int32)
        self._counts[line].zero_().index_fill_(0, held[:num_prompt], PROMPT_BIT).index_add_(0, put_out, ones)

    def receive(self, letter: Tensor) -> None:
        """The packet, in one copy."""
        self.inbox[: len(letter)].copy_(letter, non_blocking=True)

    def ruled(self, rows: int) -> list[RuledRows]:
        """The packet's first `rows` rows under rules, a few at a time."""
        if rows not in self._ruled:
            firsts = range(0, rows, _PIECE)
            self._ruled[rows] = [self._piece(first, min(_PIECE, rows - first)) for first in firsts]
        return self._ruled[rows]

    def scored(self, rows: int, words: Tensor) -> ScoredRows:
        """The packet's first `rows` rows with scores, which go to `words`."""
        return ScoredRows(self._part("scored", 0, rows), self._part("alternatives", 0, rows), *score_parts(words, rows))

    def _piece(self, first: int, count: int) -> RuledRows:
        """Where a pool is not there, nobody has a line in it."""
        part = {field: self._part(field, first, count) for field in FIELDS}
        sections = self.inbox[: self.layout.masks_at].view(self.layout.shape)
        factor = FIELDS.index("repetition")
        rules = Rules(
            bias=self._logits if self._bias is None else self._bias,
            bias_lines=part["bias"],
            limits=self.inbox if self._limits is None else self._limits,
            limit_lines=part["limits"],
            masks=self.inbox[self.layout.masks_at :].view(self.layout.slots, -1),
            mask_lines=part["masks"],
            counts=self.inbox if self._counts is None else self._counts,
            count_lines=part["counts"],
            factors=sections[factor : factor + 3, first : first + count].view(torch.float32),
        )
        return RuledRows(part["places"], part["slots"], rules, self._logits[:count])

    def _part(self, field: str, first: int, count: int) -> Tensor:
        at = self.layout.at(field) + first
        return self.inbox[at : at + count]

    def _here(self, letter: Tensor) -> Tensor:
        return letter.to(self.inbox.device, non_blocking=True)

    def _pool(self, lines: int, width: int, dtype: torch.dtype) -> Tensor:
        pool = torch.empty(lines, width, dtype=dtype, device=self.inbox.device)
        self._ruled.clear()
        return pool


def _aligned(words: int) -> int:
    return -(-words // _ALIGNED) * _ALIGNED
