"""Keys: the local one of this install, those that clients give, and `headrace keys new`. Owns the key's file and where
that key may go; knows no tenant but `local`.

A key is shown or kept only where its owner reads it; everything else has its SHA-256.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shlex
import stat
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct
from msgspec.structs import replace

from headrace.accounts.keys import hash_key
from headrace.cli.console import note, print_json
from headrace.cli.model_store import data_folder
from headrace.core.config import Config, TenantEntry
from headrace.core.errors import InvalidInput

LOCAL_TENANT = "local"
# The local key of a server; and the key with which a client asks any server.
VARIABLE = "HEADRACE_LOCAL_KEY"
CLIENT_VARIABLE = "HEADRACE_API_KEY"
KEY_HELP = f"env:NAME reads a variable. [default: {CLIENT_VARIABLE}, or this install's local key on this machine]"
_LEAST, _MOST = 16, 512

keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@keys.callback()
def _root() -> None:
    """Keys of tenants."""


@keys.command()
def new(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """A fresh key for a client, and its hash for the configuration file. Neither is kept."""
    key = fresh_key()
    if as_json:
        print_json({"key": key, "sha256": hash_key(key)})
        return
    print(f"key     {key}\nsha256  {hash_key(key)}")
    note("give the key to the client; in the configuration:")
    note(f'[[tenants]]\nname = "a-name"\nkeys = ["{hash_key(key)}"]')


class LocalKey(Struct, frozen=True):
    """`place` is what a shell writes to get the key without showing it."""

    key: str
    place: str
    path: Path | None = None


def fresh_key() -> str:
    return f"hr-{secrets.token_urlsafe(32)}"


def local_key(home: Path) -> LocalKey:
    """This install's key: from the environment, from its file, or made now. Only its owner may read the file."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return LocalKey(_checked(given, VARIABLE), f"${VARIABLE}")
    path = home / "key"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        _create(path, fresh_key())
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        note(f"{path} could be read by others; now only by its owner")
        path.chmod(0o600)
    return LocalKey(
        _checked(path.read_text(errors="replace").strip(), str(path)), f"$(cat {shlex.quote(str(path))})", path
    )


def find_key(given: str | None, host: str) -> str | None:
    """What a client shows to the server at `host`: what was given, else the client's variable. This install's own key goes
    to servers of this machine only. None where there is none.

    A key on the command line can be read by every user of the machine: a variable may be named instead.
    """
    if given is not None and given.startswith("env:"):
        given = os.environ.get(given[4:])
        if given is None:
            raise InvalidInput("the variable that --key names is not set", param="--key")
    key = given or os.environ.get(CLIENT_VARIABLE)
    if not key and is_this_machine(host):
        key = os.environ.get(VARIABLE) or _kept_key()
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidInput("a key is printable ASCII", param="--key")
    return key or None


def is_this_machine(host: str) -> bool:
    """By its name alone: nobody is asked where another one leads."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def with_local_tenant(config: Config, key: str) -> Config:
    """The tenant of whoever sits at this machine. One of that name in the file keeps its weight and caps."""
    given = {entry.name: entry for entry in config.tenants}
    local = given.pop(LOCAL_TENANT, TenantEntry(LOCAL_TENANT, tier="enterprise"))
    scopes = (*local.scopes, *(scope for scope in ("metrics", "admin") if scope not in local.scopes))
    digests = tuple(dict.fromkeys((*local.keys, hash_key(key))))
    return replace(config, tenants=(*given.values(), replace(local, keys=digests, scopes=scopes)))


def _kept_key() -> str | None:
    try:
        return (data_folder() / "key").read_text(errors="replace").strip()
    except OSError:
        return None


def _create(path: Path, key: str) -> None:
    """Whole or not at all, and never over another's: of two that start at once, both use the first's."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".key")  # 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _checked(key: str, where: str) -> str:
    if not (_LEAST <= len(key) <= _MOST and key.isascii() and key.isprintable() and " " not in key):
        message = f"{where}: a key has {_LEAST} to {_MOST} printable ASCII characters, no space"
        raise InvalidInput(message, param=where)
    return key
