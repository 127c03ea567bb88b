"""Qwen3 with experts, in every layer or in some."""

from headrace.weights.families.family import ExpertWords, Family

QWEN3_MOE = Family(
    "qwen3moe",
    hf_class="Qwen3MoeForCausalLM",
    gguf_name="qwen3moe",
    qk_norm=True,
    window="flagged",
    experts=ExpertWords("moe_intermediate_size", scattered=True),
    experts_in_gguf=True,
)
