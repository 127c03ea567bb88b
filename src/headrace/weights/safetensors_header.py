"""The header of a safetensors file: eight bytes of length, JSON, then data. Owns its checks; knows no model.

The library would give bf16 only as torch tensors, and the format is one JSON object.
"""

import math
import struct

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidModel
from headrace.weights.encodings import SAFETENSORS_ENCODINGS
from headrace.weights.weight_file import StoredTensor, WeightFile

_MOST_HEADER_BYTES = 100_000_000  # the format's own bound
_MOST_DIMS = 8


class _Entry(Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors_header(file: WeightFile) -> list[StoredTensor]:
    """Every tensor of the file, in the order of its data, which they cover without a gap or an overlap."""
    length = int(struct.unpack("<Q", file.read_at(0, 8))[0])
    if length > _MOST_HEADER_BYTES:
        raise InvalidModel(f"{file.path.name}: its header claims {length} bytes")
    entries = _decode(file.read_at(8, length), file.path.name)
    start = 8 + length
    place = 0
    tensors = []
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != place or end < begin or start + end > file.size_bytes:
            told = f"tensor {name} lies at bytes {begin} to {end}, where it cannot"
            raise InvalidModel(f"{file.path.name}: {told}", param=name)
        tensors.append(_tensor(name, entry, start, file.path.name))
        place = end
    if start + place != file.size_bytes:
        raise InvalidModel(f"{file.path.name}: has {file.size_bytes - start - place} bytes that belong to no tensor")
    return tensors


def _decode(header: bytes, source: str) -> dict[str, _Entry]:
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        return {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidModel(f"{source}: its header is not what safetensors demands ({error})") from error


def _tensor(name: str, entry: _Entry, start: int, source: str) -> StoredTensor:
    encoding = SAFETENSORS_ENCODINGS.get(entry.dtype)
    if encoding is None:
        told = f"tensor {name} is {entry.dtype[:20]}; only {', '.join(SAFETENSORS_ENCODINGS)} are read"
        raise InvalidModel(f"{source}: {told}", param=name)
    begin, end = entry.data_offsets
    plausible = len(entry.shape) <= _MOST_DIMS and all(0 < dim < 2**40 for dim in entry.shape)
    if not plausible or math.prod(entry.shape) * encoding.block_bytes != end - begin:
        told = f"tensor {name} of shape {entry.shape[:_MOST_DIMS]} does not fill its {end - begin} bytes"
        raise InvalidModel(f"{source}: {told}", param=name)
    return StoredTensor(name, tuple(entry.shape), encoding, start + begin, end - begin)
