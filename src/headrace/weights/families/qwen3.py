"""Qwen3: queries and keys are normalised per head."""

from headrace.weights.families.family import Family

QWEN3 = Family("qwen3", hf_class="Qwen3ForCausalLM", gguf_name="qwen3", qk_norm=True, window="flagged")
