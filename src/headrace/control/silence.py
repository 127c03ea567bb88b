"""How long a child may say nothing. Owns the count; does not know what is said, nor what follows.

Seconds are counted one by one, so that a time in which this process itself stood still is no silence of its children.
"""

import asyncio

# No step and no load holds up a report for this long.
SILENCE_S = 30
# To be started, and to import what it needs, on a machine that is busy.
FIRST_SIGN_S = 120
_LOOK_S = 1.0


class Silence:
    """`limit_s` is the one that was broken when `last` returns."""

    __slots__ = ("_num_looks", "limit_s")

    def __init__(self) -> None:
        self.limit_s = FIRST_SIGN_S
        self._num_looks = 0

    def heard(self) -> None:
        self.limit_s, self._num_looks = SILENCE_S, 0

    async def last(self) -> None:
        """Returns when it has lasted too long."""
        while self._num_looks * _LOOK_S < self.limit_s:
            await asyncio.sleep(_LOOK_S)
            self._num_looks += 1
