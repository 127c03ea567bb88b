"""The shape of a decoder, as every file format says it in its own words. Owns the fields; reads no file."""

from msgspec import Struct


class RopeScaling(Struct, frozen=True):
    """Llama 3's stretching of long wavelengths."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int


class ExpertShape(Struct, frozen=True):
    """Feed-forwards of which a router chooses `num_chosen` for each token.

    `normed`: the weights of the chosen ones are made to sum to 1; else they stay what the router gave among all.
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    normed: bool = True
    # These have one feed-forward for all tokens, as wide as the shape's `intermediate_size`.
    dense_layers: tuple[int, ...] = ()


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
    # None: every layer has one feed-forward.
    experts: ExpertShape | None = None

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers if self.experts is None else len(self.experts.dense_layers)

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """How wide feed-forwards are inside, each width once, the widest first."""
        sizes = {self.intermediate_size} if self.num_dense_layers else set()
        return tuple(sorted(sizes | ({self.experts.inner_size} if self.experts else set()), reverse=True))

    def experts_of(self, layer: int) -> ExpertShape | None:
        """None where the layer has one feed-forward for all tokens."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts
