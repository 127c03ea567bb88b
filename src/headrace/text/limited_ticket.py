"""A job that somebody waits for: what is sent for it, how its answer is read, and who is told.

Two kinds: who waits blocks a thread, or has an event loop. Knows no process and no line.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from headrace.core.errors import ContextLengthExceeded, HeadraceError, InvalidInput, InvalidModel
from headrace.text.limited_wire import BATCH, Answer, Job, frame_of

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(list[Answer])
_ERRORS: dict[str, type[HeadraceError]] = {
    error.code: error for error in (InvalidInput, ContextLengthExceeded, InvalidModel)
}


class Ticket(Generic[T]):
    """`subject` names the job in errors, `param` the field that is to blame. `loop` is where the answer is awaited, None
    where a thread waits. `is_over`: whoever waits was told. `is_alone`: it is sent with no other."""

    __slots__ = ("decoder", "frame", "is_alone", "is_over", "job", "limit_s", "loop", "param", "since_s", "subject")

    def __init__(
        self, job: Job, decoder: "msgspec.msgpack.Decoder[T]", subject: str, param: str | None, limit_s: float
    ) -> None:
        self.job = job
        self.frame = frame_of(_encoder.encode(job))
        self.decoder = decoder
        self.subject = subject
        self.param = param
        self.limit_s = limit_s
        self.since_s = time.monotonic()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_over = False
        self.is_alone = True

    @property
    def is_given_up(self) -> bool:
        """Nobody waits for it any more."""
        return False

    def read(self, found: Answer) -> T:
        """Raises what the job was refused for."""
        if found.error:
            message = f"{self.subject} {found.message}" if found.spent else found.message
            raise _ERRORS.get(found.error, HeadraceError)(message, param=found.param or self.param)
        return self.decoder.decode(found.value)

    def tell(self, value: T) -> None:
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        raise NotImplementedError


class ThreadTicket(Ticket[T]):
    __slots__ = ("future",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.future: Future[T] = Future()

    def tell(self, value: T) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class LoopTicket(Ticket[T]):
    """Told from any thread."""

    __slots__ = ("future",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()

    @property
    def is_given_up(self) -> bool:
        return self.future.done()

    def tell(self, value: T) -> None:
        self._tell(value, None)

    def fail(self, error: BaseException) -> None:
        self._tell(None, error)

    def _tell(self, value: T | None, error: BaseException | None) -> None:
        assert self.loop is not None
        if asyncio._get_running_loop() is self.loop:
            self._set(value, error)
        else:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self.loop.call_soon_threadsafe(self._set, value, error)

    def _set(self, value: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


class BatchTicket(Ticket[list[Answer]]):
    """Small jobs of one loop that go to a process together: it is woken once for all of them. `answered` and `failed` are
    told what became of them; a batch that failed blames nobody."""

    __slots__ = ("_answered", "_failed", "members")

    def __init__(
        self,
        members: Sequence[Ticket[Any]],
        answered: Callable[[Ticket[Any], Answer], None],
        failed: Callable[[Sequence[Ticket[Any]]], None],
    ) -> None:
        limit_s = members[0].limit_s
        payload = msgspec.Raw(_encoder.encode([member.job for member in members]))
        super().__init__(Job(BATCH, payload, limit_s), _answers, "a batch", None, limit_s)
        self.loop = members[0].loop
        self.members = members
        self._answered = answered
        self._failed = failed

    @property
    def is_given_up(self) -> bool:
        return all(member.is_given_up for member in self.members)

    def tell(self, value: list[Answer]) -> None:
        if len(value) != len(self.members):
            return self._failed(self.members)
        for member, answer in zip(self.members, value, strict=True):
            self._answered(member, answer)

    def fail(self, error: BaseException) -> None:
        self._failed(self.members)
