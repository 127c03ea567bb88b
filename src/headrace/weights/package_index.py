"""Where a wheel can be downloaded, as the machine's own pip would. Owns the talk with pip; downloads nothing.

Indexes, mirrors, certificates and proxies are pip's configuration, so no host is named here.
"""

import ast
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from headrace.core.errors import FetchFailed, HeadraceError, InvalidModel, NotFound
from headrace.weights.document import parse_json

_TIMEOUT_S = 300.0
_ONE_WHEEL = ("--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--retries", "1")
_UNREACHABLE = ("Connection", "Temporary failure", "Name or service not known", "timed out", "certificate")


class WheelLocation(Struct, frozen=True):
    """`sha256` is what the index says; "" where it says nothing."""

    url: str
    sha256: str


class Network(Struct, frozen=True):
    """How to reach the outside. None leaves it to the system."""

    cafile: str | None = None
    proxy: str | None = None
    timeout_s: float = 60.0


class PackageIndex(Protocol):
    def find(self, requirement: str) -> WheelLocation: ...

    def network(self) -> Network: ...


class _ArchiveInfo(Struct):
    hashes: dict[str, str] = {}


class _DownloadInfo(Struct):
    url: str
    archive_info: _ArchiveInfo | None = None


class _Install(Struct):
    download_info: _DownloadInfo


class _Report(Struct):
    install: list[_Install]


class PipIndex:
    """`arguments` go to every `pip install`; `cafile` is used where pip's configuration names none."""

    def __init__(self, arguments: Sequence[str] = (), cafile: str | None = None) -> None:
        self._arguments = tuple(arguments)
        self._cafile = cafile

    def find(self, requirement: str) -> WheelLocation:
        """One wheel by `package==version`. An index that serves metadata is not asked for the wheel itself."""
        done = _run_pip("install", "--quiet", *_ONE_WHEEL, *self._arguments, "--report", "-", requirement)
        if done.returncode:
            raise _refusal(requirement, done.stderr)
        report = parse_json(done.stdout.encode(), _Report, "pip's report")
        if len(report.install) != 1:
            raise NotFound(f"pip found {len(report.install)} packages for {requirement}, not one")
        info = report.install[0].download_info
        sha256 = info.archive_info.hashes.get("sha256", "") if info.archive_info else ""
        if not info.url.split("?")[0].endswith(".whl"):
            raise InvalidModel(f"{requirement}: pip offers no wheel of it")
        return WheelLocation(info.url, sha256)

    def network(self) -> Network:
        done = _run_pip("config", "list")
        settings = _parse_settings(done.stdout) if done.returncode == 0 else {}
        return Network(_pick(settings, "cert") or self._cafile, _pick(settings, "proxy"))


def _run_pip(*words: str) -> subprocess.CompletedProcess[str]:
    # -P: a folder named pip where the command is run must not become pip.
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise FetchFailed(f"pip did not answer within {_TIMEOUT_S:g} s: is the package index reachable?") from error
    except OSError as error:
        raise HeadraceError(f"pip could not be started: {error.strerror}") from error


def _refusal(requirement: str, said: str) -> HeadraceError:
    if "No module named pip" in said:
        return HeadraceError(f"{requirement} needs pip to be found, and this Python has none: python -m ensurepip")
    if any(word in said for word in _UNREACHABLE):
        return FetchFailed(f"{requirement} could not be fetched: the package index cannot be reached")
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    return NotFound(f"{requirement} was not found: {errors[-1] if errors else 'pip gave no reason'}")


def _parse_settings(listing: str) -> dict[str, str]:
    """Lines such as global.cert='/some/file.pem': names with Python's spelling of a text."""
    settings = {}
    for line in listing.splitlines():
        key, _, spelled = line.partition("=")
        try:
            value = ast.literal_eval(spelled)
        except (ValueError, SyntaxError):
            continue
        if isinstance(value, str):
            settings[key] = value
    return settings


def _pick(settings: dict[str, str], name: str) -> str | None:
    """In pip's order: the environment, then what is said for this command, then for all."""
    keys = (f":env:.{name}", f"install.{name}", f"global.{name}")
    return next((settings[key] for key in keys if settings.get(key)), None)
