"""A GGUF file as a checkpoint: its tensors under Hugging Face names and in Hugging Face order.

Owns the translation of names. The header is parsed in `gguf_header`, metadata is read in `gguf_metadata`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from headrace.core.errors import InvalidModel
from headrace.weights.encodings import F32
from headrace.weights.families import family_of_gguf
from headrace.weights.families.family import Family
from headrace.weights.generation import GenerationDefaults
from headrace.weights.gguf_header import read_gguf_header
from headrace.weights.gguf_metadata import GgufMetadata, shape_of_metadata, vocabulary_of_metadata
from headrace.weights.layout import check_tensors
from headrace.weights.pouring import OpenTap, hash_ahead, pour_files
from headrace.weights.shape import ModelShape
from headrace.weights.weight_file import Progress, StoredTensor, WeightFile, read_files

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# All experts of a layer in one tensor, one after another.
_STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_MOST_ROPE_FACTORS = 1024


class GgufCheckpoint:
    """Checked when it opens; holds its file open until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = GenerationDefaults()
        self._file = WeightFile(path)
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise
        self.size_bytes = self._file.size_bytes

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, NDArray[np.float32]]]:
        return read_files([(self._file, self._tensors)], progress)

    def pour(self, open_tap: OpenTap, progress: Progress | None = None) -> None:
        pour_files([(self._file, self._tensors)], open_tap, progress)

    def hash_ahead(self) -> None:
        hash_ahead([self._file])

    def digest(self) -> dict[str, str]:
        return {self.path.name: self._file.hash()}

    def close(self) -> None:
        self._file.close()

    def _read_header(self) -> None:
        header = read_gguf_header(self._file)
        source = self.path.name
        metadata = GgufMetadata(header, source)
        family = family_of_gguf(metadata.get("general.architecture", str), source)
        stored = {tensor.name: tensor for tensor in header.tensors}
        self.vocabulary = vocabulary_of_metadata(metadata)
        self.shape = shape_of_metadata(
            metadata,
            family,
            self.vocabulary,
            tensor_names=stored.keys(),
            vocab_size=_embedding_rows(stored, len(self.vocabulary.pieces), source),
            rope_factors=_rope_factors(stored.pop(_ROPE_FACTORS, None), self._file),
            source=source,
        )
        self._tensors = [part for tensor in stored.values() for part in _translate(tensor, family, self.shape, source)]
        check_tensors(self.shape, {tensor.name: tensor.dims for tensor in self._tensors}, source)


def _embedding_rows(stored: dict[str, StoredTensor], num_pieces: int, source: str) -> int:
    """The embeddings say how many ids there are: some files pad them, some leave `vocab_size` out."""
    embeddings = stored.get("token_embd.weight")
    if embeddings is None:
        raise InvalidModel(f"{source}: tensor token_embd.weight is missing", param="token_embd.weight")
    rows = embeddings.dims[0]
    if not 0 < num_pieces <= rows:
        told = f"its vocabulary has {num_pieces} pieces, the embeddings have {rows} rows"
        raise InvalidModel(f"{source}: {told}", param="tokenizer.ggml.tokens")
    return rows


def _rope_factors(tensor: StoredTensor | None, file: WeightFile) -> tuple[float, ...]:
    if tensor is None:
        return ()
    if tensor.encoding is not F32 or len(tensor.dims) != 1 or tensor.dims[0] > _MOST_ROPE_FACTORS:
        raise InvalidModel(f"{file.path.name}: {_ROPE_FACTORS} is not a short list of F32", param=_ROPE_FACTORS)
    return tuple(np.frombuffer(file.read_at(tensor.offset, tensor.size_bytes), "<f4").tolist())


def _translate(tensor: StoredTensor, family: Family, shape: ModelShape, source: str) -> list[StoredTensor]:
    outside = _OUTSIDE.get(tensor.name)
    if outside is not None:
        return [replace(tensor, name=outside)]
    match = _LAYER.fullmatch(tensor.name)
    # Only in layers that are there: each of these becomes as many tensors as there are experts.
    if match is not None and match[2] in _STACKED and match[3] == "weight" and int(match[1]) < shape.num_layers:
        return _unstack(tensor, f"model.layers.{match[1]}.mlp.experts", _STACKED[match[2]], shape, source)
    if match is None or match[2] not in _INSIDE:
        told = f"tensor {tensor.name[:80]} has no place in a {family.name} model"
        raise InvalidModel(f"{source}: {told}", param=tensor.name[:80])
    name = f"model.layers.{match[1]}.{_INSIDE[match[2]]}.{match[3]}"
    paired = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads} if family.paired_in_gguf else {}
    return [replace(tensor, name=name, paired_heads=paired.get(match[2], 0))]


def _unstack(tensor: StoredTensor, prefix: str, part: str, shape: ModelShape, source: str) -> list[StoredTensor]:
    count = 0 if shape.experts is None else shape.experts.num_experts
    if len(tensor.dims) != 3 or tensor.dims[0] != count:
        told = f"tensor {tensor.name} is {tensor.dims}, its metadata says {count} experts"
        raise InvalidModel(f"{source}: {told}", param=tensor.name)
    each = tensor.size_bytes // count
    return [
        replace(
            tensor,
            name=f"{prefix}.{expert}.{part}.weight",
            dims=tensor.dims[1:],
            offset=tensor.offset + expert * each,
            size_bytes=each,
        )
        for expert in range(count)
    ]
