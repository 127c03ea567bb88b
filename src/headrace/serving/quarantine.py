"""Prompts that workers died of, by tenant, for a while. Owns that memory; who is to blame is decided elsewhere.

A client that tries again what has just killed two workers would kill two more.
"""

from collections import OrderedDict
from hashlib import sha256

import numpy as np

from headrace.core.errors import WorkerKilled
from headrace.serving.life import Life

REMEMBERED_S = 600.0
MOST_KILLS = 2
_MOST_PROMPTS = 10_000

_Name = tuple[str, str, bytes]


class Quarantine:
    def __init__(self, *, remembered_s: float = REMEMBERED_S, most_prompts: int = _MOST_PROMPTS) -> None:
        self._remembered_s = remembered_s
        self._most_prompts = most_prompts
        # Kills, and until when they are remembered; the oldest first.
        self._kills: OrderedDict[_Name, tuple[int, float]] = OrderedDict()

    def kills_of(self, life: Life, now_s: float) -> int:
        """How many workers its prompts were seen to kill lately; WorkerKilled when that is enough."""
        if not self._kills:
            return 0
        self._expire(now_s)
        kills, _ = self._kills.get(_name(life), (0, 0.0))
        if kills >= MOST_KILLS:
            raise WorkerKilled(
                f"workers died of this prompt, one after the other: it is refused for {self._remembered_s / 60:g} minutes"
            )
        return kills

    def remember(self, life: Life, kills: int, now_s: float) -> None:
        name = _name(life)
        self._kills.pop(name, None)
        self._kills[name] = (kills, now_s + self._remembered_s)
        if len(self._kills) > self._most_prompts:
            self._kills.popitem(last=False)

    def _expire(self, now_s: float) -> None:
        while self._kills:
            name, (_, until_s) = next(iter(self._kills.items()))
            if until_s > now_s:
                return
            del self._kills[name]


def _name(life: Life) -> _Name:
    digest = sha256()
    for prepared in life.asks:
        digest.update(len(prepared.prompt_ids).to_bytes(8, "little"))
        digest.update(np.array(prepared.prompt_ids, "<i4").tobytes())
    return life.caller.tenant, life.model.name, digest.digest()
