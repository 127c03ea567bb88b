"""A decoder's matrices in eight bits (float8 e4m3): how they are quantised at load.

A matrix has one scale: the library's products are at their fastest with one, and channels of their own gain nothing that
can be measured, for the format has an exponent. Embeddings, norms, biases and the head stay as they are. Needs no Triton.
"""

from dataclasses import replace

import torch
from torch import Tensor

from headrace.runner.cuda.fp8_space import EIGHTS
from headrace.runner.cuda.weights import LayerScales, LayerWeights, Weights, WeightSource
from headrace.weights.shape import ModelShape

LARGEST = 448.0
# What a row of zeros counts as.
LEAST = 1e-30
# Numbers of a matrix that are quantised at a time.
_AT_ONCE = 1 << 24


def in_eights(source: WeightSource) -> WeightSource:
    """The same weights; matrices of layers become eight bits one layer after the other, and what they were is freed."""

    def load(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Weights:
        weights = source(shape, device, dtype)
        layers, rest = list(weights.layers), replace(weights, layers=())
        del weights
        for index in range(len(layers)):
            layers[index] = _quantised(layers[index])
        return replace(rest, layers=tuple(layers))

    return load


def quantise_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in]: (in eight bits, the scale [1] that takes it back)."""
    most = matrix.abs().amax().float().clamp(min=LEAST)
    out = torch.empty(matrix.shape, dtype=EIGHTS, device=matrix.device)
    lines = max(1, _AT_ONCE // matrix.shape[1])
    for at in range(0, len(matrix), lines):
        part = matrix[at : at + lines].float() * (LARGEST / most)
        out[at : at + lines] = part.clamp_(-LARGEST, LARGEST).to(EIGHTS)
    return out, (most / LARGEST).view(1)


def _quantised(layer: LayerWeights) -> LayerWeights:
    qkv, qkv_scale = quantise_matrix(layer.qkv)
    out, out_scale = quantise_matrix(layer.out)
    gate_up, gate_up_scale = quantise_matrix(layer.gate_up)
    down, down_scale = quantise_matrix(layer.down)
    scales = LayerScales(qkv_scale, out_scale, gate_up_scale, down_scale)
    return replace(layer, qkv=qkv, out=out, gate_up=gate_up, down=down, scales=scales)
