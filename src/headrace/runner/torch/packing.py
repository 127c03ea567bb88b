"""From a checkpoint's tensors to the decoder's packed weights, a layer at a time.

Owns fusing (Q, K and V; gate and up), folding (norms, rotation) and which dtype each matrix gets. Arrays are
dropped as soon as their layer is packed. Knows Hugging Face's names; knows neither plans nor how much memory there is.
Threads pack: kernels' own forms of a matrix are made by one thread each, and take most of the time on some processors.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import BoundedSemaphore, Lock
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.errors import InvalidModel
from headrace.runner.torch.decoder import DecoderWeights, Layer
from headrace.runner.torch.experts import Experts
from headrace.runner.torch.feed_forward import PlainFeedForward
from headrace.runner.torch.int4 import GROUP, Int4Linear
from headrace.runner.torch.int8 import Int8Linear
from headrace.runner.torch.kernels import LARGEST, weight_bytes
from headrace.runner.torch.linear import Fp32Linear, JoinedLinear, Linear, Norm
from headrace.runner.torch.planes import RowPlanes
from headrace.runner.torch.rotation import Rotation
from headrace.weights.layout import tensor_dims
from headrace.weights.shape import ExpertShape, ModelShape

_LAYER = "model.layers."
# That pack, at most; so many layers and one more are in memory as they were read, and these are no larger part of what is spare.
_MOST_THREADS = 8
_PART = 0.5
# Of the head: each is a product more in every step.
_MOST_HEAD_PARTS = 2
Packed = TypeVar("Packed")

# Planes of (activations, weights) by role: 8 and 7 bits, or 15 and 14 where SmolLM2 needs them to choose the same token as
# fp32 at 97 positions of 100 (int8) or 93 (int4). In int4 only head and router have weight planes, the rest has
# groups. A router is small, and another rounding of its scores may choose other experts: it has all bits, and integers,
# whose sums no row count can move.
PLANES: dict[str, dict[str, tuple[int, int]]] = {
    "int8": {"qkv": (1, 2), "out": (1, 2), "gate_up": (1, 2), "down": (2, 2), "head": (2, 2), "router": (2, 2)},
    "int4": {
        "qkv": (2, 1),
        "out": (1, 1),
        "gate_up": (1, 1),
        "down": (2, 1),
        "head": (2, 2),
        "router": (2, 2),
    },
}
# Roles whose matrices write to the residual stream; the others read it.
_OUTPUT_ROLES = ("out", "down")
# Roles whose weights are never 4-bit groups.
_WIDE_ROLES = ("head", "router")
# Row counts that every expert sees before the first step: after doubling, one that kernels pad to and the next.
_REHEARSED_ROWS = (1, 8)


class Recipe(Struct, frozen=True):
    """How matrices are packed. `kernel` is one of several for integers that agree; it changes no result."""

    dtype: str = "int8"
    kernel: str = "wide"
    min_rows: int = 2

    def numerics(self) -> tuple[object, ...]:
        """What results depend on."""
        padding = () if self.dtype == "int8" else (self.min_rows,)
        integers = (LARGEST, sorted(PLANES[self.dtype].items())) if self.dtype in PLANES else ()
        return (self.dtype, *padding, *integers)


def packed_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """About what packed weights take, from the shape alone."""
    total = 4.0 * shape.vocab_size * shape.hidden_size
    for role, (count, width) in _role_sizes(shape).items():
        if recipe.dtype == "fp32":
            total += 4.0 * count
        elif recipe.dtype == "int4" and role not in _WIDE_ROLES:
            total += (0.5625 + 0.125) * count
        else:
            total += weight_bytes(recipe.kernel, width) * PLANES[recipe.dtype][role][1] * count
    return int(total)


def _role_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Weights of all layers by role, and how wide their matrices are; of several widths the least."""
    hidden, layers = shape.hidden_size, shape.num_layers
    inner, routed = shape.num_dense_layers * shape.intermediate_size, 0
    if shape.experts is not None:
        routed = (layers - shape.num_dense_layers) * shape.experts.num_experts
        inner += routed * shape.experts.inner_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "qkv": (layers * hidden * (queries + 2 * keys), hidden),
        "out": (layers * hidden * queries, queries),
        "gate_up": (hidden * 2 * inner, hidden),
        "down": (hidden * inner, min(shape.inner_sizes)),
        "router": (hidden * routed, hidden),
        "head": (shape.vocab_size * hidden, hidden),
    }


def num_threads(shape: ModelShape, spare_bytes: float) -> int:
    """That pack, where so much memory is left beside the packed weights. 0: each layer is packed before more is read."""
    sizes = _role_sizes(shape)
    layer_bytes = 4.0 * sum(count for role, (count, _) in sizes.items() if role != "head") / shape.num_layers
    room = int(_PART * spare_bytes / layer_bytes) - 1
    return max(0, min(room, torch.get_num_threads(), _MOST_THREADS))


class Packer:
    """Takes tensors in any order; `finish` returns the weights or says what is missing. What fails in a thread fails the next
    call. Then it is closed, which waits for what is being packed.

    Each thread computes alone: where products are shared among several, their last bits depend on how many there are.
    Torch takes what a thread says of that for what all that come after it want: one packer at a time.
    """

    def __init__(self, shape: ModelShape, recipe: Recipe, max_rows: int, threads: int = 2) -> None:
        """With no `threads` of its own, whoever brings a layer waits until it is packed."""
        self._shape = shape
        self._recipe = recipe
        self._max_rows = max_rows
        self._dims = tensor_dims(shape)
        self._waiting: dict[str, Tensor] = {}
        self._layers: dict[int, Future[Layer]] = {}
        self._planes: dict[tuple[int, int], RowPlanes] = {}
        self._planes_lock = Lock()
        self._is_waited_for = not threads
        self._num_threads = max(1, threads)
        self._num_cores = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._num_threads, "pack", torch.set_num_threads, (1,))
        self._room = BoundedSemaphore(self._num_threads)
        self._failed: list[Future[Any]] = []
        self._rotated = recipe.dtype == "int8"
        self._residual = Rotation(shape.hidden_size)
        self._value = Rotation(shape.head_dim)
        # What each layer's tensors are called inside it, and which are still to come.
        self._layer_names: dict[int, list[str]] = {}
        for name in self._dims:
            if name.startswith(_LAYER):
                self._layer_names.setdefault(_layer_of(name), []).append(name.split(".", 3)[3])
        self._missing = {index: set(names) for index, names in self._layer_names.items()}

    def take(self, tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> None:
        """Arrays are the packer's from then on: some become weights where they lie."""
        for name, array in tensors:
            if name not in self._dims:
                continue
            if array.shape != self._dims[name]:
                raise InvalidModel(f"tensor {name} is {array.shape}, its config says {self._dims[name]}", param=name)
            self._waiting[name] = torch.from_numpy(array)
            if name.startswith(_LAYER):
                self._pack_if_whole(_layer_of(name), name.split(".", 3)[3])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._num_cores)

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
        lines = embeddings if tied else self._waiting.pop("lm_head.weight")
        parts = zip(self._parts(lines), self._parts(embeddings), strict=True)
        head = [self._begin(partial(self._pack_ends, *part, norm)) for part in parts]
        layers = tuple(self._layers[index].result() for index in sorted(self._layers))
        packed = [part.result() for part in head]
        return DecoderWeights(embeddings, layers, packed[0] if len(packed) == 1 else JoinedLinear(packed))

    def _pack_ends(self, lines: Tensor, embeddings: Tensor, norm: Norm) -> Linear:
        """Lines of the head; and the embeddings, which may be the same memory, are turned where they lie."""
        packed = self._pack(lines, "head", norm=norm)
        if self._rotated:
            self._residual.turn_inputs(embeddings, out=embeddings)
        return packed

    def _parts(self, lines: Tensor) -> tuple[Tensor, ...]:
        """For several threads. They end where rotation cuts its products, so that these are as large as of the whole."""
        if not self._rotated:
            return (lines,)
        step = self._residual.lines_at_once
        each = -(-len(lines) // (min(self._num_threads, _MOST_HEAD_PARTS) * step)) * step
        return torch.split(lines, each)

    def _begin(self, pack: Callable[[], Packed]) -> "Future[Packed]":
        """In one of the threads, once there is room for what it packs. A thread is in nobody's mode but its own."""

        def run() -> Packed:
            with torch.inference_mode():
                return pack()

        # What a thread calls back holds no packer: that would be a cycle with all the layers in it.
        room, failed = self._room, self._failed

        def note(packed: "Future[Packed]") -> None:
            if not packed.cancelled() and packed.exception() is not None:
                failed.append(packed)
            room.release()

        room.acquire()
        if failed:
            failed[0].result()
        begun = self._pool.submit(run)
        begun.add_done_callback(note)
        if self._is_waited_for:
            begun.result()
        return begun

    def _pack_if_whole(self, index: int, came: str) -> None:
        self._missing[index].discard(came)
        if not self._missing[index]:
            names = {name: f"{_LAYER}{index}.{name}" for name in self._layer_names[index]}
            tensors = {short: self._waiting.pop(name) for short, name in names.items()}
            self._layers[index] = self._begin(lambda: self._pack_layer(tensors, self._shape.experts_of(index)))

    def _pack_layer(self, tensors: dict[str, Tensor], experts: ExpertShape | None) -> Layer:
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
        return Layer(
            qkv=self._pack(torch.cat([weights[name] for name in "qkv"]), "qkv", bias=bias, norm=before),
            out=self._pack(weights["o"], "out", bias=biases["o"]),
            feed_forward=(
                self._pack_feed_forward(tensors, "mlp", after)
                if experts is None
                else self._pack_experts(tensors, after, experts)
            ),
            qk_norm=qk_norm,
        )

    def _pack_feed_forward(self, tensors: dict[str, Tensor], prefix: str, norm: Norm) -> PlainFeedForward:
        # The one is dropped before the other is packed.
        gate_up = self._pack(
            torch.cat([tensors.pop(f"{prefix}.{name}_proj.weight") for name in ("gate", "up")]).neg_(),
            "gate_up",
            norm=norm,
        )
        down = self._pack(tensors.pop(f"{prefix}.down_proj.weight"), "down")
        return PlainFeedForward(gate_up, down)

    def _pack_experts(self, tensors: dict[str, Tensor], norm: Norm, shape: ExpertShape) -> Experts:
        router = self._pack(tensors["mlp.gate.weight"], "router", norm=norm)
        each = [self._pack_feed_forward(tensors, f"mlp.experts.{index}", norm) for index in range(shape.num_experts)]
        experts = Experts(router, each, shape.num_chosen, normed=shape.normed)
        experts.rehearse(self._shape.hidden_size, [count for count in _REHEARSED_ROWS if count <= self._max_rows])
        return experts

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
        if recipe.dtype == "int4" and role not in _WIDE_ROLES and weight.shape[1] % GROUP == 0:
            return Int4Linear(
                weight, bias=bias, norm=norm, min_rows=recipe.min_rows, planes_of=self._planes_of, planes=planes
            )
        reads_turned = self._rotated and role not in _OUTPUT_ROLES
        if self._rotated and not reads_turned:
            weight = self._residual.turn_outputs(weight)
            bias = None if bias is None else self._residual.turn_outputs(bias)
        return Int8Linear(
            weight,
            bias=bias,
            norm=norm,
            kernel=recipe.kernel,
            planes_of=self._planes_of,
            planes=planes,
            weight_planes=weight_planes,
            rotation=self._residual if reads_turned else None,
        )

    def _planes_of(self, width: int, planes: int) -> RowPlanes:
        key = (width, planes)
        with self._planes_lock:
            if key not in self._planes:
                self._planes[key] = RowPlanes(self._max_rows, width, planes)
            return self._planes[key]


def _layer_of(name: str) -> int:
    return int(name.split(".", 3)[2])
