"""Numbers in four bits become what the format's own library makes of them, to the last bit."""

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from headrace.weights.encodings import GGUF_ENCODINGS

OURS = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("blocks", [1, 2, 1000])
def test_any_bytes_are_what_the_library_makes_of_them(kind: GGMLQuantizationType, blocks: int) -> None:
    raw = np.random.default_rng(blocks).integers(0, 256, blocks * GGML_QUANT_SIZES[kind][1], dtype=np.uint8)
    raw.setflags(write=False)
    with np.errstate(all="ignore"):
        found, wanted = GGUF_ENCODINGS[int(kind)].decode(raw), dequantize(raw.reshape(1, -1), kind).reshape(-1)
    assert found.shape == (blocks * 32,)
    # Of random scales some are no numbers, and nor is what they scale.
    there = ~np.isnan(wanted)
    assert np.array_equal(np.isnan(found), ~there)
    assert np.array_equal(found[there].view(np.uint32), wanted[there].view(np.uint32))
