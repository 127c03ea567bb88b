"""The command line: help without loading anything, errors in one line, exit codes."""

import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Annotated

import pytest
import typer

from headrace import __version__
from headrace.cli import main as cli
from headrace.core.errors import InvalidInput, Refused

pytestmark = pytest.mark.unit


def install(monkeypatch: pytest.MonkeyPatch, body: Callable[[], None]) -> None:
    """Register a subcommand `probe` that runs `body`."""

    def probe(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
        body()

    module = ModuleType("probe_module")
    module.probe = probe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_module", module)
    monkeypatch.setitem(cli.SUBCOMMANDS, "probe", cli.Subcommand("probe_module", "probe", "A test."))


def exit_code(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"headrace {__version__}\n"


def test_help_names_every_subcommand_and_loads_none() -> None:
    script = "import sys; from headrace.cli.main import build_app; build_app(['--help']); print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "'numpy'" not in loaded
    assert "headrace.cli.bench" not in loaded


def test_help_shows_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("serve", "simulate", "plan", "bench"))


@pytest.mark.parametrize(
    "argv", [("serve",), ("demo",), ("simulate",), ("plan",), ("bench", "batching"), ("bench", "scheduler")]
)
def test_every_subcommand_takes_json(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    assert exit_code(*argv, "--help") == 0
    assert "--json" in capsys.readouterr().out


def test_bad_input_is_one_line_and_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise InvalidInput("engine.slots must be\na number", param="engine.slots")

    install(monkeypatch, fail)
    assert exit_code("probe") == 2
    printed = capsys.readouterr()
    assert printed.err == "error: engine.slots must be a number\n"
    assert printed.out == ""


def test_other_errors_are_code_1_and_json_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise Refused("not now", retry_after_s=1.5)

    install(monkeypatch, fail)
    assert exit_code("probe", "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"error": {"code": "overloaded", "message": "not now", "param": None}}
    assert printed.err == "error: not now\n"


def test_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    install(monkeypatch, interrupt)
    assert exit_code("probe") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("ours")

    install(monkeypatch, fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_an_unknown_subcommand_is_the_callers_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("sreve") == 2
    assert "No such command 'sreve'" in capsys.readouterr().err


def test_a_malformed_length_names_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench", "batching", "--output", "lognormal:1") == 2
    assert capsys.readouterr().err.startswith("error: --output: ")


def test_no_memory_is_one_line_and_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise MemoryError

    install(monkeypatch, fail)
    assert exit_code("probe", "--json") == 1
    printed = capsys.readouterr()
    assert printed.err == "error: not enough memory for what was asked\n"
    assert json.loads(printed.out)["error"]["code"] == "internal_error"


def test_output_that_cannot_be_written_is_one_line() -> None:
    argv = [sys.executable, "-m", "headrace.cli.main", "--version"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "error: output: No space left on device\n")
