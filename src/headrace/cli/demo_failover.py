"""`headrace demo failover`: a server of its own whose processes are killed while they speak, and its client's text.

Owns what is done to the server, when, and how it is told; the client is an ordinary one, that reads on with the last
event id it saw when its connection breaks. The verdict is a comparison with the same request left in peace.
"""

from __future__ import annotations

import http.client
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct
from rich.console import Console

from headrace.cli.console import as_text, note, print_json
from headrace.cli.own_server import OwnServer
from headrace.core.errors import HeadraceError, InvalidInput

_FAKE = "fake"
_QUESTION = "Tell me about water mills."
# The fake's words, so that its text can be looked at: no punctuation, no halves of letters.
_WORDS = "( [a-z]+){{{count}}}"
_TOKENS = 90
# A victim is chosen when this share of the reply has been heard.
_BLOW_AT = 0.4
_PATIENCE_S = 60.0
_AGAIN_S = 0.02
_CONFIG = """
[gateway]
drain_s = 1.0
[[models]]
{model}
workers = 2
"""
_FAKE_MODEL = """name = "fake"
runner = "fake"
fake = { vocab_size = 2400, profile = { c0_s = 0.03, c_in_s = 1e-6, c_out_s = 1e-6 } }"""


class Blow(Struct, frozen=True):
    """`gap_ms` lies between the last text before and the first text after."""

    victim: str
    pid: int
    after_letters: int
    gap_ms: float


class Telling(Struct, frozen=True):
    """One stream as its client heard it."""

    text: str
    finish: str | None
    connections: int
    blow: Blow | None = None


class Report(Struct, frozen=True):
    model: str
    identical: bool
    undisturbed: Telling
    worker: Telling
    gateway: Telling
    difference: str | None = None


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Problem(Struct):
    message: str = "the server gave no reason"


class _Chunk(Struct):
    choices: list[_Choice] = []
    error: _Problem | None = None


def failover(
    model: Annotated[
        str, typer.Option(help="fake needs no weights; default, another name or a path is really computed.")
    ] = _FAKE,
    tokens: Annotated[int, typer.Option(min=10, max=500, help="Length of the reply.")] = _TOKENS,
    question: Annotated[str, typer.Option(help="What is asked.")] = _QUESTION,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Kill a worker, then the gateway, in mid-stream, and watch the client's text go on.

    Starts a server of its own with two workers. The verdict is against the same request left in peace: exit code 0 if
    all three texts are identical, 1 if not.
    """
    check_text(model, question)
    show = _Show(quiet=as_json)
    show.remark(
        f"starting a server with two workers of {model}" + ("" if model == _FAKE else "; loading takes a while")
    )
    with OwnServer(_CONFIG.format(model=_model_lines(model))) as server:
        asked = _asked(model, question, tokens)
        show.title("1. the worker that speaks is killed (SIGKILL)")
        worker = _Client(server, asked, show).tell(lambda: server.speaking())
        _await_workers(server)
        show.title("2. the gateway is killed; the client comes back with the last event id it saw")
        gateway = _Client(server, asked, show).tell(lambda: "gateway")
        show.title("3. nothing is killed")
        undisturbed = _Client(server, asked, show).tell(None)
    differs = difference(undisturbed, {"worker": worker, "gateway": gateway})
    report = Report(model, differs is None, undisturbed, worker, gateway, differs)
    if as_json:
        print_json(report)
    show.verdict(report)
    raise typer.Exit(0 if report.identical else 1)


def check_text(model: str, question: str) -> None:
    for flag, value in (("--model", model), ("--question", question)):
        if not value.strip() or not all(letter.isprintable() for letter in value) or len(value) > 4000:
            raise InvalidInput(f"{flag} must be 1 to 4,000 printable characters", param=flag)


def _model_lines(model: str) -> str:
    if model == _FAKE:
        return _FAKE_MODEL
    # The file lies in a folder of its own: a path is made whole here.
    source = str(Path(model).absolute()) if os.sep in model or Path(model).exists() else model
    quoted = msgspec.json.encode(as_text(Path(source))).decode()
    return f'name = "shown"\nsource = {quoted}\nkv_tokens = 8192'


def _asked(model: str, question: str, tokens: int) -> bytes:
    fields: dict[str, Any] = {
        "model": "default",
        "stream": True,
        "temperature": 0.8,
        "seed": 7,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": question}],
    }
    if model == _FAKE:
        # As many words as tokens: a word is at least one.
        fields["regex"] = _WORDS.format(count=tokens)
    return msgspec.json.encode(fields)


def _await_workers(server: OwnServer) -> None:
    """Until both are there again: what is killed next should be all that is gone."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while sum(name.startswith("worker ") for name in server.processes()) < 2 and time.monotonic() < give_up_s:
        time.sleep(0.1)


class _Lost(Exception):
    """The connection broke off."""


@dataclass(slots=True)
class _Client:
    """Reads one stream, whatever happens to its connection. `aim` names the process to be killed on the way."""

    server: OwnServer
    asked: bytes
    show: _Show
    id: str = field(default_factory=lambda: f"demo-{time.time_ns()}")
    _text: str = ""
    _after: int = 0
    _finish: str | None = None
    _is_done: bool = False
    _connections: int = 0
    _heard_s: float | None = None
    _victim: tuple[str, int, int] | None = None
    _gap_s: float = 0.0

    def tell(self, aim: Callable[[], str | None] | None) -> Telling:
        least = int(_BLOW_AT * msgspec.json.decode(self.asked)["max_tokens"])
        give_up_s = time.monotonic() + _PATIENCE_S
        num_heard = 0
        while not self._is_done:
            try:
                for line in self._lines():
                    num_heard += self._take(line.strip())
                    if aim is not None and self._victim is None and num_heard >= least:
                        self._strike(aim())
            except _Lost:
                if time.monotonic() > give_up_s:
                    raise HeadraceError(f"the stream did not go on within {_PATIENCE_S:.0f} s") from None
                time.sleep(_AGAIN_S)
        self.show.end()
        if aim is not None and self._victim is None:
            raise HeadraceError("the reply was over before anything could be killed; --tokens makes it longer")
        blow = None if self._victim is None else Blow(*self._victim, round(1e3 * self._gap_s, 1))
        return Telling(self._text, self._finish, self._connections, blow)

    def _lines(self) -> Iterator[bytes]:
        """Of one connection: the first asks, those after it read on. Raises _Lost where it breaks."""
        connection = self.server.connect()
        headers = {"authorization": f"Bearer {self.server.key}", "x-request-id": self.id}
        try:
            if self._connections == 0:
                headers["content-type"] = "application/json"
                connection.request("POST", "/v1/chat/completions", self.asked, headers)
            else:
                headers["last-event-id"] = str(self._after)
                connection.request("GET", f"/v1/streams/{self.id}", headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                raise HeadraceError(f"the server answered {response.status}: {response.read(2000).decode()}")
            self._connections += 1
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise _Lost from error
        finally:
            connection.close()

    def _take(self, line: bytes) -> bool:
        """Whether it brought text."""
        if line.startswith(b"id: "):
            self._after = int(line[4:])
        if line == b"data: [DONE]":
            self._is_done = True
        elif line.startswith(b"data: "):
            chunk = msgspec.json.decode(line[6:], type=_Chunk)
            if chunk.error is not None:
                raise HeadraceError(f"the stream failed: {chunk.error.message}")
            return bool(chunk.choices) and self._hear(chunk.choices[0])
        return False

    def _hear(self, choice: _Choice) -> bool:
        self._finish = choice.finish_reason or self._finish
        text = choice.delta.content
        if not text:
            return False
        now_s = time.monotonic()
        if self._victim is not None and self._heard_s is not None and now_s - self._heard_s > self._gap_s:
            # What was on its way already is heard at once: the longest silence since is the one that was caused.
            self._gap_s = now_s - self._heard_s
        self._heard_s = now_s
        self._text += text
        self.show.text(text)
        return True

    def _strike(self, name: str | None) -> None:
        pid = self.server.processes().get(name or "")
        if name is None or pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        self._victim = (name, pid, len(self._text))
        self.show.blow(name, pid)


class _Show:
    """For a person: text as it comes, with the blow in its midst; on stderr only, if stdout is for the document."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(highlight=False, soft_wrap=True)

    def remark(self, line: str) -> None:
        note(line)

    def title(self, line: str) -> None:
        if not self._quiet:
            self._console.print(f"\n{line}", style="bold", markup=False)

    def text(self, text: str) -> None:
        if not self._quiet:
            shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)
            sys.stdout.write(shown)
            sys.stdout.flush()

    def blow(self, name: str, pid: int) -> None:
        if not self._quiet:
            self._console.print(f" [{name}, pid {pid}, is killed] ", style="bold red", end="", markup=False)

    def end(self) -> None:
        if not self._quiet:
            self._console.print()

    def verdict(self, report: Report) -> None:
        if self._quiet:
            return
        self._console.print()
        for telling in (report.worker, report.gateway):
            if telling.blow is not None:
                blow, times = telling.blow, telling.connections
                said = f"{blow.victim} (pid {blow.pid}) died after {blow.after_letters} letters; text went on after"
                again = f", over {times} connections" if times > 1 else ", on the same connection"
                self._console.print(f"{said} {blow.gap_ms:,.0f} ms{again}", markup=False)
        if report.identical:
            length = len(report.undisturbed.text)
            self._console.print(f"identical: all three replies are the same {length} letters", style="bold green")
        else:
            self._console.print(f"NOT identical: {report.difference}", style="bold red", markup=False)


def difference(truth: Telling, others: dict[str, Telling]) -> str | None:
    for name, told in others.items():
        if (told.text, told.finish) != (truth.text, truth.finish):
            pairs = enumerate(zip(told.text, truth.text, strict=False))
            shorter = min(len(told.text), len(truth.text))
            at = next((index for index, (one, other) in pairs if one != other), shorter)
            parts = f"{told.text[at : at + 20]!r} instead of {truth.text[at : at + 20]!r}"
            return f"with its {name} killed the reply has {parts} at letter {at}, and ended by {told.finish}"
    return None
