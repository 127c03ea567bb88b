"""`headrace chat`: a conversation with a server in the terminal. Owns the prompt, the history and what is shown.

Speaks the public HTTP API like any other client. Ctrl-C ends a reply, not the conversation.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from headrace.cli.chat_client import USUAL_URL, ChatClient, Message, NotReady, parse_url
from headrace.cli.console import check_finite, note
from headrace.cli.keys import CLIENT_VARIABLE, KEY_HELP, find_key, is_this_machine
from headrace.cli.model_store import data_folder
from headrace.core.errors import HeadraceError, InvalidInput

# Of a model that is being loaded: how long it is waited for, and how often it is asked for.
_PATIENCE_S = 120.0
_AGAIN_S = 2.0
_HELP = "/clear starts over, /exit leaves, Ctrl-C ends a reply"


def chat(
    question: Annotated[str | None, typer.Argument(help="Ask this and leave. Without it: a conversation.")] = None,
    url: Annotated[str, typer.Option(help="Where the server is.")] = USUAL_URL,
    model: Annotated[str, typer.Option(help="One of the server's models.")] = "default",
    key: Annotated[str | None, typer.Option(help=KEY_HELP)] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="How much chance there is in a reply.")] = 0.2,
    cacert: Annotated[
        str | None, typer.Option("--cacert", "--ca", help="Trust this certificate (PEM), for https.")
    ] = None,
) -> None:
    """Talk to a server in the terminal, streaming."""
    check_finite(temperature=temperature)
    asked = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    client = ChatClient(url, _find_key(key, parse_url(url)[1]), asked, cacert=cacert)
    history = [Message("system", system)] if system else []
    if question is not None:
        _say(client, [*history, Message("user", question)])
        return
    client.knock()
    note(f"{model} at {url}; {_HELP}")
    _converse(client, history)


def _find_key(given: str | None, host: str) -> str:
    found = find_key(given, host)
    if found is not None:
        return found
    why = f"{data_folder() / 'key'} is not there"
    if not is_this_machine(host):
        why = f"this install's own goes to 127.0.0.1, ::1 and localhost only, and this is {host}"
    raise InvalidInput(f"no key: {why}; give --key, or set {CLIENT_VARIABLE}", param="--key")


def _converse(client: ChatClient, beginning: list[Message]) -> None:
    """A person hears of an error and goes on; a script that asks ends with it."""
    history = list(beginning)
    for line in _lines():
        if line == "/exit":
            return
        if line == "/clear":
            history = list(beginning)
        elif line.startswith("/"):
            note(_HELP)
        elif line:
            asked = [*history, Message("user", line)]
            try:
                said = _say(client, asked)
                if said:
                    history = [*asked, Message("assistant", said)]
            except HeadraceError as error:
                if not sys.stdin.isatty():
                    raise
                note(f"error: {error.message}")


def _lines() -> Iterator[str]:
    """What the person types, until the end of input. Ctrl-C at an empty prompt leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its line editing
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print()
            return


def _say(client: ChatClient, messages: list[Message]) -> str:
    """Show a reply while it comes; what came of it."""
    parts: list[str] = []
    try:
        for text in _reply(client, messages):
            parts.append(text)
            print(_shown(text), end="", flush=True)
        if client.is_cut:
            note(" (cut off; --max-tokens says how long a reply may be)")
    except KeyboardInterrupt:
        note(" (stopped)")
    except HeadraceError:
        if parts:
            print()
        raise
    print()
    return "".join(parts)


def _reply(client: ChatClient, messages: list[Message]) -> Iterator[str]:
    """A server that was started a moment ago has no model yet: it is waited for."""
    give_up_s = time.monotonic() + _PATIENCE_S
    is_told = False
    while True:
        try:
            yield from client.reply(messages)
            return
        except NotReady as error:
            if time.monotonic() >= give_up_s:
                raise
            if not is_told:
                note(f"{error.message.partition(';')[0]}; waiting for it, Ctrl-C stops that")
            is_told = True
        time.sleep(_AGAIN_S)


def _shown(text: str) -> str:
    """What a model writes must not move the cursor or change the terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
