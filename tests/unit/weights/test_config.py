"""config.json: four families, old and new spellings, and refusals that name the field."""

import json
from typing import Any

import pytest

from headrace.core.errors import InvalidModel
from headrace.weights.config import HfConfig, HfGeneration, shape_of_config
from headrace.weights.document import parse_json
from headrace.weights.shape import ModelShape, RopeScaling
from tests.unit.weights.files import config_of, tiny_shape

pytestmark = pytest.mark.unit

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def shape_of(**others: Any) -> ModelShape:
    config = parse_json(json.dumps(config_of(tiny_shape(), **others)).encode(), HfConfig, "config.json")
    return shape_of_config(config, HfGeneration(), "config.json")


def test_a_plain_llama() -> None:
    assert shape_of() == tiny_shape()


def test_what_is_left_out_has_its_default() -> None:
    shape = shape_of(head_dim=None, num_key_value_heads=None, rope_theta=None)
    assert (shape.head_dim, shape.num_kv_heads, shape.rope_theta) == (16, 4, 10_000.0)


@pytest.mark.parametrize(
    ("name", "biased", "output_biased", "normed"),
    [
        ("LlamaForCausalLM", True, True, False),
        ("MistralForCausalLM", False, False, False),
        ("Qwen2ForCausalLM", True, False, False),
        ("Qwen3ForCausalLM", True, True, True),
    ],
)
def test_families_differ(name: str, biased: bool, output_biased: bool, normed: bool) -> None:
    shape = shape_of(architectures=[name], attention_bias=True)
    assert (shape.qkv_bias, shape.output_bias, shape.qk_norm) == (biased, output_biased, normed)


def test_a_window_ends_the_context() -> None:
    assert shape_of(architectures=["MistralForCausalLM"], sliding_window=48).context_len == 48
    assert shape_of(architectures=["MistralForCausalLM"], sliding_window=None).context_len == 128
    assert shape_of(architectures=["Qwen2ForCausalLM"], sliding_window=48).context_len == 128
    assert shape_of(architectures=["Qwen2ForCausalLM"], sliding_window=48, use_sliding_window=True).context_len == 48


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    ],
)
def test_llama3_scaling_in_both_spellings(spelling: dict[str, Any]) -> None:
    shape = shape_of(**spelling)
    assert shape.rope_theta == 5e5
    assert shape.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("others", "param"),
    [
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": 10**6}, "num_layers"),
        ({"num_hidden_layers": -1}, "num_layers"),
        ({"vocab_size": 2**20 + 1}, "vocab_size"),
        ({"intermediate_size": 2**40}, "intermediate_size"),
        ({"max_position_embeddings": 2**30}, "context_len"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads"),
        ({"num_attention_heads": 3, "head_dim": None}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"num_key_value_heads": 0}, "num_kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": 0.0}, "rms_eps"),
        ({"rms_norm_eps": 5.0}, "rms_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"eos_token_id": 40}, "eos_ids"),
        ({"eos_token_id": list(range(1000))}, "eos_ids"),
        ({"bos_token_id": -1}, "bos_id"),
        ({"architectures": ["BertModel"]}, "architectures"),
        ({"architectures": []}, "architectures"),
    ],
)
def test_refusals_name_the_field(others: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidModel) as refused:
        shape_of(**others)
    assert refused.value.param == param
    assert refused.value.message.startswith("config.json: ")


@pytest.mark.parametrize("value", ["64", None, 1.5, [64], True, 10**30])
def test_a_field_of_the_wrong_type_is_named(value: object) -> None:
    with pytest.raises(InvalidModel, match="hidden_size"):
        shape_of(hidden_size=value)
