"""A model on disk, whatever its format. Owns the Protocol and the choice by what a path is; reads nothing itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import InvalidModel
from headrace.weights.generation import GenerationDefaults
from headrace.weights.pouring import OpenTap
from headrace.weights.shape import ModelShape
from headrace.weights.vocabulary import Vocabulary
from headrace.weights.weight_file import Progress

__all__ = ["Checkpoint", "GenerationDefaults", "Progress", "open_checkpoint"]


class Checkpoint(Protocol):
    """Open files whose headers were checked: every tensor that the shape demands is there, with its dimensions."""

    shape: ModelShape
    vocabulary: Vocabulary
    generation: GenerationDefaults
    path: Path
    size_bytes: int

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Each tensor once, as a new C-contiguous array under its Hugging Face name, in the order of the files.

        That order is not the model's: take tensors by name. At most one is held here at a time.
        """
        ...

    def pour(self, open_tap: OpenTap, progress: Progress | None = None) -> None:
        """Each tensor once, as it is stored and under its Hugging Face name, several files at a time: quicker than
        `tensors` where the bytes are wanted as they are. `progress` is called by the caller's thread."""
        ...

    def hash_ahead(self) -> None:
        """Begin with the digest, in threads: for who has long to wait before it can `pour`, which then only pours."""
        ...

    def digest(self) -> dict[str, str]:
        """sha256 by file name. Free once `tensors` or `pour` came to its end, or what was begun ahead; before that the files
        are read for it."""
        ...

    def close(self) -> None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """A folder is Hugging Face's, a file named *.gguf is GGUF. What reads it is imported here: processes over the fake
    start without, and that is a tenth of their start."""
    if path.is_dir():
        from headrace.weights.hf_checkpoint import HfCheckpoint

        return HfCheckpoint(path)
    if path.suffix.lower() == ".gguf":
        from headrace.weights.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    told = "is neither a folder nor a .gguf file" if path.exists() else "does not exist"
    raise InvalidModel(f"{path}: {told}")
