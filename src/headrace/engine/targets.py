"""The TTFT targets an engine serves: of what is live, and of what was until lately.

A newcomer waits for the step in flight, so a step must be short for whoever is likely to come, not only
for who is here. Targets are rounded down to steps of a fifth, so that there are few of them.
"""

import math

# How long a target counts after its last sequence ended.
_REMEMBERED_S = 60.0
_STEPS_PER_OCTAVE = 4
# Above every key, so that `min` has something to compare with.
_MOST = 4000


class ServedTargets:
    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self._left_at_s: dict[int, float] = {}
        # The answer holds until another target comes, or a remembered one is forgotten.
        self._shortest_s = math.inf
        self._holds_until_s = -math.inf

    def enter(self, target_s: float) -> int:
        """Returns what to `leave` by."""
        key = math.floor(math.log2(target_s) * _STEPS_PER_OCTAVE)
        count = self._live.get(key, 0)
        self._live[key] = count + 1
        if not count and key not in self._left_at_s:
            self._holds_until_s = -math.inf
        return key

    def leave(self, key: int, now_s: float) -> None:
        """The target counts on for a while."""
        self._live[key] -= 1
        if not self._live[key]:
            del self._live[key]
            self._left_at_s[key] = now_s
            self._holds_until_s = min(self._holds_until_s, now_s + _REMEMBERED_S)

    def shortest_s(self, now_s: float) -> float:
        """The least target that counts; infinite when none does."""
        if now_s > self._holds_until_s:
            self._shortest_s = self._find_shortest_s(now_s)
            self._holds_until_s = min(self._left_at_s.values(), default=math.inf) + _REMEMBERED_S
        return self._shortest_s

    def _find_shortest_s(self, now_s: float) -> float:
        for key in [key for key, left_s in self._left_at_s.items() if now_s - left_s > _REMEMBERED_S]:
            del self._left_at_s[key]
        if not self._live and not self._left_at_s:
            return math.inf
        return math.exp2(min(*self._live, *self._left_at_s, _MOST) / _STEPS_PER_OCTAVE)
