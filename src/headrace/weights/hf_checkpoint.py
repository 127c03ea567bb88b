"""A Hugging Face folder as a checkpoint: config, tokenizer, and safetensors in one file or in shards.

Owns how the folder's files belong together. Only names inside the folder are opened.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.core.errors import InvalidModel
from headrace.weights.config import HfConfig, HfGeneration, merge_ids, shape_of_config
from headrace.weights.document import DocumentFolder, parse_json
from headrace.weights.families import family_of_class
from headrace.weights.generation import GenerationDefaults
from headrace.weights.layout import check_tensors, tensor_dims
from headrace.weights.pouring import OpenTap, hash_ahead, pour_files
from headrace.weights.safetensors_header import read_safetensors_header
from headrace.weights.shape import ModelShape
from headrace.weights.tokenizer_files import read_vocabulary
from headrace.weights.vocabulary import Vocabulary
from headrace.weights.weight_file import Progress, StoredTensor, WeightFile, read_files

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_SHARDS = 1024


class _Named(Struct):
    architectures: list[str] | None = None


class _Index(Struct):
    weight_map: dict[str, str]


class HfCheckpoint:
    """Checked when it opens; holds its files open until `close`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._documents = DocumentFolder(folder)
        self._files: list[tuple[WeightFile, list[StoredTensor]]] = []
        try:
            self.shape, self.generation = self._read_config()
            self.vocabulary = read_vocabulary(self._documents, self.shape.vocab_size)
            self.shape = _with_token_ids(self.shape, self.vocabulary)
            self._open_weights()
        except BaseException:
            self.close()
            raise
        self.size_bytes = sum(file.size_bytes for file, _ in self._files)

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, NDArray[np.float32]]]:
        return read_files(self._wanted(), progress)

    def pour(self, open_tap: OpenTap, progress: Progress | None = None) -> None:
        pour_files(self._wanted(), open_tap, progress)

    def hash_ahead(self) -> None:
        hash_ahead([file for file, _ in self._files])

    def digest(self) -> dict[str, str]:
        return self._documents.digests | {file.path.name: file.hash() for file, _ in self._files}

    def close(self) -> None:
        for file, _ in self._files:
            file.close()

    def _wanted(self) -> list[tuple[WeightFile, list[StoredTensor]]]:
        demanded = tensor_dims(self.shape)
        return [(file, [tensor for tensor in tensors if tensor.name in demanded]) for file, tensors in self._files]

    def _read_config(self) -> tuple[ModelShape, GenerationDefaults]:
        data = self._documents.read(_CONFIG)
        if not data:
            raise InvalidModel(f"{self.path.name}: has no {_CONFIG}, so it is not a model's folder", param=_CONFIG)
        # First the name: a model of another kind lacks fields, and would be told so in the wrong words.
        self._family = family_of_class(parse_json(data, _Named, _CONFIG).architectures or [], _CONFIG)
        config = parse_json(data, HfConfig, _CONFIG)
        generation = self._documents.read_json(_GENERATION, HfGeneration) or HfGeneration()
        return shape_of_config(config, generation, _CONFIG), generation.defaults(_GENERATION)

    def _open_weights(self) -> None:
        for name in self._weight_names():
            file = WeightFile(self.path / name)
            self._files.append((file, []))
            tensors = read_safetensors_header(file)
            self._files[-1][1].extend(replace(tensor, name=self._family.tensor_name(tensor.name)) for tensor in tensors)
        found: dict[str, tuple[int, ...]] = {}
        for file, tensors in self._files:
            for tensor in tensors:
                if tensor.name in found:
                    raise InvalidModel(f"{file.path.name}: tensor {tensor.name} is in another shard too")
                found[tensor.name] = tensor.dims
        check_tensors(self.shape, found, self.path.name)

    def _weight_names(self) -> list[str]:
        if (self.path / _WHOLE).exists():
            return [_WHOLE]
        index = self._documents.read_json(_INDEX, _Index)
        if index is None:
            raise InvalidModel(f"{self.path.name}: has neither {_WHOLE} nor {_INDEX}", param=_WHOLE)
        names = sorted(set(index.weight_map.values()))
        if len(names) > _MOST_SHARDS:
            raise InvalidModel(f"{_INDEX}: names {len(names)} shards, more than {_MOST_SHARDS}", param=_INDEX)
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise InvalidModel(f"{_INDEX}: {name[:80]!r} is not the name of a shard", param=_INDEX)
            if not (self.path / name).exists():
                raise InvalidModel(f"{self.path.name}: shard {name[:80]} is missing", param=name)
        return names


def _with_token_ids(shape: ModelShape, vocabulary: Vocabulary) -> ModelShape:
    """What the tokenizer calls the end also ends a generation: chat models often say it only there."""
    more = () if vocabulary.eos_id is None else (vocabulary.eos_id,)
    bos_id = vocabulary.bos_id if shape.bos_id is None else shape.bos_id
    return replace(shape, eos_ids=merge_ids(shape.eos_ids, more), bos_id=bos_id)
