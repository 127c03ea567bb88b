"""A decoder's weights on a device: QKV and gate-up fused, everything in one dtype. From a checkpoint, or random.

Knows Hugging Face's names. A checkpoint is poured into its fused places on the device, as it is stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import InvalidModel
from headrace.runner.cuda.tap import open_tap
from headrace.weights.checkpoint import Checkpoint, Progress
from headrace.weights.layout import tensor_dims
from headrace.weights.shape import ModelShape

_LAYER = "model.layers."
_DEVIATION = 0.02


@dataclass(slots=True, frozen=True)
class LayerScales:
    """One number [1] for each matrix in eight bits: what it is to be multiplied with."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True, frozen=True)
class LayerWeights:
    """Matrices are [out, in]; `gate_up` holds the gate's rows first. With a router, `gate_up` and `down` are
    [experts, out, in]. With scales, matrices are in eight bits."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    router: Tensor | None = None
    scales: LayerScales | None = None

    @property
    def kind(self) -> tuple[torch.Size | None, ...]:
        """Layers of one kind run the same kernels."""
        parts = (getattr(self, name) for name in LayerWeights.__slots__)
        return tuple(part.shape if isinstance(part, Tensor) else None for part in parts)


@dataclass(slots=True, frozen=True)
class Weights:
    embeddings: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    @property
    def size_bytes(self) -> int:
        """What is stored; a tied head is stored once."""
        tensors = [self.embeddings, self.norm]
        tensors += [] if self.head is self.embeddings else [self.head]
        for layer in self.layers:
            parts = [getattr(layer, name) for name in LayerWeights.__slots__]
            parts += [getattr(layer.scales, name) for name in LayerScales.__slots__] if layer.scales else []
            tensors += [part for part in parts if isinstance(part, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def kinds(self) -> "Weights":
        """The same with one layer of each kind, and one more to be the last, if there are more."""
        kinds = tuple({layer.kind: layer for layer in self.layers}.values())
        return replace(self, layers=kinds if len(kinds) == len(self.layers) else (*kinds, self.layers[-1]))


WeightSource = Callable[[ModelShape, torch.device, torch.dtype], Weights]


def weights_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """From the shape alone."""
    sizes = (int(np.prod(dims, dtype=np.int64)) for dims in tensor_dims(shape).values())
    return sum(sizes) * dtype.itemsize


def from_checkpoint(checkpoint: Checkpoint, progress: Progress | None = None) -> WeightSource:
    def load(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Weights:
        weights = _empty(shape, device, dtype)
        places = _places(shape, weights)
        filled: set[str] = set()
        checkpoint.pour(lambda: open_tap(places, device, filled), progress)
        for name in places:
            if name not in filled:
                raise InvalidModel(f"tensor {name} is missing", param=name)
        return weights

    return load


def blank_weights(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Weights:
    """One layer of each kind, and whatever its memory holds: for who asks what a model of this shape would run."""
    kinds = _empty(shape, torch.device("meta"), dtype).kinds()

    def place(part: Tensor) -> Tensor:
        return torch.empty(part.shape, device=device, dtype=part.dtype)

    def place_all(layer: LayerWeights) -> LayerWeights:
        parts = ((name, getattr(layer, name)) for name in LayerWeights.__slots__)
        placed: dict[str, Any] = {name: place(part) for name, part in parts if isinstance(part, Tensor)}
        return replace(layer, **placed)

    embeddings = place(kinds.embeddings)
    head = embeddings if shape.tied_embeddings else place(kinds.head)
    return Weights(embeddings, tuple(map(place_all, kinds.layers)), place(kinds.norm), head)


def random_weights(seed: int = 0) -> WeightSource:
    """Of the model's shape, for benchmarks: normal, small, and norms of one."""

    def load(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Weights:
        weights = _empty(shape, device, dtype)
        generator = torch.Generator(device).manual_seed(seed)
        for name, place in _places(shape, weights).items():
            if "norm" in name:
                place.fill_(1.0)
            else:
                place.normal_(0.0, _DEVIATION, generator=generator)
        return weights

    return load


def _empty(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Weights:
    def make(*dims: int) -> Tensor:
        return torch.empty(dims, device=device, dtype=dtype)

    hidden = shape.hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=make(hidden),
            qkv=make(queries + 2 * keys, hidden),
            qkv_bias=make(queries + 2 * keys) if shape.qkv_bias else None,
            q_norm=make(shape.head_dim) if shape.qk_norm else None,
            k_norm=make(shape.head_dim) if shape.qk_norm else None,
            out=make(hidden, queries),
            out_bias=make(hidden) if shape.output_bias else None,
            post_norm=make(hidden),
            **_feed_forward(shape, index, make),  # type: ignore[arg-type]
        )
        for index in range(shape.num_layers)
    )
    embeddings = make(shape.vocab_size, hidden)
    head = embeddings if shape.tied_embeddings else make(shape.vocab_size, hidden)
    return Weights(embeddings, layers, make(hidden), head)


def _feed_forward(shape: ModelShape, layer: int, make: Callable[..., Tensor]) -> dict[str, Tensor]:
    hidden, experts = shape.hidden_size, shape.experts_of(layer)
    if experts is None:
        inner = shape.intermediate_size
        return {"gate_up": make(2 * inner, hidden), "down": make(hidden, inner)}
    count, inner = experts.num_experts, experts.inner_size
    return {
        "gate_up": make(count, 2 * inner, hidden),
        "down": make(count, hidden, inner),
        "router": make(count, hidden),
    }


def _feed_forward_places(layer: LayerWeights) -> dict[str, Tensor]:
    if layer.router is None:
        return _gated_places("mlp", layer.gate_up, layer.down)
    places = {"mlp.gate.weight": layer.router}
    for expert, (gate_up, down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
        places |= _gated_places(f"mlp.experts.{expert}", gate_up, down)
    return places


def _gated_places(prefix: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2)
    return {
        f"{prefix}.gate_proj.weight": gate,
        f"{prefix}.up_proj.weight": up,
        f"{prefix}.down_proj.weight": down,
    }


def _places(shape: ModelShape, weights: Weights) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint goes."""
    places = {"model.embed_tokens.weight": weights.embeddings, "model.norm.weight": weights.norm}
    if not shape.tied_embeddings:
        places["lm_head.weight"] = weights.head
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    spans = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}
    for index, layer in enumerate(weights.layers):
        named: dict[str, Tensor | None] = {
            "input_layernorm.weight": layer.input_norm,
            "post_attention_layernorm.weight": layer.post_norm,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "self_attn.o_proj.weight": layer.out,
            "self_attn.o_proj.bias": layer.out_bias,
            **_feed_forward_places(layer),
        }
        for letter, (low, high) in spans.items():
            named[f"self_attn.{letter}_proj.weight"] = layer.qkv[low:high]
            named[f"self_attn.{letter}_proj.bias"] = None if layer.qkv_bias is None else layer.qkv_bias[low:high]
        places.update((f"{_LAYER}{index}.{name}", place) for name, place in named.items() if place is not None)
    return places
