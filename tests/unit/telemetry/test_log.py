"""Lines through a thread of their own: written in order, dropped and counted when nobody reads; with the time of each."""

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.core.config import LOG_LEVELS
from headrace.telemetry.log import Allowance, LineWriter, log_to

_PIPE_BYTES = 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def leave(fd: int) -> None:
    """This end of the pipe is closed; its number is still ours."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)


def read_all(pipe: tuple[int, int]) -> list[str]:
    leave(pipe[1])
    with os.fdopen(os.dup(pipe[0])) as file:
        return file.read().splitlines()


def test_lines_are_written_whole_and_in_order(pipe: tuple[int, int]) -> None:
    with LineWriter(pipe[1]) as lines:
        for number in range(100):
            lines.put(f"line {number} \udcff")
    assert read_all(pipe) == [f"line {number} \\udcff" for number in range(100)]


@pytest.mark.parametrize("blocks", [True, False])
def test_nobody_waits_for_who_does_not_read_and_the_dropped_are_counted(pipe: tuple[int, int], blocks: bool) -> None:
    os.set_blocking(pipe[1], blocks)
    lines = LineWriter(pipe[1], max_lines=10)
    for _ in range(1000):
        lines.put("x" * 1000)
    lines.close(within_s=0.0)
    num_written = num_dropped = 0
    with os.fdopen(os.dup(pipe[0])) as file:
        while num_written + num_dropped < 1000:
            line = file.readline().rstrip()
            if line == "x" * 1000:
                num_written += 1
            else:
                assert line.endswith(" lines were dropped: nobody read them in time")
                num_dropped += int(line.split()[0])
    assert num_dropped > 500


def test_who_is_gone_ends_nobody(pipe: tuple[int, int]) -> None:
    leave(pipe[0])
    with LineWriter(pipe[1]) as lines:
        lines.put("nobody hears this")
        lines.close(within_s=30.0)
        lines.put("nor this")


@contextmanager
def logging_to(fd: int, level: str = "info") -> Iterator[None]:
    """All of this process, until it is left; then everything is as before."""
    root, own = logging.getLogger(), logging.getLogger("headrace")
    levels = root.level, own.level
    with pytest.MonkeyPatch.context() as patch, LineWriter(fd) as lines:
        patch.setattr(root, "handlers", [])
        for name in ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing"):
            patch.setattr(logging, name, getattr(logging, name))
        log_to(lines, level)
        yield
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def without_times(lines: list[str]) -> list[str]:
    return [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", "", line) for line in lines]


def test_a_failure_is_logged_with_its_traceback(pipe: tuple[int, int]) -> None:
    with logging_to(pipe[1]):
        logging.getLogger("a.b").error("request %s failed", 7, exc_info=ValueError("why"))
    said = read_all(pipe)
    assert without_times(said) == ["ERROR a.b: request 7 failed", "ValueError: why"]
    assert said[0].endswith("Z ERROR a.b: request 7 failed")


def test_what_is_logged_becomes_lines_even_if_it_cannot_be_formatted(pipe: tuple[int, int]) -> None:
    with logging_to(pipe[1]):
        logging.getLogger("a.b").info("%d of %s", 1, "two")
        logging.getLogger("a.b").info("%d", "no number")
        logging.getLogger("a.b").info("%s", "y" * 100_000)
    said = read_all(pipe)
    first, second, third = without_times(said)
    assert (first, second) == ("INFO a.b: 1 of two", "INFO a.b: a line could not be made of '%d'")
    assert third.startswith("INFO a.b: yyy") and len(third) < 10_000
    assert all(len(line) > len(bare) for line, bare in zip(said, (first, second, third), strict=True))


def test_each_line_says_when_in_utc_to_the_millisecond(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    moments_s = (1_700_000_000.0, 1_700_000_000.0625, 1_700_000_001.9990234375, 1_700_000_000.5)
    with logging_to(pipe[1]):
        for created_s in moments_s:
            told = {"msg": "x", "levelno": logging.INFO, "levelname": "INFO"}
            record = logging.makeLogRecord(
                told | {"name": "a", "created": created_s, "msecs": int(created_s % 1 * 1000) + 0.0}
            )
            logging.getLogger("a").handle(record)
    monkeypatch.undo()
    time.tzset()
    assert read_all(pipe) == [
        "2023-11-14T22:13:20.000Z INFO a: x",
        "2023-11-14T22:13:20.062Z INFO a: x",
        "2023-11-14T22:13:21.999Z INFO a: x",
        "2023-11-14T22:13:20.500Z INFO a: x",
    ]


@pytest.mark.parametrize("place", range(len(LOG_LEVELS)))
def test_below_the_level_nothing_is_logged(pipe: tuple[int, int], place: int) -> None:
    with logging_to(pipe[1], LOG_LEVELS[place]):
        for level in LOG_LEVELS:
            getattr(logging.getLogger("headrace.gateway"), level)("x")
    assert [line.split()[1].lower() for line in read_all(pipe)] == list(LOG_LEVELS[place:])


@pytest.mark.parametrize(("level", "heard"), [("debug", ["INFO", "WARNING"]), ("error", [])])
def test_a_library_says_no_more_than_usual_and_no_less_silently(
    pipe: tuple[int, int], level: str, heard: list[str]
) -> None:
    library = logging.getLogger("library.that.has.a.level")
    library.setLevel(logging.WARNING)
    with logging_to(pipe[1], level):
        logging.getLogger("library").debug("what a client sent")
        logging.getLogger("library").info("x")
        library.warning("x")
    assert [line.split()[1] for line in read_all(pipe)] == heard


def test_beyond_the_allowance_of_a_second_lines_are_counted() -> None:
    allowance = Allowance(3)
    assert [allowance.take(5.0 + number / 10) for number in range(8)] == [0, 0, 0, *[None] * 5]
    assert [allowance.take(6.0), allowance.take(6.5)] == [5, 0]
    assert allowance.take(1.0) == 0
