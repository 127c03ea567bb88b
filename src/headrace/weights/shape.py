"""The shape of a decoder, as every file format says it in its own words. Owns the fields; reads no file."""

from msgspec import Struct


class RopeScaling(Struct, frozen=True):
    """Llama 3's stretching of long wavelengths."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


class ModelShape(Struct, frozen=True):
    """A Llama-family decoder. `head_dim` need not be `hidden_size / num_heads`."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_len: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    # GGUF writes a scaling as its result, one divisor per frequency; then `rope_scaling` is None. See `rope.py`.
    rope_factors: tuple[float, ...] = ()
    # Llama's and Qwen3's `attention_bias` means the output projection too.
    output_bias: bool = False
