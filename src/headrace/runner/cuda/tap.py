"""Bytes of a checkpoint poured into their places on a device: raw where the device can read them, decoded where not.

Owns the host memory that copies are sent from, and their order. Which tensor goes where is told; nothing is read here.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import InvalidModel
from headrace.runner.cuda.lane import CudaLane, HostLane, Lane
from headrace.weights.encodings import BF16, F16, F32
from headrace.weights.weight_file import StoredTensor

# What is read at once: in the cache still when it is hashed, and long enough for a copy of its own.
SLICE_BYTES = 4 << 20
# Of one thread: one is read into while the others are on their way.
_SLICES = 4
_RAW = {F32.name: torch.float32, F16.name: torch.float16, BF16.name: torch.bfloat16}


class DeviceTap:
    """For one thread, on a lane of its own. `filled` hears of every tensor that is in its place; one without a place is
    let go."""

    def __init__(
        self, lane: Lane, places: Mapping[str, Tensor], filled: set[str], slice_bytes: int = SLICE_BYTES
    ) -> None:
        self._device = lane.device
        self._places = places
        self._filled = filled
        self._letters = deque((lane.letter(slice_bytes // 4), lane.mark()) for _ in range(_SLICES))

    def lend(self) -> memoryview:
        letter, sent = self._letters[0]
        sent.wait()
        return letter.numpy().data.cast("B")

    def take(self, tensor: StoredTensor, start: int, raw: memoryview) -> None:
        letter, sent = self._letters[0]
        self._letters.rotate(-1)
        place = self._places.get(tensor.name)
        if place is None:
            return
        if tensor.dims != tuple(place.shape):
            told = f"tensor {tensor.name} is {tensor.dims}, its config says {tuple(place.shape)}"
            raise InvalidModel(told, param=tensor.name)
        self._put(tensor, start, letter, raw, place.view(-1))
        sent.put()
        if start + len(raw) == tensor.size_bytes:
            if tensor.paired_heads:
                _to_halves(place, tensor.paired_heads)
            self._filled.add(tensor.name)

    def is_finite(self, tensor: StoredTensor) -> bool:
        """Asked of the device, where reading it once more takes no time. Both bounds are NaN where any number is."""
        place = self._places.get(tensor.name)
        return place is None or bool(torch.stack(torch.aminmax(place)).isfinite().all())

    def _put(self, tensor: StoredTensor, start: int, letter: Tensor, raw: memoryview, flat: Tensor) -> None:
        encoding = tensor.encoding
        first = start // encoding.block_bytes * encoding.block_values
        dtype = _RAW.get(encoding.name)
        if dtype is None:
            with np.errstate(all="ignore"):
                values = torch.from_numpy(encoding.decode(np.frombuffer(raw, np.uint8)))
        else:
            values = letter.view(torch.uint8)[: len(raw)].view(dtype)
        if values.dtype != flat.dtype:
            # A copy that also converts would do so on the host.
            values = values.to(self._device, non_blocking=True)
        flat[first : first + len(values)].copy_(values, non_blocking=True)


@contextmanager
def open_tap(places: Mapping[str, Tensor], device: torch.device, filled: set[str]) -> Iterator[DeviceTap]:
    """In the thread that pours: what it is about to do is not inherited from another. At the end everything is there."""
    lane: Lane = HostLane() if device.type == "cpu" else CudaLane(device.index or 0)
    with torch.inference_mode(), lane.scope():
        try:
            yield DeviceTap(lane, places, filled)
        finally:
            lane.settle()


def _to_halves(place: Tensor, heads: int) -> None:
    """Undo GGUF's order of rotary rows: (0, d/2, 1, d/2 + 1, ...) of each head becomes (0, 1, ..., d - 1)."""
    pairs = place.view(heads, place.shape[0] // heads // 2, 2, -1)
    place.copy_(pairs.transpose(1, 2).reshape(place.shape))
