"""The families this engine reads: one small file each, and its line here."""

from collections.abc import Sequence

from headrace.core.errors import InvalidModel
from headrace.weights.families.family import Family
from headrace.weights.families.llama import LLAMA
from headrace.weights.families.mistral import MISTRAL
from headrace.weights.families.mixtral import MIXTRAL
from headrace.weights.families.qwen2 import QWEN2
from headrace.weights.families.qwen3 import QWEN3
from headrace.weights.families.qwen3_moe import QWEN3_MOE

FAMILIES = (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)


def family_of_class(classes: Sequence[str], source: str) -> Family:
    """By what a Hugging Face config calls its `architectures`."""
    known = {family.hf_class: family for family in FAMILIES}
    for name in classes:
        if name in known:
            return known[name]
    told = f"architecture {', '.join(classes)[:80] or '(none)'} is not one of {', '.join(known)}"
    raise InvalidModel(f"{source}: {told}", param="architectures")


def family_of_gguf(name: str, source: str) -> Family:
    """By what a GGUF file calls its `general.architecture`."""
    known = {family.gguf_name: family for family in FAMILIES if family.gguf_name is not None}
    if name not in known:
        told = f"architecture {name[:80]} is not one of {', '.join(known)}"
        raise InvalidModel(f"{source}: {told}", param="general.architecture")
    return known[name]
