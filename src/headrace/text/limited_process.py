"""One limited child process, seen from its parent: start, one job at a time, kill, replace.

Owns the process and its socket. Knows neither what a job means nor who waits for it.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

import headrace
from headrace.core.errors import HeadraceError, InvalidInput, Refused, TimedOut
from headrace.text.limited_wire import Answer, Confinement, receive_frame

# A job killed at its time limit is to blame if it had the processor for this share of it; otherwise the machine was.
_BLAMED_SHARE = 0.1


class Limits(Struct, frozen=True):
    """Of a pool: how many processes, what each may use, how long and how large a job may be."""

    processes: int = 2
    memory_bytes: int = 512 << 20
    job_s: float = 2.0
    start_s: float = 20.0
    max_waiting: int = 256
    max_wait_s: float = 10.0
    max_job_bytes: int = 8 << 20
    max_answer_bytes: int = 32 << 20
    niceness: int = 5


@dataclass(slots=True)
class Talk:
    """A job with a child: what it was not told yet, what came of its answer, and since when how much was used."""

    subject: str
    limit_s: float
    until_s: float
    cpu_before_s: float
    unsent: bytes
    received: bytearray = field(default_factory=bytearray)


class LimitedProcess:
    """Started at its first job and again after every end. One job at a time, with one thread at a time; `kill` is
    called by any."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready = False
        self._closed = False
        self._life = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(Answer)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        """Start the child if none runs; it gets ready by itself."""
        with self._life:
            if self._closed:
                raise closing()
            if self._process is not None and self._process.poll() is None:
                return
            self._end()
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=_environment(),
                    start_new_session=True,
                )
            self._channel = ours

    @property
    def is_ready(self) -> bool:
        """A living child waits for a job."""
        return self._ready and self._process is not None and self._process.poll() is None

    def dup(self) -> int:
        """Another descriptor of the way to a child that is ready, which does not block and is the caller's to close."""
        assert self._channel is not None
        return os.dup(self._channel.fileno())

    def open(self, frame: bytes, subject: str, limit_s: float) -> Talk:
        """A job for a child that is ready; its time runs from now."""
        assert self._process is not None
        return Talk(subject, limit_s, time.monotonic() + limit_s, _cpu_s(self._process.pid), frame)

    def run(self, frame: bytes, subject: str, limit_s: float) -> Answer:
        """The child's answer to a job. Blocks."""
        self.get_ready()
        return self.conclude(self.open(frame, subject, limit_s))

    def conclude(self, talk: Talk) -> Answer:
        """What is left of a talk, and its end. A child that is late, dies or says too much is killed, and the next one
        started. Blocks."""
        process, channel = self._process, self._channel
        assert process is not None and channel is not None
        try:
            with suppress(OSError):  # what it means is found out by listening
                channel.settimeout(max(talk.until_s - time.monotonic(), 1e-6))
                channel.sendall(talk.unsent)
            frame = receive_frame(channel, self._limits.max_answer_bytes, talk.until_s, talk.received)
            answer = self._decoder.decode(frame) if frame is not None else None
        except TimeoutError:
            used_s = _cpu_s(process.pid) - talk.cpu_before_s
            self._replace()
            raise _late(talk.subject, talk.limit_s, used_s) from None
        except (ValueError, msgspec.DecodeError):
            self._replace()
            raise InvalidInput(f"{talk.subject} gives a result that is too long") from None
        except OSError:
            answer = None
        if answer is None:
            raise self._died(talk.subject, process)
        if answer.spent:
            self._replace()
        return answer

    def read(self, body: bytes) -> Answer | None:
        """An answer that came; None: it is one that only `conclude` can deal with."""
        try:
            answer = self._decoder.decode(body)
        except (ValueError, msgspec.DecodeError):
            return None
        return None if answer.spent else answer

    def kill(self) -> None:
        """Let no child run any more. Who waits for an answer is told; only `close` frees what that thread still uses."""
        with self._life:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """After `kill`, when no thread is in `run`."""
        with self._life:
            self._end()

    def distrust(self) -> None:
        """It was seen to end; whoever uses it next finds out."""
        self._ready = False

    def get_ready(self) -> None:
        """Wait until a living child has said that it is ready; one that died while idle is replaced first."""
        for _ in range(2):
            self.start()
            channel = self._channel
            assert channel is not None
            if self.is_ready:
                return
            try:
                self._ready = receive_frame(channel, 64, time.monotonic() + self._limits.start_s) == b"ready"
            except (OSError, ValueError):
                self._ready = False
            if self._ready:
                return
            self._drop()
        raise Refused("a limited process could not be started", retry_after_s=1.0)

    def _command(self) -> list[str]:
        limits = self._limits
        confinement = Confinement(os.getpid(), limits.memory_bytes, limits.niceness, limits.max_job_bytes)
        argument = msgspec.json.encode(confinement).decode()
        return [sys.executable, "-P", "-s", "-B", "-m", "headrace.text.limited_child", argument]

    def _died(self, subject: str, process: subprocess.Popen[bytes]) -> HeadraceError:
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = 0
        self._replace()
        if self._closed:
            return closing()
        if code == -signal.SIGXCPU:
            return InvalidInput(f"{subject} needs more processor time than it may use")
        # Rust aborts, and the kernel kills, where memory ends.
        return InvalidInput(f"{subject} needs more memory than it may use")

    def _replace(self) -> None:
        self._drop()
        if not self._closed:
            self.start()

    def _drop(self) -> None:
        with self._life:
            self._end()

    def _end(self) -> None:
        self._ready = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _environment() -> dict[str, str]:
    """Nothing of the parent's environment: it may hold keys."""
    environment = {"PYTHONUTF8": "1", "MALLOC_ARENA_MAX": "2", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    root = Path(headrace.__file__).resolve().parents[1]
    if root.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = str(root)
    return environment


def closing() -> Refused:
    return Refused("the limited processes are shutting down", retry_after_s=1.0)


def _late(subject: str, limit_s: float, used_s: float) -> HeadraceError:
    if used_s < _BLAMED_SHARE * limit_s:
        return TimedOut(f"{subject} was not finished after {limit_s:g} s because this machine is too busy")
    return InvalidInput(f"{subject} was stopped because it takes longer than {limit_s:g} s")


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far; infinite where the system does not say, so that a late job is blamed."""
    if sys.platform != "linux":
        return float("inf")
    try:
        # clock_getcpuclockid(3), which Python does not have; a fiftieth of the time that /proc takes.
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0
