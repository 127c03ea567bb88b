"""What the host remembers of a launched plan, and how its answer is read. Waits for nothing."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.plan import IntArray, Plan, RowStatus, Scores
from headrace.runner.cuda.lane import Lane, Mark
from headrace.runner.cuda.machine import answer_words, scores_at
from headrace.runner.cuda.odd_rows import ScoredSamples
from headrace.runner.cuda.odd_space import score_parts, score_words
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


@dataclass(slots=True)
class Flight:
    """`failed` is what was known of each row's slot at the launch."""

    plan: Plan
    laid: Laid
    envelope: Envelope
    failed: StatusArray
    scores: ScorePile
    scored: ScoredSamples | None = None
    is_sampled: bool = False

    @property
    def answer_words(self) -> int:
        layout = self.laid.layout
        if self.scored is None:
            return answer_words(layout.num_samples, layout.chunks)
        return scores_at(layout) + score_words(len(self.scored.rows))

    def read(self) -> tuple[IntArray, StatusArray]:
        """Tokens and statuses by the plan's rows; a failed row has token -1."""
        laid, answer = self.laid, self.envelope.found
        rows, width = len(self.plan.slots), laid.layout.num_samples
        verdicts = answer.view(np.uint8)[4 * width : 5 * width]
        samples = len(laid.sampling)
        tokens, found = np.full(rows, -1, np.int32), np.zeros(rows, np.uint8)
        tokens[laid.sampling] = answer[:samples]
        found[laid.sampling] = verdicts[:samples]
        if len(laid.chunks):
            # Whatever token could be chosen after it: a chunk that is not finite must not reach the prefix cache.
            bad = answer[answer_words(width) :][: len(laid.chunks)] > 0
            found[laid.chunks[bad]] = RowStatus.NOT_FINITE
        # What was known before is the better reason.
        statuses = np.where(self.failed, self.failed, found)
        if np.count_nonzero(statuses):
            tokens[statuses != RowStatus.OK] = -1
        return tokens, statuses

    def read_scores(self, statuses: StatusArray) -> Scores | None:
        """All scores of the step; a row that failed has none of a token."""
        if self.scored is not None:
            rows, positions, alternatives = self.scored
            words = self.envelope.answer[scores_at(self.laid.layout) :]
            parts = (part.numpy() for part in score_parts(words, len(rows)))
            good = np.flatnonzero(statuses[rows] == RowStatus.OK)
            if len(good):
                logprobs, top_ids, top_logprobs = (part[good] for part in parts)
                most = int(alternatives[good].max())
                tops = (top_ids[:, :most], top_logprobs[:, :most])
                self.scores.add(Scores(rows[good], positions[good], logprobs, *tops))
        return self.scores.whole()
