"""How numbers lie in a file, and how they become float32. Owns the table of what is read; knows no file format.

Quantised data goes through `gguf.quants`, a slice of blocks at a time. Q4_0 and Q4_1 do not: the default model is in Q4_1, and
what is here makes the same of them several times faster.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

Decode = Callable[[NDArray[np.uint8]], NDArray[np.float32]]

# Numbers of a block in four bits.
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Encoding:
    """`block_values` numbers take `block_bytes` bytes; `decode` turns the bytes of whole blocks into numbers."""

    name: str
    block_values: int
    block_bytes: int
    decode: Decode


def _decode_f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f4")


def _decode_f16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f2").astype(np.float32)


def _decode_bf16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q4_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    ((scales,), values) = _nibbles(raw, 1)
    values -= np.float32(8.0)
    values *= scales
    return values


def _decode_q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    ((scales, least), values) = _nibbles(raw, 2)
    values *= scales
    values += least
    return values


def _nibbles(raw: NDArray[np.uint8], halves: int) -> tuple[list[NDArray[np.float32]], NDArray[np.float32]]:
    """Of blocks of a few float16 and 32 numbers in four bits: the former, each of a block for all of its numbers, and the latter.
    Loops over 32 numbers at a time would take most of their time to begin."""
    blocks = raw.reshape(-1, 2 * halves + _BLOCK // 2)
    heads = blocks[:, : 2 * halves].copy().view("<f2").astype(np.float32)
    packed = blocks[:, 2 * halves :].copy()
    values = np.empty((len(blocks), 2, _BLOCK // 2), np.float32)
    values[:, 0] = packed & 15
    packed >>= 4
    values[:, 1] = packed
    return [np.repeat(head, _BLOCK) for head in heads.T], values.reshape(-1)


def _quantised(kind: GGMLQuantizationType) -> Encoding:
    def decode(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        # As one row: the library works on groups of rows, and short rows cost it most of its time.
        values: NDArray[np.float32] = dequantize(raw.reshape(1, -1), kind)
        return values.reshape(-1)

    return Encoding(kind.name, *GGML_QUANT_SIZES[kind], _OURS.get(kind, decode))


_OURS = {GGMLQuantizationType.Q4_0: _decode_q4_0, GGMLQuantizationType.Q4_1: _decode_q4_1}

F32 = Encoding("F32", 1, 4, _decode_f32)
F16 = Encoding("F16", 1, 2, _decode_f16)
BF16 = Encoding("BF16", 1, 2, _decode_bf16)

SAFETENSORS_ENCODINGS = {encoding.name: encoding for encoding in (F32, F16, BF16)}

_Kind = GGMLQuantizationType
_QUANTISED = (
    *(_Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1, _Kind.Q8_0),
    *(_Kind.Q2_K, _Kind.Q3_K, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K),
    *(_Kind.IQ4_NL, _Kind.IQ4_XS),
)
# By the number that a GGUF file gives each.
GGUF_ENCODINGS = {
    int(_Kind.F32): F32,
    int(_Kind.F16): F16,
    int(_Kind.BF16): BF16,
    **{int(kind): _quantised(kind) for kind in _QUANTISED},
}


def gguf_encoding_name(number: int) -> str:
    """What the library calls a kind, read here or not."""
    return _Kind(number).name if number in set(_Kind) else f"number {number}"
