"""Llama 2 and 3, SmolLM2, and whatever else was written with their code; as GGUF, Mistral and Mixtral too."""

from headrace.weights.families.family import Family

LLAMA = Family("llama", hf_class="LlamaForCausalLM", gguf_name="llama", paired_in_gguf=True, experts_in_gguf=True)
