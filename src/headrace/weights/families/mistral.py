"""Mistral: Llama with a window in its first versions. Its GGUF files say `llama`."""

from headrace.weights.families.family import Family

MISTRAL = Family("mistral", hf_class="MistralForCausalLM", gguf_name=None, qkv_bias=False, window="always")
