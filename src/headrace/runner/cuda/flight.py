"""What the host remembers of a launched plan, and how its answer is read. Waits for nothing."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.plan import IntArray, Plan, RowStatus
from headrace.runner.cuda.lane import Lane, Mark
from headrace.runner.cuda.machine import answer_words
from headrace.runner.cuda.packet import Laid
from headrace.runner.torch.score_pile import ScorePile

StatusArray = NDArray[np.uint8]


@dataclass(slots=True)
class Envelope:
    """Memory that one step is sent from and answered into, and the marks before and after it."""

    packet: Tensor
    words: IntArray
    answer: Tensor
    found: IntArray
    before: Mark
    after: Mark

    @classmethod
    def make(cls, lane: Lane, packet_words: int, answer_words: int) -> "Envelope":
        packet, answer = lane.letter(packet_words), lane.letter(answer_words)
        return cls(packet, packet.numpy(), answer, answer.numpy(), lane.mark(), lane.mark())


class Chosen(NamedTuple):
    """What a second look chose for these rows of the plan: it knows better than the graph."""

    rows: NDArray[np.intp]
    tokens: IntArray
    statuses: StatusArray


@dataclass(slots=True)
class Flight:
    """`failed` is what was known of each row's slot at the launch."""

    plan: Plan
    laid: Laid
    envelope: Envelope
    failed: StatusArray
    scores: ScorePile
    chosen: Chosen | None = None
    is_sampled: bool = False

    @property
    def answer_words(self) -> int:
        layout = self.laid.layout
        return answer_words(layout.num_samples, layout.chunks)

    def read(self) -> tuple[IntArray, StatusArray]:
        """Tokens and statuses by the plan's rows; a failed row has token -1."""
        laid, answer = self.laid, self.envelope.found
        rows, width = len(self.plan.slots), laid.layout.num_samples
        verdicts = answer.view(np.uint8)[4 * width : 5 * width]
        if laid.layout.tokens == 0:
            tokens, found = answer[:rows].copy(), verdicts[:rows].copy()
        else:
            samples = len(laid.sampling)
            tokens, found = np.full(rows, -1, np.int32), np.zeros(rows, np.uint8)
            tokens[laid.sampling] = answer[:samples]
            found[laid.sampling] = verdicts[:samples]
        if self.chosen is not None:
            tokens[self.chosen.rows] = self.chosen.tokens
            found[self.chosen.rows] = self.chosen.statuses
        # Whatever token could be chosen after it: a chunk that is not finite must not reach the prefix cache.
        bad = answer[answer_words(width) :][: len(laid.chunks)] > 0
        found[laid.chunks[bad]] = RowStatus.NOT_FINITE
        # What was known before is the better reason.
        statuses = np.where(self.failed, self.failed, found)
        tokens[statuses != RowStatus.OK] = -1
        return tokens, statuses
