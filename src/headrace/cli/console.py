"""What commands share: notes and progress on stderr, one JSON document on stdout, and where pictures go."""

import math
import os
import re
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from headrace.core.errors import InvalidInput

# What a script that calls `headrace` for somebody was called by itself.
_COMMAND = "HEADRACE_COMMAND"
_CALLS = re.compile(r"\bheadrace(?= (?:chat|demo|doctor|generate|keys|models|plan|serve|simulate)\b)")
# Between two lines of progress.
_LINE_S = 5.0


def note(line: str) -> None:
    """Progress and remarks, which never mix with a result."""
    print(line, file=sys.stderr, flush=True)


def called_as() -> str:
    """What this was called by."""
    return os.environ.get(_COMMAND, "headrace")


def as_called(text: str) -> str:
    """What it says to call, as it can be called here."""
    return _CALLS.sub(lambda _: called_as(), text)


class ProgressLines:
    """Progress where no bar can be drawn: a line every few seconds, and none for what is done before."""

    def __init__(self, name: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._now_s = now_s
        self._next_s = now_s() + _LINE_S

    def show(self, done: int, total: int, words: str = "") -> None:
        now_s = self._now_s()
        if now_s >= self._next_s and total:
            self._next_s = now_s + _LINE_S
            note(f"{self._name}: {min(1.0, done / total):.0%}{f', {words}' if words else ''}")


def leave() -> NoReturn:
    """End the process here, all done and said, for whom what its libraries do at its end would cost the exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def print_json(document: object) -> None:
    import msgspec

    print(msgspec.json.encode(document).decode())


def as_text(path: Path | None) -> str | None:
    """A name may hold bytes that are no text."""
    return None if path is None else str(path).encode("utf-8", "backslashreplace").decode()


def check_finite(**options: float | None) -> None:
    """A bound lets NaN pass: nothing is less than it. `options` are named as their flags, with underscores."""
    for name, value in options.items():
        if value is not None and not math.isfinite(value):
            option = f"--{name.replace('_', '-')}"
            raise InvalidInput(f"{option} must be a finite number, not {value}", param=option)


def picture_target(asked: Path | None, default: Path) -> Path | None:
    """Without matplotlib nothing is drawn, which is an error only if a picture was asked for."""
    if find_spec("matplotlib") is not None:
        from headrace.sim.picture import check_picture

        check_picture(asked or default)
        return asked or default
    if asked is not None:
        raise InvalidInput("--picture needs matplotlib: pip install 'headrace[draw]'", param="picture")
    note("no picture: matplotlib is not installed (pip install 'headrace[draw]')")
    return None
