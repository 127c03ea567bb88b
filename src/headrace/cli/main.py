"""The `headrace` command: finds the subcommand, maps errors to one line and an exit code.

A subcommand's module is imported only when it is the one asked for, so that help is quick.
Exit codes: 0 done, 1 failed, 2 the caller's input, 130 interrupted. Knows nothing of what commands do.
"""

import itertools
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, NamedTuple

import typer

from headrace import __version__
from headrace.cli.console import as_called
from headrace.core.errors import HeadraceError, InvalidInput


class Subcommand(NamedTuple):
    """Where a subcommand lives: `attribute` of `module` is a function, or a Typer with commands of its own.
    A hidden one is for other commands to start."""

    module: str
    attribute: str
    help: str
    hidden: bool = False


_MOST_LETTERS = 500

SUBCOMMANDS = {
    "serve": Subcommand("headrace.cli.serve", "serve", "Start the server: an OpenAI-compatible API over a model."),
    "chat": Subcommand("headrace.cli.chat", "chat", "Talk to a server in the terminal."),
    "keys": Subcommand("headrace.cli.keys", "keys", "Make keys for tenants."),
    "generate": Subcommand("headrace.cli.generate", "generate", "Generate with a local model, one prompt or a file."),
    "models": Subcommand("headrace.cli.models", "models", "Pull, list, inspect and profile models."),
    "demo": Subcommand("headrace.cli.demo", "demo", "Watch the scheduler at work, or a reply survive its processes."),
    "simulate": Subcommand("headrace.cli.simulate", "simulate", "Run a scenario under the virtual clock."),
    "plan": Subcommand("headrace.cli.plan", "plan", "Turn a profile and a load into replicas, cost and headroom."),
    "doctor": Subcommand("headrace.cli.doctor", "doctor", "What this machine has, and what is chosen for it."),
    "bench": Subcommand("headrace.cli.bench", "bench", "Measure a server, batching, scheduler, engine and kernels."),
    "gateway": Subcommand("headrace.cli.gateway", "gateway", "The gateway's process, as `serve` starts it.", True),
    "worker": Subcommand("headrace.cli.worker", "worker", "The process of one replica, as `serve` starts it.", True),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line and exit with its code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        code = build_app(argv)(args=argv, prog_name="headrace", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        code = report_usage(error, as_json=_wants_json(argv))
    except HeadraceError as error:
        code = report_error(error, as_json=_wants_json(argv))
    except MemoryError:
        code = report_error(HeadraceError("not enough memory for what was asked"), as_json=_wants_json(argv))
    except BrokenPipeError:
        code = _drop_output()
    except OSError as error:
        code = report_error(HeadraceError(f"{error.filename or 'output'}: {error.strerror or error}"), as_json=False)
        _drop_output()
    sys.exit(code or 0)


def build_app(argv: Sequence[str]) -> typer.Typer:
    """All subcommands by name; only the one that `argv` asks for is loaded."""
    app = typer.Typer(
        name="headrace",
        help="An inference server that schedules tokens, not requests.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, subcommand in SUBCOMMANDS.items():
        if name != asked:
            app.command(name, help=subcommand.help, hidden=subcommand.hidden)(_not_loaded)
            continue
        target = getattr(import_module(subcommand.module), subcommand.attribute)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=subcommand.help)
        else:
            app.command(name, help=subcommand.help, hidden=subcommand.hidden)(target)
    return app


def report_error(error: HeadraceError, *, as_json: bool) -> int:
    """Say what went wrong and return the exit code."""
    message = _one_line(as_called(error.message))
    print(f"error: {message}", file=sys.stderr)
    if as_json:
        import msgspec

        param = None if error.param is None else _one_line(error.param)
        body = {"error": {"code": error.code, "message": message, "param": param}}
        print(msgspec.json.encode(body).decode())
    return 2 if isinstance(error, InvalidInput) else 1


def report_usage(error: typer.TyperException, *, as_json: bool) -> int:
    """A command line that no command takes: as any other bad input. A bare command gets its help."""
    message = error.format_message()
    if message.startswith("Usage:"):
        print(message, file=sys.stderr)
        return 2
    names = getattr(error, "option_name", None) or getattr(getattr(error, "param", None), "opts", None)
    param = names[0] if isinstance(names, list) else names
    return report_error(InvalidInput(message, param=param), as_json=as_json)


def _wants_json(argv: Sequence[str]) -> bool:
    return "--json" in itertools.takewhile(lambda word: word != "--", argv)


def _one_line(text: str) -> str:
    """Whatever a file or a flag held, nothing in it may move a terminal's cursor or be no text at all."""
    words = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in words[:_MOST_LETTERS])
    return shown + ("…" if len(words) > _MOST_LETTERS else "")


def _drop_output() -> int:
    """Nobody can read our output. Python would fail again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _show_version(asked: bool) -> None:
    if asked:
        print(f"headrace {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options before any subcommand; the version is shown before this runs."""


def _not_loaded() -> None:
    raise AssertionError("a subcommand that was not asked for was run")


if __name__ == "__main__":
    main()
