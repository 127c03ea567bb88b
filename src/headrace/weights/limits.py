"""What sizes a model may claim. Owns the bounds, which stand before anything is allocated; reads no file."""

import math

from headrace.core.errors import InvalidModel
from headrace.weights.shape import ExpertShape, ModelShape

# Far above any model this engine could hold, far below what would hurt to count.
_MOST = {
    "hidden_size": 2**16,
    "num_layers": 2**10,
    "num_heads": 2**10,
    "num_kv_heads": 2**10,
    "head_dim": 2**10,
    "intermediate_size": 2**20,
    "vocab_size": 2**20,
    "context_len": 2**24,
}
_MOST_EXPERTS = {"num_experts": 2**10, "inner_size": 2**20}
# Each is three tensors that are counted by name.
_MOST_EXPERTS_IN_ALL = 2**16
_RANGES = {"rms_eps": (1e-12, 1e-1), "rope_theta": (1.0, 1e12)}
_MOST_EOS_IDS = 64


def check_shape(shape: ModelShape, source: str) -> None:
    """Refuse sizes that no model has, or that do not fit together."""
    for field, most in _MOST.items():
        value = getattr(shape, field)
        if not 1 <= value <= most:
            raise InvalidModel(f"{source}: {field} is {value}, not from 1 to {most}", param=field)
    for field, (low, high) in _RANGES.items():
        value = getattr(shape, field)
        if not low <= value <= high:
            raise InvalidModel(f"{source}: {field} is {value:g}, not from {low:g} to {high:g}", param=field)
    if shape.num_heads % shape.num_kv_heads:
        told = f"{shape.num_heads} heads cannot share {shape.num_kv_heads} KV heads evenly"
        raise InvalidModel(f"{source}: {told}", param="num_kv_heads")
    if shape.head_dim % 2:
        raise InvalidModel(f"{source}: head_dim is {shape.head_dim}, which is odd", param="head_dim")
    _check_rope(shape, source)
    _check_ids(shape, source)
    if shape.experts is not None:
        _check_experts(shape.experts, shape.num_layers, source)


def _check_experts(experts: ExpertShape, num_layers: int, source: str) -> None:
    for field, most in _MOST_EXPERTS.items():
        value = getattr(experts, field)
        if not 1 <= value <= most:
            raise InvalidModel(f"{source}: {field} of its experts is {value}, not from 1 to {most}", param=field)
    if not 1 <= experts.num_chosen <= experts.num_experts:
        told = f"{experts.num_chosen} of {experts.num_experts} experts cannot be chosen for a token"
        raise InvalidModel(f"{source}: {told}", param="num_chosen")
    if num_layers * experts.num_experts > _MOST_EXPERTS_IN_ALL:
        told = f"{experts.num_experts} experts in each of {num_layers} layers are more than {_MOST_EXPERTS_IN_ALL}"
        raise InvalidModel(f"{source}: {told}", param="num_experts")
    for layer in experts.dense_layers:
        if not 0 <= layer < num_layers:
            raise InvalidModel(f"{source}: layer {layer} without experts is none of {num_layers}", param="dense_layers")
    if len(set(experts.dense_layers)) >= num_layers:
        raise InvalidModel(f"{source}: no layer is left to have experts", param="dense_layers")


def _check_rope(shape: ModelShape, source: str) -> None:
    scaling = shape.rope_scaling
    if scaling is not None:
        numbers = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context_len)
        sound = all(math.isfinite(number) and number > 0 for number in numbers)
        if not sound or scaling.low_freq_factor >= scaling.high_freq_factor:
            raise InvalidModel(f"{source}: rope_scaling has no meaning with these factors", param="rope_scaling")
    factors = shape.rope_factors
    if factors and len(factors) != shape.head_dim // 2:
        told = f"{len(factors)} rope factors for {shape.head_dim // 2} frequencies"
        raise InvalidModel(f"{source}: {told}", param="rope_factors")
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise InvalidModel(f"{source}: a rope factor is not a positive number", param="rope_factors")


def _check_ids(shape: ModelShape, source: str) -> None:
    if len(shape.eos_ids) > _MOST_EOS_IDS:
        raise InvalidModel(f"{source}: more than {_MOST_EOS_IDS} ids end a generation", param="eos_ids")
    for field, ids in (("bos_id", (shape.bos_id,)), ("eos_ids", shape.eos_ids)):
        for token in ids:
            if token is not None and not 0 <= token < shape.vocab_size:
                told = f"{field} has {token}, outside a vocabulary of {shape.vocab_size}"
                raise InvalidModel(f"{source}: {told}", param=field)
