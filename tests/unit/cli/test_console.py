"""What commands share on stderr."""

import subprocess
import sys

import pytest

from headrace.cli.console import ProgressLines, as_called


def test_progress_without_a_terminal_is_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    times_s = iter((100.0, 100.1, 104.9, 105.0, 107.0, 110.5, 130.0))
    lines = ProgressLines("profiling m", lambda: next(times_s))
    for done in (0, 1, 2, 3, 4, 9):
        lines.show(done, 8, f"point {done}")
    told = ["profiling m: 25%, point 2", "profiling m: 50%, point 4", "profiling m: 100%, point 9"]
    assert capsys.readouterr().err.splitlines() == told


def test_progress_of_what_is_done_soon_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    times_s = iter((7.0, 8.0, 60.0))
    lines = ProgressLines("m", lambda: next(times_s))
    lines.show(5, 5)
    lines.show(0, 0)
    assert capsys.readouterr().err == ""


def test_hints_name_the_command_that_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "x is not here yet: headrace models pull x; headrace is one word, headrace-models another"
    assert as_called(told) == told
    monkeypatch.setenv("HEADRACE_COMMAND", "./run")
    assert as_called(told) == "x is not here yet: ./run models pull x; headrace is one word, headrace-models another"


def test_who_leaves_at_once_has_said_everything_and_ends_well_whatever_its_libraries_do() -> None:
    script = "import atexit, os; from headrace.cli.console import leave; atexit.register(os.abort); print('all of it'); leave()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all of it\n", "")
