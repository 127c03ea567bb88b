"""What was found out about this machine, kept in a folder for the next start: a JSON file each, by name.

A find is believed only where all that it depends on is as it was. Owns the files; what cannot be read or written is
found out anew.
"""

import hashlib
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")

log = logging.getLogger("headrace.worker")

_MOST_BYTES = 2**16
_NO_LETTER = re.compile(r"[^A-Za-z0-9._-]")


class _Find(Struct, frozen=True, forbid_unknown_fields=True):
    """`depends_on` is a digest."""

    depends_on: str
    value: msgspec.Raw


class Shelf:
    """`surroundings` are what every find depends on."""

    def __init__(self, folder: Path, surroundings: object = None) -> None:
        self._folder = folder
        self._surroundings = surroundings

    def find(self, name: str, depends_on: object, kind: type[T]) -> T | None:
        try:
            with self._path(name).open("rb") as file:
                found = msgspec.json.decode(file.read(_MOST_BYTES), type=_Find)
            if found.depends_on == self._digest(depends_on):
                return msgspec.json.decode(found.value, type=kind)
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.info("what was kept as %s is found out anew: %s", name, error)
        return None

    def keep(self, name: str, depends_on: object, value: object) -> None:
        """In place of what was kept under this name, whole or not at all."""
        path = self._path(name)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        body = msgspec.json.encode(_Find(self._digest(depends_on), msgspec.Raw(msgspec.json.encode(value))))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(body)
            unfinished.replace(path)
        except OSError as error:
            log.info("%s is not kept: %s", name, error)
            with suppress(OSError):
                unfinished.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{_NO_LETTER.sub('_', name)}.json"

    def _digest(self, depends_on: object) -> str:
        return hashlib.sha256(msgspec.json.encode((self._surroundings, depends_on))).hexdigest()
