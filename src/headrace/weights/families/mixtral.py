"""Mixtral: Mistral with experts in every layer. Its GGUF files say `llama`."""

from headrace.weights.families.family import ExpertWords, Family

MIXTRAL = Family(
    "mixtral",
    hf_class="MixtralForCausalLM",
    gguf_name=None,
    qkv_bias=False,
    window="always",
    experts=ExpertWords("intermediate_size", normed=True),
    renamed=(
        (".block_sparse_moe.", ".mlp."),
        (".w1.weight", ".gate_proj.weight"),
        (".w2.weight", ".down_proj.weight"),
        (".w3.weight", ".up_proj.weight"),
    ),
)
