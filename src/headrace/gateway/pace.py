"""Whether a stream outruns one reader of it: how much was said lately, and how much of it was taken. Owns the counts; knows
no stream, no connection and no clock.
"""

# How long a reader is looked at before it may count as held: its sequences pause for it, and that gives up the slot.
HELD_S = 1.0
# It is held if, at its pace, it needs more than so many such whiles for what lies unread, and let go when it needs no more
# than so little of one: what follows is there before it has to wait for it.
MOST_BEHIND = 2.0
NEARLY_THERE = 0.5


class Pace:
    """`look` is to be called a few times a second. Who is held is until it has caught up, or nearly."""

    __slots__ = ("_moved_s", "_said", "_since_s", "_taken", "_taken_last", "is_held")

    def __init__(self) -> None:
        self.is_held = False
        # When something was taken last, or came to be taken; None: all is taken.
        self._moved_s: float | None = None
        self._taken_last = 0
        # When the present while began, and where both were by then.
        self._since_s = 0.0
        self._said = self._taken = 0

    def look(self, now_s: float, taken: int, said: int) -> None:
        """So many were said up to now, and so many of them were taken."""
        if taken == said:
            self._moved_s = None
            self.is_held = False
            return
        is_first = self._moved_s is None
        if is_first or taken != self._taken_last:
            self._moved_s, self._taken_last = now_s, taken
        if is_first:
            self._begin(now_s, taken, said)
        elif now_s - self._since_s >= HELD_S:
            self._judge(taken - self._taken, said - self._said, said - taken)
            self._begin(now_s, taken, said)

    def stuck_s(self, now_s: float) -> float:
        """How long nothing was taken."""
        return 0.0 if self._moved_s is None else now_s - self._moved_s

    def _begin(self, now_s: float, taken: int, said: int) -> None:
        self._since_s, self._taken, self._said = now_s, taken, said

    def _judge(self, num_taken: int, num_said: int, num_unread: int) -> None:
        if self.is_held:
            self.is_held = num_unread > NEARLY_THERE * num_taken
        else:
            # Who comes late and catches up is not held, however much there is.
            is_outrun = num_taken < num_said or not num_taken
            self.is_held = is_outrun and num_unread > MOST_BEHIND * num_taken
