"""Lines through a thread of their own: written in order, dropped and counted when nobody reads."""

import fcntl
import logging
import os
from collections.abc import Iterator

import pytest

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


def renew_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is set up of logging from now on is as before after the test."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    for name in ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, name, getattr(logging, name))


def test_a_failure_is_logged_with_its_traceback(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    renew_logging(monkeypatch)
    with LineWriter(pipe[1]) as lines:
        log_to(lines)
        logging.getLogger("a.b").error("request %s failed", 7, exc_info=ValueError("why"))
    assert read_all(pipe) == ["ERROR a.b: request 7 failed", "ValueError: why"]


def test_what_is_logged_becomes_lines_even_if_it_cannot_be_formatted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    renew_logging(monkeypatch)
    with LineWriter(pipe[1]) as lines:
        log_to(lines)
        logging.getLogger("a.b").info("%d of %s", 1, "two")
        logging.getLogger("a.b").info("%d", "no number")
        logging.getLogger("a.b").info("%s", "y" * 100_000)
    first, second, third = read_all(pipe)
    assert (first, second) == ("INFO a.b: 1 of two", "a.b: a line could not be made of '%d'")
    assert third.startswith("INFO a.b: yyy") and len(third) < 10_000


def test_beyond_the_allowance_of_a_second_lines_are_counted() -> None:
    allowance = Allowance(3)
    assert [allowance.take(5.0 + number / 10) for number in range(8)] == [0, 0, 0, *[None] * 5]
    assert [allowance.take(6.0), allowance.take(6.5)] == [5, 0]
    assert allowance.take(1.0) == 0
