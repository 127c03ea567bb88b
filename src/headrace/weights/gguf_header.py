"""The header of a GGUF file: metadata and where the tensors lie, format versions 2 and 3.

Owns the parsing and its bounds: the library's reader trusts every count it finds, so a bad file
makes it loop or allocate without end. Knows no model; names stay as the file has them.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.errors import InvalidModel
from headrace.weights.encodings import GGUF_ENCODINGS, gguf_encoding_name
from headrace.weights.weight_file import StoredTensor, WeightFile

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

_MOST_HEADER_BYTES = 2**28
_MOST_METADATA = 2**12
_MOST_TENSORS = 2**16
_MOST_ITEMS = 2**22  # of all lists together
_MOST_DIMS = 4
_MOST_NAME_BYTES = 2**16
_READ_BYTES = 2**22
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Value]
    tensors: list[StoredTensor]


def read_gguf_header(file: WeightFile) -> GgufHeader:
    """Everything before the data, checked: tensors lie inside the file and do not overlap."""
    cursor = _Cursor(file)
    if cursor.take(4) != b"GGUF":
        raise InvalidModel(f"{file.path.name}: is not a GGUF file")
    version = cursor.u32()
    if version not in _VERSIONS:
        raise InvalidModel(f"{file.path.name}: GGUF version {version} is not one of {_VERSIONS}")
    num_tensors = cursor.count(_MOST_TENSORS, "tensors")
    num_metadata = cursor.count(_MOST_METADATA, "metadata entries")
    metadata: dict[str, Value] = {}
    for _ in range(num_metadata):
        key = cursor.text(_MOST_NAME_BYTES)
        if key in metadata:
            raise cursor.wrong(f"{key[:80]} appears twice")
        metadata[key] = cursor.value(cursor.u32())
    tensors = [_read_tensor(cursor) for _ in range(num_tensors)]
    return GgufHeader(metadata, _placed(tensors, cursor, _alignment(metadata, cursor)))


def _alignment(metadata: dict[str, Value], cursor: "_Cursor") -> int:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise cursor.wrong("general.alignment is not a power of two")
    return alignment


def _read_tensor(cursor: "_Cursor") -> StoredTensor:
    """With its offset as the file has it: from the start of the data, which is not known yet."""
    name = cursor.text(_MOST_NAME_BYTES)
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MOST_DIMS:
        raise cursor.wrong(f"tensor {name[:80]} has {num_dims} dimensions")
    dims = tuple(cursor.u64() for _ in range(num_dims))
    number = cursor.u32()
    encoding = GGUF_ENCODINGS.get(number)
    if encoding is None:
        raise cursor.wrong(f"tensor {name[:80]} is quantised as {gguf_encoding_name(number)}, which is not read here")
    if not all(0 < dim < 2**40 for dim in dims) or dims[0] % encoding.block_values:
        raise cursor.wrong(f"tensor {name[:80]} of shape {dims} cannot be {encoding.name}")
    size_bytes = math.prod(dims) // encoding.block_values * encoding.block_bytes
    return StoredTensor(name, dims[::-1], encoding, cursor.u64(), size_bytes)


def _placed(tensors: list[StoredTensor], cursor: "_Cursor", alignment: int) -> list[StoredTensor]:
    start = -(-cursor.place // alignment) * alignment
    placed = []
    end = 0
    names = set()
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.name in names:
            raise cursor.wrong(f"tensor {tensor.name[:80]} appears twice")
        names.add(tensor.name)
        if tensor.offset < end or tensor.offset % alignment:
            raise cursor.wrong(f"tensor {tensor.name[:80]} lies at byte {tensor.offset} of the data, where it cannot")
        end = tensor.offset + tensor.size_bytes
        if start + end > cursor.file.size_bytes:
            told = f"tensor {tensor.name[:80]} would end at byte {start + end}, the file has {cursor.file.size_bytes}"
            raise cursor.wrong(told)
        placed.append(StoredTensor(tensor.name, tensor.dims, tensor.encoding, start + tensor.offset, tensor.size_bytes))
    return placed


class _Cursor:
    """Reads forward through the header, which is fetched in pieces as it goes on."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.place = 0
        self._data = bytearray()
        self._items_left = _MOST_ITEMS

    def take(self, size_bytes: int) -> bytes:
        start = self.place
        self._need(start + size_bytes)
        self.place = start + size_bytes
        return bytes(self._data[start : self.place])

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, most: int, noun: str) -> int:
        found = self.u64()
        if found > most:
            raise self.wrong(f"claims {found} {noun}")
        return found

    def text(self, most_bytes: int = _MOST_HEADER_BYTES) -> str:
        size_bytes = self.u64()
        if size_bytes > most_bytes:
            raise self.wrong(f"claims a text of {size_bytes} bytes")
        try:
            return self.take(size_bytes).decode()
        except UnicodeDecodeError as error:
            raise self.wrong("has a text that is not UTF-8") from error

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item_kind = self.u32()
            count = self.count(self._items_left, "items in its lists")
            self._items_left -= count
            return tuple(self._texts(count)) if item_kind == _STRING else tuple(self._numbers(item_kind, count))
        return self._numbers(kind, 1)[0]

    def wrong(self, told: str) -> InvalidModel:
        return InvalidModel(f"{self.file.path.name}: {told}")

    def _numbers(self, kind: int, count: int) -> list[Scalar]:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            raise self.wrong(f"has a metadata value of kind {kind}")
        numbers = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        values: list[Scalar] = (numbers != 0 if kind == _BOOL else numbers).tolist()
        return values

    def _texts(self, count: int) -> list[str]:
        """A vocabulary has a hundred thousand of these, so the loop reads from the buffer itself."""
        texts = []
        place, data, unpack = self.place, self._data, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                if place + 8 > len(data):
                    self._need(place + 8)
                end = place + 8 + unpack(data, place)[0]
                if end > len(data):
                    self._need(end)
                texts.append(data[place + 8 : end].decode())
                place = end
        except UnicodeDecodeError as error:
            raise self.wrong("has a text that is not UTF-8") from error
        self.place = place
        return texts

    def _need(self, end: int) -> None:
        """Have the first `end` bytes of the file at hand."""
        have = len(self._data)
        if end <= have:
            return
        if end > self.file.size_bytes:
            raise self.wrong(f"ends at byte {self.file.size_bytes}, inside its header")
        if end > _MOST_HEADER_BYTES:
            raise self.wrong(f"has a header of more than {_MOST_HEADER_BYTES} bytes")
        more = min(max(end - have, _READ_BYTES), self.file.size_bytes - have)
        self._data += self.file.read_at(have, more)
