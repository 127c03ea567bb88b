"""Tiny models on disk for these tests: Hugging Face folders and GGUF files with random weights."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from headrace.weights.layout import tensor_dims
from headrace.weights.shape import ModelShape

Tensors = dict[str, NDArray[np.float32]]

CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
PIECES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(97 + place) for place in range(26)), "ab", "cd")


def tiny_shape(**others: Any) -> ModelShape:
    fields: dict[str, Any] = {
        "architecture": "llama",
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 40,
        "context_len": 128,
        "rms_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
    return ModelShape(**(fields | others))


def random_tensors(shape: ModelShape, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.5, dims).astype(np.float32) for name, dims in tensor_dims(shape).items()}


def config_of(shape: ModelShape, **others: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [CLASSES.get(shape.architecture, "Qwen3ForCausalLM")],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_len,
        "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_bias": shape.qkv_bias,
    }
    return config | others


def as_bytes(values: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32]], dtype: str = "F32") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        raw = as_bytes(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    write_raw_safetensors(path, header, data)


def write_raw_safetensors(path: Path, header: object, data: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_folder(
    folder: Path,
    shape: ModelShape,
    tensors: Tensors | None = None,
    *,
    dtype: str = "F32",
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(shape) if tensors is None else tensors
    write_json(folder / "config.json", config_of(shape, **(config or {})))
    write_tokenizer(folder)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        write_safetensors(folder / name, part, dtype)
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def write_tokenizer(folder: Path, pieces: tuple[str, ...] = PIECES, **config: Any) -> None:
    added = [{"id": place, "content": piece, "special": True} for place, piece in enumerate(pieces[:3])]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    write_json(folder / "tokenizer.json", {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added})
    write_json(folder / "tokenizer_config.json", {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} | config)


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document))


_GGUF_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in _GGUF_OUTSIDE:
        return _GGUF_OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    inside, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_INSIDE[inside]}.{kind}"


def permute(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp's conversion does to the rows of Q and K."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    path: Path,
    shape: ModelShape,
    tensors: Tensors | None = None,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    change: Callable[[GGUFWriter], None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """`metadata` replaces what would be written, None leaves a key out."""
    tensors = random_tensors(shape) if tensors is None else tensors
    writer = GGUFWriter(path, shape.architecture)
    for key, value in (_metadata(shape) | dict(metadata or {})).items():
        add_value(writer, key, value)
    for name, values in tensors.items():
        if shape.architecture == "llama" and "q_proj" in name:
            values = permute(values, shape.num_heads)
        if shape.architecture == "llama" and "k_proj" in name:
            values = permute(values, shape.num_kv_heads)
        stored = kind if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(values, stored), raw_dtype=stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(shape: ModelShape) -> dict[str, Any]:
    prefix = shape.architecture
    return {
        f"{prefix}.block_count": shape.num_layers,
        f"{prefix}.context_length": shape.context_len,
        f"{prefix}.embedding_length": shape.hidden_size,
        f"{prefix}.feed_forward_length": shape.intermediate_size,
        f"{prefix}.attention.head_count": shape.num_heads,
        f"{prefix}.attention.head_count_kv": shape.num_kv_heads,
        f"{prefix}.attention.key_length": shape.head_dim,
        f"{prefix}.attention.value_length": shape.head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": shape.rms_eps,
        f"{prefix}.rope.freq_base": shape.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(PIECES),
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(PIECES) - 3),
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
