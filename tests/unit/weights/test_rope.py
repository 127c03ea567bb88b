"""Rotary frequencies: plain, scaled as Llama 3 published it, and with the factors that GGUF stores."""

import math

import numpy as np
import pytest

from headrace.weights.rope import rope_frequencies
from headrace.weights.shape import RopeScaling
from tests.unit.weights.files import tiny_shape

pytestmark = pytest.mark.unit

PLAIN = tiny_shape(head_dim=64, rope_theta=5e5)
SCALED = tiny_shape(head_dim=64, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))


def published(place: int) -> float:
    """Llama 3's own words, one frequency at a time."""
    frequency: float = 1.0 / 5e5 ** (2 * place / 64)
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4.0:
        return frequency
    if wavelength > 8192 / 1.0:
        return frequency / 8.0
    smooth: float = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / 8.0 + smooth * frequency


def test_plain_frequencies_fall_from_one() -> None:
    found = rope_frequencies(PLAIN)
    np.testing.assert_allclose(found, [5e5 ** -(place / 32) for place in range(32)], rtol=1e-5)
    assert found[0] == 1.0 and found.dtype == np.float32


def test_llama3_scaling() -> None:
    found = rope_frequencies(SCALED)
    np.testing.assert_allclose(found, [published(place) for place in range(32)], rtol=1e-5)
    assert not np.allclose(found, rope_frequencies(PLAIN))


def test_stored_factors_say_the_same_as_the_scaling_they_were_made_from() -> None:
    factors = tuple((rope_frequencies(PLAIN) / rope_frequencies(SCALED)).tolist())
    stored = tiny_shape(head_dim=64, rope_theta=5e5, rope_factors=factors)
    np.testing.assert_allclose(rope_frequencies(stored), rope_frequencies(SCALED), rtol=1e-6)
