"""Rotary frequencies of a shape, in numpy: one place for what the formats say in three ways. Reads no file."""

import math

import numpy as np
from numpy.typing import NDArray

from headrace.weights.shape import ModelShape, RopeScaling


def rope_frequencies(shape: ModelShape) -> NDArray[np.float32]:
    """Radians per position of each pair, scaling included: [head_dim / 2]."""
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float32) / np.float32(shape.head_dim)
    frequencies = np.asarray(1.0 / np.power(np.float32(shape.rope_theta), exponents), np.float32)
    if shape.rope_factors:
        return np.asarray(frequencies / np.array(shape.rope_factors, np.float32), np.float32)
    return frequencies if shape.rope_scaling is None else _stretch(frequencies, shape.rope_scaling)


def _stretch(frequencies: NDArray[np.float32], scaling: RopeScaling) -> NDArray[np.float32]:
    """Llama 3: long waves are slowed by `factor`, short ones are kept, between them it is blended."""
    turns = scaling.original_context_len * frequencies / (2 * math.pi)
    kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
    return np.asarray((1 - kept) * frequencies / scaling.factor + kept * frequencies, np.float32)
