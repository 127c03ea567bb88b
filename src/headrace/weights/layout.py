"""Which tensors a shape demands, under their Hugging Face names and with their dimensions. Reads no file."""

import math
import re
from collections.abc import Iterator, Mapping

from headrace.core.errors import InvalidModel
from headrace.weights.shape import ModelShape

# Written by old versions of transformers; follows from the shape.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")


def tensor_dims(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model: embeddings, the layers in order, the last norm, the head unless it is tied."""
    dims: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size)}
    for layer in range(shape.num_layers):
        dims.update((f"model.layers.{layer}.{name}", size) for name, size in _layer_dims(shape, layer))
    dims["model.norm.weight"] = (shape.hidden_size,)
    if not shape.tied_embeddings:
        dims["lm_head.weight"] = (shape.vocab_size, shape.hidden_size)
    return dims


def num_parameters(shape: ModelShape) -> int:
    return sum(math.prod(dims) for dims in tensor_dims(shape).values())


def check_tensors(shape: ModelShape, found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuse unless `found` is exactly what the shape demands. What is derived, or tied and stored twice, may lie there."""
    demanded = tensor_dims(shape)
    for name, dims in demanded.items():
        if name not in found:
            raise InvalidModel(f"{source}: tensor {name} is missing", param=name)
        if found[name] != dims:
            raise InvalidModel(f"{source}: tensor {name} is {found[name]}, its config says {dims}", param=name)
    for name in found.keys() - demanded.keys():
        if name != "lm_head.weight" and not _DERIVED.fullmatch(name):
            raise InvalidModel(f"{source}: tensor {name} has no place in a {shape.architecture} model", param=name)


def _layer_dims(shape: ModelShape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = shape.hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "input_layernorm.weight", (hidden,)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if shape.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", (shape.head_dim,)
        yield "self_attn.k_norm.weight", (shape.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if shape.output_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    experts = shape.experts_of(layer)
    if experts is None:
        yield from _feed_forward_dims("mlp", hidden, shape.intermediate_size)
        return
    yield "mlp.gate.weight", (experts.num_experts, hidden)
    for expert in range(experts.num_experts):
        yield from _feed_forward_dims(f"mlp.experts.{expert}", hidden, experts.inner_size)


def _feed_forward_dims(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)
