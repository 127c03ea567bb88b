"""A stream as it is told to one reader, whatever the face. Owns the cursor, how far that reader may be behind and for how
long, and that it is told how it ends if telling it fails.

When bytes are written, and how they are worded, is the matter of `sender` and `feed`. What becomes of the stream when
readers leave, or when all of them wait, is the audience's.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace.core.stages import Stage, StageClock
from headrace.gateway.context import Context
from headrace.gateway.errors import StreamFailed, failure_of
from headrace.gateway.peer import Peer
from headrace.streams.audience import Audience
from headrace.streams.record import Failure, Record
from headrace.streams.stream import Stream

T = TypeVar("T")
# Scores, each with its alternatives, that are worded within a millisecond or two; more are in a thread.
LARGE_FRAME = 1000
UNREAD = Failure("client_too_slow", "The client did not read its stream in time.", 408)


class Telling:
    """`is_opening`: the stream is this request's, and ends if it cannot be worded; others read from the frame behind
    `after`. `is_scored`: with log-probabilities, so that frames may be large. InvalidInput where `after` was not said
    yet."""

    __slots__ = (
        "_audience", "_behind_s", "_context", "_failure", "_is_opening", "_is_scored", "_peer", "_reader", "_stages",
        "_stream", "first_s", "last_s",
    )  # fmt: skip

    def __init__(
        self,
        audience: Audience,
        stages: StageClock,
        context: Context,
        peer: Peer,
        *,
        after: int,
        is_opening: bool,
        is_scored: bool,
    ) -> None:
        self._audience = audience
        self._stream = audience.stream
        self._stages = stages
        self._context = context
        self._peer = peer
        self._is_opening = is_opening
        self._is_scored = is_scored
        self._reader = audience.enter(after)
        # That it is broken off with.
        self._failure: Failure | None = None
        # Since when more is unread than the bound.
        self._behind_s: float | None = None
        # When the first and the last of what the model said was given to the connection.
        self.first_s: float | None = None
        self.last_s: float | None = None

    @property
    def stream(self) -> Stream:
        return self._stream

    async def run(self) -> None:
        """Until the end was told, or nobody is there to hear it."""
        self._context.pulse.add(self)
        try:
            await self._pump()
        except StreamFailed:
            raise
        except Exception as error:
            if self._is_opening:
                self._audience.cancel("internal_error")
            if self._has_begun:
                await self._end_with(failure_of(error))
            raise
        finally:
            self._context.pulse.discard(self)
            self.close()

    def close(self) -> None:
        """It reads no more."""
        gone_s = self._peer.gone_s
        self._audience.leave(self._reader, self._context.clock.now_s() if gone_s is None else gone_s)

    @property
    def _has_begun(self) -> bool:
        """Else what fails is answered otherwise."""
        return True

    def tick(self, now_s: float) -> None:
        """The bounds on what was not taken; called while `run` waits or writes."""
        raise NotImplementedError

    def fail(self, failure: Failure) -> None:
        """The stream ends for everybody, and here with this."""
        raise NotImplementedError

    async def _pump(self) -> None:
        raise NotImplementedError

    async def _end_with(self, failure: Failure) -> None:
        """The end for a reader that is broken off here. What it was not told is left out: the end has the number of the
        last record that it was told, and whoever resumes behind that misses nothing."""
        raise NotImplementedError

    async def _word(self, make: Callable[[list[Record]], T], records: list[Record]) -> T:
        """What is large beside the loop. What cannot be worded was not told."""
        try:
            if self._is_scored and _num_scores(records) > LARGE_FRAME:
                return await self._context.beside(make, records)
            return make(records)
        except Exception:
            self._reader.cursor -= len(records)
            raise

    def _enter_client(self) -> None:
        """From here on the request waits for its client; while others read on, it does not yet."""
        if self._stream.is_ended:
            self._stages.enter(Stage.CLIENT, self._context.clock.now_s())

    def _is_behind_too_long(self, now_s: float) -> bool:
        """It takes less than is said. A stream that has ended waits for its readers as long as they take anything."""
        config = self._context.config
        unread_bytes = 0 if self._stream.is_ended else self._reader.unread_bytes
        if unread_bytes <= config.max_unread_bytes // 2:
            self._behind_s = None
        elif self._behind_s is None:
            self._behind_s = now_s if unread_bytes > config.max_unread_bytes else None
        else:
            return now_s - self._behind_s > config.max_unread_s
        return False


def _num_scores(records: Sequence[Record]) -> int:
    return sum(
        [
            len(part.scores) * (1 + len(part.scores[-1].top))
            for record in records
            for part in record.parts
            if part.scores
        ]
    )
