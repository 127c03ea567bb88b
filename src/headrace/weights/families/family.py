"""What one family of decoders is called and how it differs from Llama. Owns the record; reads no file."""

from typing import Literal

from msgspec import Struct


class ExpertWords(Struct, frozen=True):
    """How a Hugging Face config speaks of experts."""

    size_field: str
    # None: as `norm_topk_prob` says.
    normed: bool | None = None
    # `decoder_sparse_step` and `mlp_only_layers` say which layers have experts; else all have.
    scattered: bool = False


class Family(Struct, frozen=True):
    """`qkv_bias` None: as the files say, and then the output projection has a bias as well."""

    name: str
    hf_class: str
    # None: GGUF files of this family call themselves by another family's name.
    gguf_name: str | None
    qkv_bias: bool | None = None
    qk_norm: bool = False
    # GGUF: the rows of Q and K lie in pairs (0, d/2, 1, d/2 + 1, ...) and not in halves.
    paired_in_gguf: bool = False
    # A window bounds what a token sees; this engine attends to everything, so the context ends with the window.
    # "flagged": only if `use_sliding_window` says so.
    window: Literal["never", "always", "flagged"] = "never"
    experts: ExpertWords | None = None
    # GGUF: a file of this family may have experts in every layer.
    experts_in_gguf: bool = False
    # Parts of tensors' names, as a folder has them and as this engine has them.
    renamed: tuple[tuple[str, str], ...] = ()

    def tensor_name(self, name: str) -> str:
        """What this engine calls the tensor that a folder calls `name`."""
        for theirs, ours in self.renamed:
            name = name.replace(theirs, ours)
        return name
