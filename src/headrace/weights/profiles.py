"""Where measured profiles lie: a JSON file each, by name, beside the models. Owns the folder; what is in a profile is
`core.profile`'s."""

import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.core.errors import HeadraceError, InvalidInput, NotFound
from headrace.core.profile import ModelProfile, convert_profile
from headrace.weights.wheel import sync_folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST_BYTES = 2**22


def check_name(name: str, param: str) -> None:
    if not _NAME.fullmatch(name):
        message = f"{name[:200]!r} cannot name a profile: letters, digits, dots, underscores and hyphens, at most 100"
        raise InvalidInput(message, param=param)


class ProfileStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None and self._path(name).is_file()

    def save(self, profile: ModelProfile) -> Path:
        """In place of an earlier one of its name, whole or not at all."""
        check_name(profile.name, "name")
        path = self._path(profile.name)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            sync_folder(self.folder)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise HeadraceError(f"{error.filename or self.folder}: {error.strerror or error}") from error
        return path

    def load(self, name: str, param: str = "profile") -> ModelProfile:
        """NotFound where there is none; InvalidInput, naming `param`, for one that cannot be read."""
        check_name(name, param)
        path = self._path(name)
        if not path.is_file():
            raise NotFound(f"no profile is stored as {name}: headrace models profile {name}", param=param)
        where = f"the profile stored as {name}"
        try:
            with path.open("rb") as file:
                body = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise InvalidInput(f"{where}: {error.strerror or error}", param=param) from None
        if len(body) > _MOST_BYTES:
            raise InvalidInput(f"{where} is damaged: it has more than {_MOST_BYTES >> 20} MiB", param=param)
        try:
            raw = msgspec.json.decode(body)
        # A ValueError is also what Python says to a number of thousands of digits.
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidInput(f"{where} is damaged: {error}", param=param) from None
        return convert_profile(raw, where, param)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
