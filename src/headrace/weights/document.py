"""A small JSON or text file beside the weights: bounded, typed, hashed as it is read. Knows no model."""

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.core.errors import InvalidModel
from headrace.weights.weight_file import WeightFile

T = TypeVar("T")

_MOST_BYTES = 2**24


class DocumentFolder:
    """Reads a folder's small files and remembers what they hashed to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests: dict[str, str] = {}

    def read(self, name: str, most_bytes: int = _MOST_BYTES) -> bytes:
        """The file's bytes, none where there is no such file."""
        if not (self.folder / name).exists():
            return b""
        file = WeightFile(self.folder / name)
        try:
            if file.size_bytes > most_bytes:
                raise InvalidModel(f"{name}: has {file.size_bytes} bytes, more than {most_bytes}", param=name)
            data = file.read_at(0, file.size_bytes)
        finally:
            file.close()
        self.digests[name] = hashlib.sha256(data).hexdigest()
        return data

    def read_text(self, name: str) -> str:
        try:
            return self.read(name).decode()
        except UnicodeDecodeError as error:
            raise InvalidModel(f"{name}: is not UTF-8", param=name) from error

    def read_json(self, name: str, kind: type[T], most_bytes: int = _MOST_BYTES) -> T | None:
        data = self.read(name, most_bytes)
        return parse_json(data, kind, name) if data else None


def parse_json(data: bytes, kind: type[T], source: str) -> T:
    """Fields of no interest are skipped; one of the wrong type is named."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidModel(f"{source}: {error}", param=source) from error
