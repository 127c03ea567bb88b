"""Courtesy to clients on this machine: whom an answer wakes may have been given the gateway's own core, and would wait
there until the gateway sleeps, however idle the other cores are.
"""

import os
from time import monotonic

# Who gets its core back so late is on a busy machine, where others than clients take it: not again for a while.
_LATE_S = 0.5e-3
_PAUSE_S = 1.0


class Courtesy:
    __slots__ = ("_not_before_s",)

    def __init__(self) -> None:
        self._not_before_s = 0.0

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
            self._not_before_s = back_s + _PAUSE_S
