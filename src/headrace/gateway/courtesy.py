"""Courtesy to clients on this machine: whom an answer wakes may have been given the gateway's own core, and would wait
there until the gateway sleeps, however idle the other cores are.
"""

import os
from time import monotonic

# Who gets its core back so late has met somebody else there than a client: not again for a while. Once may be chance; who meets
# them every time is on a busy machine, and stops asking.
_LATE_S = 0.5e-3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


class Courtesy:
    __slots__ = ("_not_before_s", "_pause_s")

    def __init__(self) -> None:
        self._not_before_s = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def step_aside(self, address: str) -> None:
        """Let a client at that address go first, for when nobody else waits for this process."""
        if not address.startswith("127.") and address != "::1":
            return
        began_s = monotonic()
        if began_s < self._not_before_s:
            return
        os.sched_yield()
        back_s = monotonic()
        if back_s - began_s > _LATE_S:
            self._not_before_s = back_s + self._pause_s
            self._pause_s = min(2.0 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            self._pause_s = _FIRST_PAUSE_S
