"""The stages of a request's life. Owns their names and the clock that adds them up.

At each instant exactly one stage owns a request, so the stages sum to wall time.
"""

from collections import defaultdict
from enum import StrEnum


class Stage(StrEnum):
    RECEIVE = "receive"
    AUTHENTICATE = "authenticate"
    ADMIT = "admit"
    TOKENISE = "tokenise"
    ROUTE = "route"
    WAIT_CAPACITY = "wait:capacity"
    WAIT_FAIRNESS = "wait:fairness"
    WAIT_LINGER = "wait:linger"
    PREFILL = "prefill"
    PREFILL_OTHERS = "prefill:others"
    DECODE = "decode"
    PREEMPTED = "preempted"
    TRANSFER = "transfer"
    DETOKENISE = "detokenise"
    SAFETY = "safety"
    CLIENT = "client"


# Those that can be made longer on purpose, to prove that their time is told as theirs.
INJECTABLE = (
    *(Stage.RECEIVE, Stage.AUTHENTICATE, Stage.ADMIT, Stage.TOKENISE, Stage.ROUTE),
    *(Stage.PREFILL, Stage.DECODE, Stage.TRANSFER, Stage.DETOKENISE, Stage.CLIENT),
)


class StageClock:
    """Adds time to the stage that owns the request. Contiguous by construction: no gap, no overlap."""

    __slots__ = ("_since_s", "_stage", "seconds")

    def __init__(self, stage: Stage, now_s: float) -> None:
        self._stage = stage
        self._since_s = now_s
        self.seconds: dict[Stage, float] = defaultdict(float)

    def enter(self, stage: Stage, now_s: float) -> None:
        """The present stage ends and `stage` begins at `now_s`; a clock that went back counts as still."""
        spent_s = now_s - self._since_s
        if spent_s > 0.0:
            self._since_s = now_s
        else:
            spent_s = 0.0
        self.seconds[self._stage] += spent_s
        self._stage = stage

    def close(self, now_s: float) -> dict[Stage, float]:
        self.enter(self._stage, now_s)
        return dict(self.seconds)
