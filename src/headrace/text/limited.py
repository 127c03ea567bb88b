"""The pool of limited processes: where chat templates run and grammars are tried, killable and bounded.

Owns the line of waiting jobs and the processes that take them. Knows no kind of job. What a job does can cost
its own process, never another job: a process has one job at a time and is replaced when it ends.
"""

import asyncio
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

import msgspec

from headrace.core.errors import HeadraceError, InvalidInput, InvalidModel, QueueFull, Refused, TimedOut
from headrace.text.limited_process import LimitedProcess, Limits
from headrace.text.limited_wire import Answer, Job

T = TypeVar("T")

_ERRORS: dict[str, type[HeadraceError]] = {error.code: error for error in (InvalidInput, InvalidModel)}


class LimitedPool:
    """Jobs are answered in the order they came, by as many processes as `limits` says.

    `subject` names the job in errors ("the JSON schema ..."). InvalidInput: the job failed, or overran its time,
    memory or size. QueueFull: too many wait. TimedOut: it waited too long, or the machine was too busy to tell.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        # A child is tied to the *thread* that started it, so only these threads, which last, start any.
        self._threads = ThreadPoolExecutor(self._limits.processes, thread_name_prefix="limited")
        self._processes = [LimitedProcess(self._limits) for _ in range(self._limits.processes)]
        self._idle: queue.SimpleQueue[LimitedProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._count = threading.Lock()
        self._num_jobs = 0
        self._closed = False

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def start(self) -> None:
        """Start the processes now instead of at the first jobs."""
        for _ in self._processes:
            self._threads.submit(self._start_one)

    async def call(
        self,
        kind: str,
        payload: object,
        answer: type[T],
        *,
        subject: str,
        param: str | None = None,
        limit_s: float | None = None,
    ) -> T:
        return await asyncio.wrap_future(self._submit(kind, payload, answer, subject, param, limit_s))

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
        self._closed = True
        for process in self._processes:
            process.kill()
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
        job = Job(kind, self._encode(payload, subject, param), limit_s)
        with self._count:
            waiting = self._num_jobs - self._limits.processes
            if self._closed:
                raise Refused("the limited processes are shutting down", retry_after_s=1.0)
            if waiting >= self._limits.max_waiting:
                raise QueueFull(
                    f"{waiting} jobs wait for {self._limits.processes} limited processes already",
                    retry_after_s=max(1.0, waiting * limit_s / self._limits.processes / 10),
                )
            self._num_jobs += 1
        future = self._threads.submit(self._run, job, answer, subject, param, time.monotonic())
        future.add_done_callback(self._forget)
        return future

    def _encode(self, payload: object, subject: str, param: str | None) -> msgspec.Raw:
        try:
            encoded = msgspec.msgpack.encode(payload)
        except (UnicodeEncodeError, RecursionError, OverflowError):
            raise InvalidInput(
                f"{subject} holds text that is not Unicode, a number beyond 64 bits, or nests too deeply", param=param
            ) from None
        # The frame around the payload is small, but it counts.
        if len(encoded) + 256 > self._limits.max_job_bytes:
            raise InvalidInput(f"{subject} is larger than {self._limits.max_job_bytes} bytes", param=param)
        return msgspec.Raw(encoded)

    def _forget(self, _: Future[T]) -> None:
        with self._count:
            self._num_jobs -= 1

    def _start_one(self) -> None:
        process = self._idle.get()
        try:
            process.start()
        finally:
            self._idle.put(process)

    def _run(self, job: Job, answer: type[T], subject: str, param: str | None, since_s: float) -> T:
        if time.monotonic() - since_s > self._limits.max_wait_s:
            raise TimedOut(f"{subject} waited longer than {self._limits.max_wait_s:g} s for a limited process")
        process = self._idle.get()
        try:
            found = process.run(job, subject, job.cpu_s)
        except InvalidInput as error:
            raise InvalidInput(error.message, param=param) from None
        finally:
            self._idle.put(process)
        return _read(found, answer, subject, param)


def _read(found: Answer, answer: type[T], subject: str, param: str | None) -> T:
    if found.error:
        message = f"{subject} {found.message}" if found.spent else found.message
        raise _ERRORS.get(found.error, HeadraceError)(message, param=found.param or param)
    return msgspec.msgpack.decode(found.value, type=answer)
