"""From a checkpoint's tensors to the decoder's packed weights, a layer at a time.

Owns fusing (Q, K and V; gate and up), folding (norms, rotation) and which dtype each matrix gets. Arrays are
dropped as soon as their layer is packed. Knows Hugging Face's names; knows neither plans nor memory limits.
"""

from collections.abc import Iterable

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.errors import InvalidModel
from headrace.runner.torch.decoder import DecoderWeights, Layer
from headrace.runner.torch.int4 import GROUP, Int4Linear
from headrace.runner.torch.int8 import Int8Linear
from headrace.runner.torch.kernels import OneDnnKernel
from headrace.runner.torch.linear import Fp32Linear, Linear, Norm
from headrace.runner.torch.planes import RowPlanes
from headrace.runner.torch.rotation import Rotation
from headrace.weights.layout import tensor_dims
from headrace.weights.shape import ModelShape

_LAYER = "model.layers."

# Planes of (activations, weights) by role: 8 bits each, or 15 where SmolLM2 needs them to choose the same token as
# fp32 at 97 positions of 100 (int8) or 93 (int4). In int4 only the head has weight planes, the rest has groups.
PLANES: dict[str, dict[str, tuple[int, int]]] = {
    "int8": {"qkv": (1, 2), "out": (1, 2), "gate_up": (1, 2), "down": (2, 2), "head": (2, 2)},
    "int4": {"qkv": (2, 1), "out": (1, 1), "gate_up": (1, 1), "down": (2, 1), "head": (2, 2)},
}


class Recipe(Struct, frozen=True):
    """How matrices are packed. `ladder` chooses among integer kernels that agree; it changes no result."""

    dtype: str = "int8"
    ladder: tuple[tuple[int, str], ...] = ((1 << 30, "wide"),)
    min_rows: int = 2

    def numerics(self) -> tuple[object, ...]:
        """What results depend on."""
        return (self.dtype, self.min_rows, sorted(PLANES.get(self.dtype, {}).items()))


def packed_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """About what packed weights take, from the shape alone."""
    copies = {"wide": 4.0, "onednn": float(OneDnnKernel.COPIES)}
    total = 4.0 * shape.vocab_size * shape.hidden_size
    kinds = {name for _, name in recipe.ladder}
    integer = sum(copies[name] for name in kinds)
    for role, count in _role_sizes(shape).items():
        if recipe.dtype == "fp32":
            total += 4.0 * count
        elif recipe.dtype == "int4" and role != "head":
            total += (0.5625 + 0.125) * count
        else:
            total += integer * PLANES[recipe.dtype][role][1] * count
    return int(total)


def _role_sizes(shape: ModelShape) -> dict[str, int]:
    """Weights of all layers by role."""
    hidden, inner, layers = shape.hidden_size, shape.intermediate_size, shape.num_layers
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "qkv": layers * hidden * (queries + 2 * keys),
        "out": layers * hidden * queries,
        "gate_up": layers * hidden * 2 * inner,
        "down": layers * hidden * inner,
        "head": shape.vocab_size * hidden,
    }


class Packer:
    """Takes tensors in any order; `finish` returns the weights or says what is missing."""

    def __init__(self, shape: ModelShape, recipe: Recipe, max_rows: int) -> None:
        self._shape = shape
        self._recipe = recipe
        self._max_rows = max_rows
        self._dims = tensor_dims(shape)
        self._waiting: dict[str, Tensor] = {}
        self._layers: dict[int, Layer] = {}
        self._planes: dict[tuple[int, int], RowPlanes] = {}
        self._rotated = recipe.dtype == "int8"
        self._residual = Rotation(shape.hidden_size)
        self._value = Rotation(shape.head_dim)
        self._layer_names: list[str] = [name.split(".", 3)[3] for name in self._dims if name.startswith(f"{_LAYER}0.")]

    def take(self, tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> None:
        for name, array in tensors:
            if name not in self._dims:
                continue
            if array.shape != self._dims[name]:
                raise InvalidModel(f"tensor {name} is {array.shape}, its config says {self._dims[name]}", param=name)
            self._waiting[name] = torch.from_numpy(array)
            if name.startswith(_LAYER):
                self._pack_if_whole(int(name.split(".", 3)[2]))

    def finish(self) -> DecoderWeights:
        missing = [index for index in range(self._shape.num_layers) if index not in self._layers]
        for name in self._dims:
            if not name.startswith(_LAYER) and name not in self._waiting:
                raise InvalidModel(f"tensor {name} is missing", param=name)
        if missing:
            raise InvalidModel(f"layer {missing[0]} is incomplete", param=f"{_LAYER}{missing[0]}")
        embeddings = self._waiting.pop("model.embed_tokens.weight")
        norm = Norm(self._waiting.pop("model.norm.weight"), self._shape.rms_eps)
        tied = self._shape.tied_embeddings
        head = self._pack(embeddings if tied else self._waiting.pop("lm_head.weight"), "head", norm=norm)
        if self._rotated:
            embeddings = self._residual.turn_inputs(embeddings)
        return DecoderWeights(embeddings, tuple(self._layers[index] for index in sorted(self._layers)), head)

    def _pack_if_whole(self, index: int) -> None:
        names = {name: f"{_LAYER}{index}.{name}" for name in self._layer_names}
        if all(name in self._waiting for name in names.values()):
            self._layers[index] = self._pack_layer({short: self._waiting.pop(name) for short, name in names.items()})

    def _pack_layer(self, tensors: dict[str, Tensor]) -> Layer:
        shape = self._shape
        weights = {name: tensors[f"self_attn.{name}_proj.weight"] for name in "qkvo"}
        biases = {name: tensors.get(f"self_attn.{name}_proj.bias") for name in "qkvo"}
        if self._rotated:
            weights["v"], weights["o"], biases["v"] = self._turn_values(weights["v"], weights["o"], biases["v"])
        parts = [biases[name] for name in "qkv"]
        bias = torch.cat([part for part in parts if part is not None]) if shape.qkv_bias else None
        qk_norm = None
        if shape.qk_norm:
            each = tensors["self_attn.q_norm.weight"], tensors["self_attn.k_norm.weight"]
            qk_norm = torch.cat((each[0].repeat(shape.num_heads, 1), each[1].repeat(shape.num_kv_heads, 1)))
        before = Norm(tensors["input_layernorm.weight"], shape.rms_eps)
        after = Norm(tensors["post_attention_layernorm.weight"], shape.rms_eps)
        gate_up = torch.cat((tensors["mlp.gate_proj.weight"], tensors["mlp.up_proj.weight"])).neg_()
        return Layer(
            qkv=self._pack(torch.cat([weights[name] for name in "qkv"]), "qkv", bias=bias, norm=before),
            out=self._pack(weights["o"], "out", bias=biases["o"]),
            gate_up=self._pack(gate_up, "gate_up", norm=after),
            down=self._pack(tensors["mlp.down_proj.weight"], "down"),
            qk_norm=qk_norm,
        )

    def _turn_values(self, value: Tensor, out: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Each head's values are written turned, and read by the output projection as such."""
        dim, hidden = self._shape.head_dim, self._shape.hidden_size
        by_head = value.view(-1, dim, hidden).transpose(1, 2).reshape(-1, dim)
        turned = self._value.turn_inputs(by_head).view(-1, hidden, dim).transpose(1, 2).reshape(value.shape)
        if bias is not None:
            bias = self._value.turn_inputs(bias.view(-1, dim)).view(-1)
        return turned, self._value.turn_inputs(out.reshape(-1, dim)).view(out.shape), bias

    def _pack(self, weight: Tensor, role: str, *, bias: Tensor | None = None, norm: Norm | None = None) -> Linear:
        recipe = self._recipe
        if recipe.dtype == "fp32":
            return Fp32Linear(weight, bias=bias, norm=norm, min_rows=recipe.min_rows)
        planes, weight_planes = PLANES[recipe.dtype][role]
        if recipe.dtype == "int4" and role != "head" and weight.shape[1] % GROUP == 0:
            return Int4Linear(
                weight, bias=bias, norm=norm, min_rows=recipe.min_rows, planes_of=self._planes_of, planes=planes
            )
        if self._rotated:
            weight, norm, bias = self._rotate(weight, role, norm, bias)
        return Int8Linear(
            weight,
            bias=bias,
            norm=norm,
            ladder=recipe.ladder,
            planes_of=self._planes_of,
            planes=planes,
            weight_planes=weight_planes,
        )

    def _rotate(
        self, weight: Tensor, role: str, norm: Norm | None, bias: Tensor | None
    ) -> tuple[Tensor, Norm | None, Tensor | None]:
        if role in ("out", "down"):
            return (
                self._residual.turn_outputs(weight),
                norm,
                None if bias is None else self._residual.turn_outputs(bias),
            )
        assert norm is not None
        turned = self._residual.turn_inputs(weight * norm.weight)
        return turned, Norm(torch.ones_like(norm.weight), norm.eps), bias

    def _planes_of(self, width: int, planes: int) -> RowPlanes:
        key = (width, planes)
        if key not in self._planes:
            self._planes[key] = RowPlanes(self._max_rows, width, planes)
        return self._planes[key]
