"""Sequences whose gateway is gone: who they are, whose they were, until when they are kept, and who may have them.

Owned by the engine's thread. An orphan runs on or has ended, and waits to be attached. Aborts nothing itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.hashing import sequence_digest
from headrace.core.messages import AttachPart
from headrace.core.request import Request
from headrace.worker.keys import NO_NUMBER, Entry

ORPHAN_S = 30.0
NOT_ATTACHABLE = "not_attachable"


@dataclass(slots=True)
class _Wait:
    gateway: str
    until_s: float


class Orphans:
    def __init__(self, patience_s: float = ORPHAN_S) -> None:
        self._patience_s = patience_s
        # All are kept equally long: the first is the first to expire.
        self._waits: dict[Entry, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._waits

    @property
    def next_expiry_s(self) -> float:
        return next(iter(self._waits.values())).until_s if self._waits else math.inf

    def add(self, entry: Entry, gateway: str, now_s: float) -> None:
        self._waits[entry] = _Wait(gateway, now_s + self._patience_s)

    def remove(self, entry: Entry) -> None:
        """Ignored where it is none."""
        self._waits.pop(entry, None)

    def of(self, gateway: str) -> list[Entry]:
        return [entry for entry, wait in self._waits.items() if wait.gateway == gateway]

    def expired(self, now_s: float) -> list[Entry]:
        """Those whose time is over; they are orphans until they are removed."""
        over = []
        for entry, wait in self._waits.items():
            if wait.until_s > now_s:
                break
            over.append(entry)
        return over


def why_not_attach(entry: Entry, part: AttachPart) -> str:
    """Empty where every token from `part.index` on can be told, those that are known and those to come."""
    request = entry.request
    ids: Sequence[int] = request.replay_ids if entry.number == NO_NUMBER else entry.ids
    if not 0 <= part.index <= len(ids):
        return f"the sequence has {len(ids)} tokens, none from {part.index} on"
    if part.digest and part.digest != _digest(request, ids[: part.index]):
        return "another sequence has this name"
    if entry.number == NO_NUMBER:
        # Its replayed ids are not checked yet, so none of them is told.
        return "" if part.index == len(ids) else "the sequence is still being taken in"
    return "the log-probabilities of its tokens are not kept" if is_score_lost(entry, part.index) else ""


def _digest(request: Request, ids: Sequence[int]) -> bytes:
    return sequence_digest(request.prompt_ids, request.sampling.seed, request.choice, ids)


def is_score_lost(entry: Entry, index: int) -> bool:
    """Log-probabilities are told once. Those of the prompt come before the first token: who has that one has them."""
    sampling = entry.request.sampling
    if sampling.prompt_logprobs is not None and index == 0:
        return True
    return sampling.logprobs is not None and index < len(entry.ids)
