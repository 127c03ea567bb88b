"""One stream to one reader that moves a window. Owns when its frames are said, and how long this reader may keep it
waiting: by its window, or by not reading. How a frame is worded is its face's matter (`Wording`).

Every record that says something is a frame of its own, whenever it is read: what a client hears does not depend on
time.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.core.errors import InvalidInput
from headrace.core.stages import Stage, StageClock
from headrace.gateway.context import Context
from headrace.gateway.pace import HELD_S, Pace
from headrace.gateway.peer import Peer
from headrace.gateway.telling import UNREAD, Telling
from headrace.gateway.window import Window
from headrace.streams.audience import Audience
from headrace.streams.record import Failure, Record

MAX_FRAMES_PER_WRITE = 64
CANCELLED = Failure("cancelled", "The stream was cancelled.", 499)


class Line(Protocol):
    """The connection, as one of its streams sees it."""

    @property
    def is_open(self) -> bool: ...

    @property
    def is_writable(self) -> bool: ...

    def say(self, *messages: bytes) -> None: ...


class Wording(Protocol):
    """A stream in the words of a face. Pure: the same records give the same bytes, whoever reads them and when."""

    def frames(self, records: Sequence[Record]) -> list[tuple[int, bytes]]:
        """Each record that says something, with its number. The ending is not among them."""

    def end(self, record: Record, failure: Failure | None = None) -> bytes:
        """Of the ending, or of a reader that is broken off by `failure` behind this record."""


class Feed(Telling):
    __slots__ = ("_line", "_pace", "_window", "_wording")

    def __init__(
        self,
        audience: Audience,
        stages: StageClock,
        context: Context,
        peer: Peer,
        line: Line,
        wording: Wording,
        *,
        window: int | None,
        after: int = 0,
        is_opening: bool = False,
        is_scored: bool = True,
    ) -> None:
        super().__init__(audience, stages, context, peer, after=after, is_opening=is_opening, is_scored=is_scored)
        self._line = line
        self._window = Window(window, after)
        self._wording = wording
        self._pace = Pace()

    def ack(self, number: int) -> None:
        """InvalidInput where that frame was not said yet."""
        if not self._window.ack(number):
            raise InvalidInput(f"frame {number} was not sent yet", param="seq")
        self._peer.wake()

    def resize(self, size: int | None) -> None:
        self._window.size = size
        self._peer.wake()

    def wake(self) -> None:
        """The connection takes more."""
        self._peer.wake()

    def cancel(self) -> None:
        """The client wants no more of it, and nobody else gets more of it."""
        self._audience.cancel(CANCELLED.code)
        self._fail(CANCELLED)

    def fail(self, failure: Failure) -> None:
        """The stream ends for everybody, and here with this, unless it has ended well and the rest is being said."""
        ending = self._stream.ending
        if ending is None or ending.failure is not None or not self._room():
            self._audience.cancel(failure.code)
            self._fail(failure)

    def tick(self, now_s: float) -> None:
        if self._failure is None and (self._is_stuck_too_long(now_s) or self._is_behind_too_long(now_s)):
            self._fail(UNREAD)
            self._audience.expel(self._reader, UNREAD.code, now_s)

    async def _pump(self) -> None:
        reader, peer, stream = self._reader, self._peer, self._stream
        if self._reader.is_done:
            return self._line.say(self._wording.end(stream.records[-1]))
        while peer.gone_s is None:
            if self._failure is not None:
                return await self._end_with(self._failure)
            room = self._room()
            records = reader.take(room) if room else []
            if records:
                await self._say(records)
                if reader.is_done:
                    return
            else:
                await peer.wait(stream, ending=not room)

    def _room(self) -> int:
        """Records that may be said now. The ending is no frame, and needs no room in the window."""
        if not self._line.is_writable:
            return 0
        stream = self._stream
        if stream.is_ended and self._reader.cursor == len(stream.records) - 1:
            return 1
        return self._window.room(MAX_FRAMES_PER_WRITE)

    async def _say(self, records: list[Record]) -> None:
        frames = await self._word(self._wording.frames, records)
        messages = []
        for number, frame in frames:
            self._window.send(number)
            messages.append(frame)
        if records[-1].ending is not None:
            self._enter_client()
            if self._context.inject:
                await self._context.delay(Stage.CLIENT)
            messages.append(self._wording.end(records[-1]))
        self._line.say(*messages)
        if frames:
            self.last_s = self._context.clock.now_s()
            self.first_s = self.first_s or self.last_s

    async def _end_with(self, failure: Failure) -> None:
        self._enter_client()
        self._line.say(self._wording.end(Record(self._reader.cursor, ending=self._stream.ending), failure))

    def _fail(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._peer.wake()

    def _is_stuck_too_long(self, now_s: float) -> bool:
        """It waits, with something to say, and nothing was taken since. Before that it is held, and so is a reader with a
        window that takes too little: a window keeps what is generated ahead of it small."""
        pace, reader, num_said = self._pace, self._reader, len(self._stream.records)
        pace.look(now_s, reader.cursor, num_said)
        stuck_s = pace.stuck_s(now_s)
        if self._window.size is not None:
            reader.is_held = pace.is_held
        else:
            reader.is_held = reader.cursor < num_said and (reader.is_held or stuck_s >= HELD_S)
        return stuck_s > self._context.config.max_unread_s
