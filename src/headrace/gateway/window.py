"""How many frames a client takes before it has acknowledged some. Owns the count; knows no stream and no clock."""

from collections import deque


class Window:
    """`size` None is no limit. Frames are counted, not their numbers, which have gaps where a record says nothing."""

    __slots__ = ("_in_flight", "_sent", "size")

    def __init__(self, size: int | None, after: int = 0) -> None:
        self.size = size
        # Numbers of frames that were sent and not acknowledged: the client may set a limit later.
        self._in_flight: deque[int] = deque()
        self._sent = after

    @property
    def sent(self) -> int:
        """The number of the last frame that was sent."""
        return self._sent

    def room(self, most: int) -> int:
        """How many frames may follow now, at most `most`."""
        return most if self.size is None else max(0, min(most, self.size - len(self._in_flight)))

    def send(self, number: int) -> None:
        self._sent = number
        self._in_flight.append(number)

    def ack(self, number: int) -> bool:
        """All up to and with this one are taken. False: it was not sent yet."""
        if number > self._sent:
            return False
        in_flight = self._in_flight
        while in_flight and in_flight[0] <= number:
            in_flight.popleft()
        return True
