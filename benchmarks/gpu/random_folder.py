"""A model's folder as Hugging Face would ship it, with random bfloat16 weights: shards, config, tokenizer, template.

Owns what lies in the files; loads nothing. Weights are cuts of one random buffer, so that 16 GB are written as quickly as
the disk takes them.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.weights.layout import tensor_dims
from headrace.weights.shape import ModelShape

# Llama-3-8B has 8,192 tokens of context.
SHAPES = {
    "8b": ModelShape("llama", 4096, 32, 32, 8, 128, 14336, 128_256, 8192, 1e-5, 5e5),
    "tiny": ModelShape("llama", 128, 2, 4, 2, 32, 256, 2048, 512, 1e-5, 5e5),
}
SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|turn|>", "<|end_of_turn|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|end_of_turn|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
_DEVIATION = 0.02
_POOL_VALUES = 1 << 26
# Cuts begin at odd places, so that no two matrices are alike.
_STRIDE = 7_368_787
_ONE = 0x3F80


def write_random_folder(folder: Path, shape: ModelShape, num_shards: int) -> int:
    """The bytes of weights that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    dims = tensor_dims(shape)
    shards = _split(dims, num_shards)
    pool = _pool(min(_POOL_VALUES, max(math.prod(size) for size in dims.values()) + _STRIDE))
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor(len(shards)) as threads:
        written = threads.map(
            lambda at: _write_shard(folder / names[at], shards[at], pool, at * 31), range(len(shards))
        )
        total = sum(written)
    weight_map = {tensor: names[at] for at, shard in enumerate(shards) for tensor in shard}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "generation_config.json", {"eos_token_id": _special_id(shape, 1), "do_sample": False})
    _write_tokenizer(folder, shape)
    return total


def first_special_id(shape: ModelShape) -> int:
    return shape.vocab_size - len(SPECIALS)


def _split(dims: dict[str, tuple[int, ...]], num_shards: int) -> list[dict[str, tuple[int, ...]]]:
    """In the model's order, about equally long."""
    each = sum(math.prod(size) for size in dims.values()) / num_shards
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = each
    for name, size in dims.items():
        if room <= 0 and len(shards) < num_shards:
            shards.append({})
            room += each
        shards[-1][name] = size
        room -= math.prod(size)
    return shards


def _pool(count: int) -> NDArray[np.uint16]:
    """Normal numbers as bfloat16, cut off and not rounded."""
    values = np.random.default_rng(0).standard_normal(count, np.float32)
    values *= np.float32(_DEVIATION)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _write_shard(path: Path, dims: dict[str, tuple[int, ...]], pool: NDArray[np.uint16], number: int) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in dims.items():
        start, end = end, end + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb", buffering=0) as file:
        _write(file, len(encoded).to_bytes(8, "little") + encoded)
        for place, (name, size) in enumerate(dims.items()):
            left, at = math.prod(size), (number + place) * _STRIDE % len(pool)
            if "norm" in name:
                _write(file, np.full(left, _ONE, np.uint16).data.cast("B"))
                continue
            while left:
                cut = pool[at : at + left]
                _write(file, cut.data.cast("B"))
                left, at = left - len(cut), 0
    return end


def _write(file: Any, data: bytes | memoryview) -> None:
    """The system takes at most 2 GiB at once."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
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
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": _special_id(shape, 0),
        "eos_token_id": _special_id(shape, 1),
    }


def _write_tokenizer(folder: Path, shape: ModelShape) -> None:
    """Bytes, then made-up words up to the model's vocabulary: every id that random weights choose is text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120w{number}" for number in range(first_special_id(shape) - len(alphabet))]
    vocab = {piece: number for number, piece in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    assert tokenizer.token_to_id(SPECIALS[-1]) == shape.vocab_size - 1
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1], "chat_template": TEMPLATE}
    _write_json(folder / "tokenizer_config.json", config)


def _special_id(shape: ModelShape, number: int) -> int:
    return first_special_id(shape) + number


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document))
