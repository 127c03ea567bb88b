"""Courtesy to clients on this machine: whom an answer wakes may have been given the gateway's own core, and would wait
there until the gateway sleeps, however idle the other cores are.
"""

import os
from time import monotonic

# Who gets its core back so late has met others there than a client that reads: not again for a while, so that no more than
# a fiftieth of its time is lost this way, however busy the machine.
_LATE_S = 0.5e-3
_TIMES_AS_LONG = 50.0
_LONGEST_PAUSE_S = 1.0


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
        away_s = back_s - began_s
        if away_s > _LATE_S:
            self._not_before_s = back_s + min(_TIMES_AS_LONG * away_s, _LONGEST_PAUSE_S)
