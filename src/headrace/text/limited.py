"""The pool of limited processes: where chat templates run and grammars are tried, killable and bounded.

Owns the line of waiting jobs and the processes that take them. Knows no kind of job. What a job does can cost
its own process, never another job: a process has one job at a time and is replaced when it ends.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self, TypeVar

import msgspec

from headrace.core.errors import HeadraceError, InvalidInput, QueueFull, TimedOut
from headrace.text.limited_listener import INLINE_BYTES, Listener
from headrace.text.limited_process import LimitedProcess, Limits, Talk, closing
from headrace.text.limited_ticket import BatchTicket, LoopTicket, ThreadTicket, Ticket
from headrace.text.limited_wire import Answer, Job

T = TypeVar("T")

# What goes to a process at once. It takes no longer than a process takes to be woken.
_BATCH_JOBS = 8
_BATCH_BYTES = 32 << 10


class LimitedPool:
    """Jobs are answered in the order they came, by as many processes as `limits` says.

    `subject` names the job in errors ("the JSON schema ..."). InvalidInput: the job failed, or overran its time,
    memory or size. QueueFull: too many wait. TimedOut: it waited too long, or the machine was too busy to tell.

    A small job of an event loop is handed over by the loop itself; every other, and whatever goes wrong, is a thread's.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        # A child is tied to the *thread* that started it, so only these threads, which last, start any.
        self._threads = ThreadPoolExecutor(self._limits.processes, thread_name_prefix="limited")
        self._processes = [LimitedProcess(self._limits) for _ in range(self._limits.processes)]
        # Held for the three below: jobs come from, and processes come back in, any thread.
        self._lock = threading.Lock()
        self._idle = list(self._processes)
        self._waiting: deque[Ticket[Any]] = deque()
        self._num_jobs = 0
        self._listeners: dict[LimitedProcess, Listener] = {}
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def start(self) -> None:
        """Start the processes now instead of at the first jobs."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            self._threads.submit(self._start_one, process)

    async def call(
        self,
        kind: str,
        payload: object,
        answer: type[T],
        *,
        subject: str,
        param: str | None = None,
        limit_s: float | None = None,
        is_quick: bool = False,
    ) -> T:
        """`is_quick`: it takes less time than to wake a process, as a rule, so that it may go there with others."""
        limit_s = limit_s or self._limits.job_s
        job = self._job(kind, payload, subject, param, limit_s)
        ticket: LoopTicket[T] = LoopTicket(job, self._decoder(answer), subject, param, limit_s)
        ticket.is_alone = not is_quick
        self._line_up(ticket, ticket.loop)
        try:
            return await ticket.future
        finally:
            if not ticket.is_over:
                self._leave(ticket)
            del ticket  # it holds an error whose traceback holds this frame

    def call_sync(
        self,
        kind: str,
        payload: object,
        answer: type[T],
        *,
        subject: str,
        param: str | None = None,
        limit_s: float | None = None,
    ) -> T:
        """`call` for who has no event loop; blocks the calling thread."""
        return self._submit(kind, payload, answer, subject, param, limit_s).result()

    def close(self) -> None:
        """End every process. Jobs that run or wait end with Refused; none is left unanswered."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for ticket in waiting:
            self._settle(ticket, error=closing())
        for process in self._processes:
            process.kill()
        for listener in list(self._listeners.values()):
            _call_in(listener.loop, listener.give_up)
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(
        self, kind: str, payload: object, answer: type[T], subject: str, param: str | None, limit_s: float | None
    ) -> Future[T]:
        limit_s = limit_s or self._limits.job_s
        job = self._job(kind, payload, subject, param, limit_s)
        ticket: ThreadTicket[T] = ThreadTicket(job, self._decoder(answer), subject, param, limit_s)
        self._line_up(ticket, None)
        return ticket.future

    def _job(self, kind: str, payload: object, subject: str, param: str | None, limit_s: float) -> Job:
        try:
            encoded = self._encoder.encode(payload)
        except (UnicodeEncodeError, RecursionError, OverflowError):
            raise InvalidInput(
                f"{subject} holds text that is not Unicode, a number beyond 64 bits, or nests too deeply", param=param
            ) from None
        # The frame around the payload is small, but it counts.
        if len(encoded) + 256 > self._limits.max_job_bytes:
            raise InvalidInput(f"{subject} is larger than {self._limits.max_job_bytes} bytes", param=param)
        return Job(kind, msgspec.Raw(encoded), limit_s)

    def _decoder(self, answer: type[T]) -> "msgspec.msgpack.Decoder[T]":
        found = self._decoders.get(answer)
        if found is None:
            found = self._decoders[answer] = msgspec.msgpack.Decoder(answer)
        return found

    def _line_up(self, ticket: Ticket[Any], loop: asyncio.AbstractEventLoop | None) -> None:
        with self._lock:
            waiting = self._num_jobs - self._limits.processes
            if self._closed:
                raise closing()
            if waiting >= self._limits.max_waiting:
                raise QueueFull(
                    f"{waiting} jobs wait for {self._limits.processes} limited processes already",
                    retry_after_s=max(1.0, waiting * ticket.limit_s / self._limits.processes / 10),
                )
            self._num_jobs += 1
            if not self._idle:
                self._waiting.append(ticket)
                return
            # The one used last: its memory is warm, and the loop watches it.
            process = self._idle.pop()
        self._begin(process, ticket, loop)

    def _begin(self, process: LimitedProcess, ticket: Ticket[Any], loop: asyncio.AbstractEventLoop | None) -> None:
        """A process that is the caller's, which runs in `loop`, if any, does the job."""
        if ticket.loop is None or ticket.loop is not loop or len(ticket.frame) > INLINE_BYTES or not process.is_ready:
            return self._in_thread(process, ticket)
        listener = self._listeners.get(process)
        if listener is None or listener.loop is not loop:
            if listener is not None:
                _call_in(listener.loop, listener.detach)
            listener = Listener(process, loop, self._on_answer, self._on_trouble, self._on_end)
            self._listeners[process] = listener
        listener.post(ticket)

    def _free(self, process: LimitedProcess, loop: asyncio.AbstractEventLoop | None) -> None:
        """The process is for who has waited longest, or idle. Whoever waited too long is told so."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._idle.append(process)
                    return
                ticket = self._waiting.popleft()
            if time.monotonic() - ticket.since_s <= self._limits.max_wait_s:
                return self._begin(process, self._batch(ticket, loop), loop)
            wait_s = self._limits.max_wait_s
            late = TimedOut(f"{ticket.subject} waited longer than {wait_s:g} s for a limited process")
            self._settle(ticket, error=late)

    def _batch(self, first: Ticket[Any], loop: asyncio.AbstractEventLoop | None) -> Ticket[Any]:
        """With those behind it that can go along. Each counts as before, and the batch as one more."""
        if loop is None or first.loop is not loop or first.is_alone:
            return first
        members = [first]
        with self._lock:
            size = len(first.frame)
            while self._waiting and len(members) < _BATCH_JOBS:
                ticket = self._waiting[0]
                size += len(ticket.frame)
                if ticket.loop is not loop or ticket.is_alone or ticket.limit_s != first.limit_s or size > _BATCH_BYTES:
                    break
                members.append(self._waiting.popleft())
            if len(members) == 1:
                return first
            self._num_jobs += 1
        return BatchTicket(members, self._answer, self._again)

    def _again(self, tickets: Sequence[Ticket[Any]]) -> None:
        """What went wrong with a batch may have been any of its jobs: each goes alone, before those that wait."""
        for ticket in reversed(tickets):
            ticket.is_alone = True
            with self._lock:
                is_closed = self._closed
                if not is_closed:
                    self._waiting.appendleft(ticket)
            if is_closed:
                self._settle(ticket, error=closing())
        while True:
            with self._lock:
                if not self._idle or not self._waiting:
                    return
                process = self._idle.pop()
            self._free(process, None)

    def _settle(self, ticket: Ticket[T], value: T | None = None, *, error: BaseException | None = None) -> None:
        with self._lock:
            if ticket.is_over:
                return
            ticket.is_over = True
            self._num_jobs -= 1
        if error is None:
            ticket.tell(value)  # type: ignore[arg-type]
        else:
            ticket.fail(error)

    def _leave(self, ticket: Ticket[Any]) -> None:
        """Nobody waits for it any more. What has begun is concluded: its process may not be lost with the loop."""
        with self._lock:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                self._num_jobs -= 1
                ticket.is_over = True
                return
        for listener in list(self._listeners.values()):
            running = listener.ticket
            if running is not None and running.is_given_up and running.loop is ticket.loop:
                listener.give_up()

    def _on_answer(self, listener: Listener, ticket: Ticket[Any], answer: Answer) -> None:
        self._free(listener.process, listener.loop)
        self._answer(ticket, answer)

    def _answer(self, ticket: Ticket[Any], answer: Answer) -> None:
        try:
            value = ticket.read(answer)
        except (HeadraceError, msgspec.MsgspecError) as error:
            self._settle(ticket, error=error.with_traceback(None))  # which holds the ticket, which holds the error
        else:
            self._settle(ticket, value)

    def _on_trouble(self, listener: Listener, ticket: Ticket[Any], talk: Talk) -> None:
        self._in_thread(listener.process, ticket, talk)

    def _on_end(self, process: LimitedProcess) -> None:
        with self._lock:
            if process in self._idle:
                process.distrust()

    def _in_thread(self, process: LimitedProcess, ticket: Ticket[Any], talk: Talk | None = None) -> None:
        try:
            self._threads.submit(self._run, process, ticket, talk)
        except RuntimeError:  # closed meanwhile
            self._free(process, None)
            self._settle(ticket, error=closing())

    def _start_one(self, process: LimitedProcess) -> None:
        with suppress(HeadraceError):  # the first job tries again, and is told
            process.get_ready()
        self._free(process, None)

    def _run(self, process: LimitedProcess, ticket: Ticket[Any], talk: Talk | None) -> None:
        """In a thread: a whole job, or what is left of one."""
        value: Any = None
        failed: BaseException | None = None
        try:
            found = (
                process.run(ticket.frame, ticket.subject, ticket.limit_s) if talk is None else process.conclude(talk)
            )
            value = ticket.read(found)
        except InvalidInput as error:
            failed = type(error)(error.message, param=error.param or ticket.param)
        except Exception as error:  # noqa: BLE001 - the top of a thread: ends exactly one job
            failed = error
        self._free(process, None)
        self._settle(ticket, value, error=failed)


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Where the loop runs, when it can; here and now where it does not run any more."""
    if loop.is_closed() or not loop.is_running() or asyncio._get_running_loop() is loop:
        return call()
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
