"""Where a file of a model comes from: `pypi:package==version#path/in/wheel@sha256:HEX`. Fetches nothing."""

import re
from pathlib import PurePosixPath

from msgspec import Struct

from headrace.core.errors import InvalidInput

_GRAMMAR = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"#(?P<member>[^@#\s]+?)(?:@sha256:(?P<sha256>[0-9a-fA-F]{64}))?"
)
_SHOWN = "pypi:package==version#path/in/wheel@sha256:HEX"


class PypiFile(Struct, frozen=True):
    """One member of one wheel, pinned by what it must hash to."""

    package: str
    version: str
    member: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name

    def __str__(self) -> str:
        return f"pypi:{self.requirement}#{self.member}@sha256:{self.sha256}"


def parse_source(text: str) -> PypiFile:
    """Refused without a pinned hash: a name and a version alone do not say which bytes are meant."""
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{text[:200]!r} is not of the form {_SHOWN}", param="source")
    if match["sha256"] is None:
        raise InvalidInput(f"{text[:200]!r} has no pinned hash: write {_SHOWN}", param="source")
    if not is_inside(match["member"]):
        raise InvalidInput(f"{match['member'][:200]!r} is not a path inside a wheel", param="source")
    return PypiFile(match["package"], match["version"], match["member"], match["sha256"].lower())


def is_inside(path: str) -> bool:
    """Whether a relative path stays below the folder it starts from."""
    parts = path.split("/")
    return "\\" not in path and "\0" not in path and all(part not in ("", ".", "..") for part in parts)
