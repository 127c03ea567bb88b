"""The Llama-family decoder over paged memory: one parameterised forward pass for every dtype.

Everything here acts on rows alone: sums run along a row, and no operation fuses a product with a sum or has
another rounding at the edge of a vector loop. Knows neither plans nor slots nor how linears are packed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.runner.torch.attention import Attention
from headrace.runner.torch.feed_forward import FeedForward
from headrace.runner.torch.kv_cache import KvCache
from headrace.runner.torch.linear import Linear
from headrace.runner.torch.rotary import RotaryTable, turn
from headrace.runner.torch.step_rows import StepRows
from headrace.weights.shape import ModelShape


@dataclass(slots=True, frozen=True)
class Layer:
    qkv: Linear
    out: Linear
    feed_forward: FeedForward
    # Weights of the norms of queries and keys, repeated for each head: [heads + kv heads, dim].
    qk_norm: Tensor | None

    @property
    def size_bytes(self) -> int:
        return self.qkv.size_bytes + self.out.size_bytes + self.feed_forward.size_bytes


@dataclass(slots=True, frozen=True)
class DecoderWeights:
    embeddings: Tensor
    layers: tuple[Layer, ...]
    head: Linear

    @property
    def size_bytes(self) -> int:
        return self.embeddings.numel() * 4 + self.head.size_bytes + sum(layer.size_bytes for layer in self.layers)


class Decoder:
    def __init__(
        self, shape: ModelShape, weights: DecoderWeights, cache: KvCache, attention: Attention, context_len: int
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._cache = cache
        self._attention = attention
        self._rotary = RotaryTable(shape, context_len)
        self._turned = shape.num_heads + shape.num_kv_heads

    def forward(self, step: StepRows) -> Tensor:
        """Writes the keys and values of all tokens; returns their last residuals [t, hidden]."""
        residual = self._weights.embeddings[step.ids]
        cosines, sines = self._rotary.at(step.positions)
        for index, layer in enumerate(self._weights.layers):
            heads = layer.qkv.project_normed(residual).view(len(step.ids), -1, self._shape.head_dim)
            turned = heads[:, : self._turned]
            if layer.qk_norm is not None:
                turned = self._norm_heads(turned, layer.qk_norm)
            turned = turn(turned, cosines, sines)
            queries, keys = turned[:, : self._shape.num_heads], turned[:, self._shape.num_heads :]
            self._cache.write(step.writes[index], torch.cat((keys, heads[:, self._turned :]), 1))
            attended = self._attention.attend(index, queries, step.groups, step.chunks)
            residual.add_(layer.out.project(attended))
            residual.add_(layer.feed_forward.run(residual))
        return residual

    def logits(self, residual: Tensor) -> Tensor:
        """[m, hidden] -> [m, vocabulary]."""
        return self._weights.head.project_normed(residual)

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        squares = torch.linalg.vector_norm(heads, 2.0, 2, True).square_()
        return heads.mul(squares.mul_(1.0 / self._shape.head_dim).add_(self._shape.rms_eps).rsqrt_()).mul_(weight)
