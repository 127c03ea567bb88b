"""`config.json` and `generation_config.json` of a Hugging Face folder, turned into a shape.

Owns the fields' names and defaults in that format; sizes are checked in `limits`, families differ in `families`.
"""

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headrace.core.errors import InvalidModel
from headrace.weights.families import family_of_class
from headrace.weights.families.family import ExpertWords, Family
from headrace.weights.generation import GenerationDefaults
from headrace.weights.limits import check_shape
from headrace.weights.shape import ExpertShape, ModelShape, RopeScaling

_DEFAULT_THETA = 10_000.0
_ADVICE = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (-1, 2**20), "repetition_penalty": (0.01, 100)}


class Rope(Struct):
    """`rope_scaling`, and since transformers 5 `rope_parameters`, which has the base as well."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class HfConfig(Struct):
    architectures: list[str]
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None
    partial_rotary_factor: float | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None
    # Both are written for the same thing, whatever the family.
    num_local_experts: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: list[int] | None = None


class HfGeneration(Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None

    def defaults(self, source: str) -> GenerationDefaults:
        for field, (low, high) in _ADVICE.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise InvalidModel(f"{source}: {field} is {value}, not from {low} to {high}", param=field)
        return GenerationDefaults(self.temperature, self.top_p, self.top_k, self.repetition_penalty)


def shape_of_config(config: HfConfig, generation: HfGeneration, source: str) -> ModelShape:
    """What the config says, checked. Ends of generation: the generation config's first, then the config's."""
    family = family_of_class(config.architectures, source)
    _refuse_variants(config, source)
    rope = _rope(config, source)
    biased = bool(config.attention_bias) if family.qkv_bias is None else family.qkv_bias
    shape = ModelShape(
        architecture=family.name,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads if config.num_key_value_heads is None else config.num_key_value_heads,
        head_dim=_head_dim(config, source),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        context_len=_context_len(config, family),
        rms_eps=config.rms_norm_eps,
        rope_theta=next(theta for theta in (rope.rope_theta, config.rope_theta, _DEFAULT_THETA) if theta is not None),
        rope_scaling=_scaling(rope, source),
        qkv_bias=biased,
        output_bias=biased and family.qkv_bias is None,
        qk_norm=family.qk_norm,
        tied_embeddings=bool(config.tie_word_embeddings),
        bos_id=config.bos_token_id,
        eos_ids=merge_ids(_as_ids(generation.eos_token_id), _as_ids(config.eos_token_id)),
    )
    check_shape(shape, source)
    if family.experts is not None:
        # After the check: which layers have experts is counted.
        shape = replace(shape, experts=_experts(config, family.experts, source))
        check_shape(shape, source)
    return shape


def merge_ids(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """Each once, in the order of first mention."""
    return tuple(dict.fromkeys(token for group in groups for token in group))


def _refuse_variants(config: HfConfig, source: str) -> None:
    if config.quantization_config is not None:
        method = str(config.quantization_config.get("quant_method", "of some kind"))[:40]
        told = f"a quantised checkpoint ({method}) is not read; GGUF files are"
        raise InvalidModel(f"{source}: {told}", param="quantization_config")
    if config.hidden_act not in ("silu", "swish"):
        raise InvalidModel(f"{source}: hidden_act {config.hidden_act[:40]} is not silu", param="hidden_act")
    if config.mlp_bias:
        raise InvalidModel(f"{source}: a bias in the MLP is not supported", param="mlp_bias")
    for part in (config.partial_rotary_factor, config.rope_parameters and config.rope_parameters.partial_rotary_factor):
        if part not in (None, 1.0):
            told = "rotary embeddings over a part of each head are not supported"
            raise InvalidModel(f"{source}: {told}", param="partial_rotary_factor")


def _head_dim(config: HfConfig, source: str) -> int:
    if config.head_dim is not None:
        return config.head_dim
    if config.num_attention_heads < 1 or config.hidden_size % config.num_attention_heads:
        told = f"hidden_size {config.hidden_size} cannot be split over {config.num_attention_heads} heads"
        raise InvalidModel(f"{source}: {told}", param="num_attention_heads")
    return config.hidden_size // config.num_attention_heads


def _context_len(config: HfConfig, family: Family) -> int:
    windowed = family.window == "always" or (family.window == "flagged" and bool(config.use_sliding_window))
    if windowed and config.sliding_window is not None:
        return min(config.max_position_embeddings, config.sliding_window)
    return config.max_position_embeddings


def _experts(config: HfConfig, words: ExpertWords, source: str) -> ExpertShape:
    counts = {count for count in (config.num_experts, config.num_local_experts) if count is not None}
    if len(counts) > 1:
        told = f"num_experts is {config.num_experts} and num_local_experts is {config.num_local_experts}"
        raise InvalidModel(f"{source}: {told}", param="num_experts")
    asked = {
        "num_experts": next(iter(counts), None),
        "num_experts_per_tok": config.num_experts_per_tok,
        words.size_field: getattr(config, words.size_field),
    }
    for field, value in asked.items():
        if value is None:
            raise InvalidModel(f"{source}: {field} is missing, so its experts are not known", param=field)
    num_experts, num_chosen, inner_size = (int(value) for value in asked.values() if value is not None)
    normed = bool(config.norm_topk_prob) if words.normed is None else words.normed
    dense_layers = _dense_layers(config, source) if words.scattered else ()
    return ExpertShape(num_experts, num_chosen, inner_size, normed, dense_layers)


def _dense_layers(config: HfConfig, source: str) -> tuple[int, ...]:
    """Layers are counted from 0 in `mlp_only_layers`; every n-th has experts, the first n - 1 have not."""
    step = 1 if config.decoder_sparse_step is None else config.decoder_sparse_step
    if step < 1:
        raise InvalidModel(f"{source}: decoder_sparse_step is {step}, not at least 1", param="decoder_sparse_step")
    named = set(config.mlp_only_layers or ())
    return tuple(sorted(named | {layer for layer in range(config.num_hidden_layers) if (layer + 1) % step}))


def _rope(config: HfConfig, source: str) -> Rope:
    rope = config.rope_parameters or config.rope_scaling
    if rope is None:
        return Rope()
    if rope.rope_type is None and rope.type is None and rope.rope_theta is None:
        raise InvalidModel(f"{source}: rope parameters without a rope_type are not supported", param="rope_scaling")
    return rope


def _scaling(rope: Rope, source: str) -> RopeScaling | None:
    if rope.kind == "default":
        return None
    if rope.kind != "llama3":
        raise InvalidModel(f"{source}: rope type {rope.kind[:40]} is not default or llama3", param="rope_scaling")
    numbers = (rope.factor, rope.low_freq_factor, rope.high_freq_factor)
    original = rope.original_max_position_embeddings
    if None in numbers or original is None:
        raise InvalidModel(f"{source}: rope type llama3 lacks one of its factors", param="rope_scaling")
    factor, low, high = (float(number) for number in numbers if number is not None)
    return RopeScaling(factor, low, high, original)


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
