"""Qwen2 and Qwen2.5: a bias on Q, K and V, none on the output."""

from headrace.weights.families.family import Family

QWEN2 = Family("qwen2", hf_class="Qwen2ForCausalLM", gguf_name="qwen2", qkv_bias=True, window="flagged")
