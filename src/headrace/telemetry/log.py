"""Lines for a person, written by a thread of their own. Owns the bounds: who logs never waits for who reads.

What comes while the queue is full is dropped, and how much that was is said as soon as there is room again.
"""

import contextlib
import logging
import os
import select
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

MAX_LINES = 2000
# So many lines a second about people without a key.
STRANGERS_PER_S = 20
_MAX_CHARS = 8 << 10
# Lines of this time are one write, whose whole lines do not mix with those of other processes.
_GATHER_S = 0.02
_WRITE_BYTES = 4096
# Looked up faster than written.
_MILLISECONDS = tuple(f".{number:03d}Z" for number in range(1000))
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LineWriter:
    """Ends with its context: what is left then has a moment to be written."""

    def __init__(self, fd: int = 2, max_lines: int = MAX_LINES) -> None:
        self._fd = fd
        self._max_lines = max_lines
        # Not `Queue`: its lock would stop a thread that logs while it is logging, as a finaliser can.
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._num_dropped = 0
        self._num_told = 0
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """From any thread; never waits and never fails."""
        if self._lines.qsize() >= self._max_lines:
            self._num_dropped += 1
        else:
            self._lines.put(line)

    def close(self, within_s: float = 0.5) -> None:
        self._lines.put(None)
        self._thread.join(within_s)

    def __enter__(self) -> "LineWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        is_open = True
        while is_open:
            lines = [self._lines.get()]
            if lines[0] is not None:
                time.sleep(_GATHER_S)
            while not self._lines.empty():
                lines.append(self._lines.get())
            is_open = None not in lines
            self._write([line for line in lines if line is not None])
            if self._num_dropped > self._num_told:
                count, self._num_told = self._num_dropped - self._num_told, self._num_dropped
                self._write([f"{count} lines were dropped: nobody read them in time"])

    def _write(self, lines: list[str]) -> None:
        """In pieces of whole lines. Who reads may be gone, with the terminal; that ends nobody."""
        piece = b""
        with contextlib.suppress(OSError):
            for line in lines:
                data = line.encode("utf-8", "backslashreplace") + b"\n"
                if piece and len(piece) + len(data) > _WRITE_BYTES:
                    self._write_all(piece)
                    piece = b""
                piece += data
            self._write_all(piece)

    def _write_all(self, data: bytes) -> None:
        # Not through a file object: one that is held up in a write cannot be flushed, and so keeps a process from ending.
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                select.select([], [self._fd], [])


class _OneLine(logging.Formatter):
    """As `_FORMAT` says, without working it out again for each of the many lines that have no traceback."""

    # The second that was written last, and how.
    _second = (0.0, "1970-01-01T00:00:00")

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        return f"{self.formatTime(record)} {record.levelname} {record.name}: {record.getMessage()}"

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        """UTC, to the millisecond."""
        second_s, text = self._second
        if not 0.0 <= record.created - second_s < 1.0:
            second_s = record.created // 1.0
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second_s))
            self._second = second_s, text
        return text + _MILLISECONDS[int(record.msecs)]


def log_to(lines: LineWriter, level: str = "info") -> None:
    """Everything that this process logs, from this level on (one of `core.config.LOG_LEVELS`). What libraries say for those
    who mend them, which may be what clients sent, is in no log."""
    # A line tells neither where in the code it was made nor by which thread; finding out takes longer than the rest.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _ToLines(lines)
    least = logging.getLevelNamesMapping()[level.upper()]
    handler.setLevel(least)
    logging.basicConfig(level=max(least, logging.INFO), handlers=[handler])
    logging.getLogger("headrace").setLevel(least)


class _ToLines(logging.Handler):
    def __init__(self, lines: LineWriter) -> None:
        super().__init__()
        self._lines = lines
        self._form = _OneLine(_FORMAT)

    def handle(self, record: logging.LogRecord) -> bool:
        """Without a lock: a line is put in one move, and nobody filters here."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._form.format(record)
        except Exception:  # noqa: BLE001 - a line that cannot be made must not end who logs it
            time_of = self._form.formatTime(record)
            line = f"{time_of} {record.levelname} {record.name}: a line could not be made of {record.msg!r}"
        self._lines.put(line[:_MAX_CHARS])


@dataclass(slots=True)
class Allowance:
    """At most so many in each second. What is beyond is counted, and the count is told with the next that passes."""

    per_s: int
    _second_s: float = 0.0
    _num_passed: int = 0
    _num_left_out: int = 0

    def take(self, now_s: float) -> int | None:
        """None: leave it out. Else how many were left out since the last that passed."""
        if not 0.0 <= now_s - self._second_s < 1.0:
            self._second_s, self._num_passed = now_s, 0
        if self._num_passed >= self.per_s:
            self._num_left_out += 1
            return None
        self._num_passed += 1
        count, self._num_left_out = self._num_left_out, 0
        return count
