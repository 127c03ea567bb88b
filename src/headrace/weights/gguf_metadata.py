"""The metadata of a GGUF file, turned into a shape and a vocabulary.

Owns the keys' names and defaults in that format; sizes are checked in `limits`, families differ in `families`.
"""

from collections.abc import Collection
from typing import Any, TypeVar, cast

from headrace.core.errors import InvalidModel
from headrace.weights.families.family import Family
from headrace.weights.gguf_header import GgufHeader
from headrace.weights.limits import check_shape
from headrace.weights.shape import ExpertShape, ModelShape
from headrace.weights.vocabulary import PieceKind, Vocabulary

T = TypeVar("T", int, float, bool, str)

_DEFAULT_THETA = 10_000.0
_TOKENIZER = "tokenizer.ggml"
# How `expert_gating_func` calls the router's softmax.
_SOFTMAX = 1
# Control pieces with which models end a turn, whatever their metadata names as the end of text.
_ENDINGS = frozenset(
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<|end|>",
        "<|end_of_turn|>",
    ]
)
# Pre-tokenisers of byte-level vocabularies whose models expect a first token unless the file says otherwise.
_BEGINNING_PRES = frozenset(["llama3", "llama-v3", "llama-bpe"])


class GgufMetadata:
    """Typed access; a key of the wrong type is refused by name."""

    def __init__(self, header: GgufHeader, source: str) -> None:
        self._values = header.metadata
        self._source = source

    def find(self, key: str, kind: type[T]) -> T | None:
        value: Any = self._values.get(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if value is not None and type(value) is not kind:
            raise self.wrong(key, f"is not of type {kind.__name__}")
        return value

    def get(self, key: str, kind: type[T]) -> T:
        value = self.find(key, kind)
        if value is None:
            raise self.wrong(key, "is missing")
        return value

    def items(self, key: str, kind: type[T]) -> tuple[T, ...]:
        values: Any = self._values.get(key, ())
        if not isinstance(values, tuple) or not all(type(value) is kind for value in values):
            raise self.wrong(key, f"is not a list of {kind.__name__}")
        return cast(tuple[T, ...], values)

    def wrong(self, key: str, told: str) -> InvalidModel:
        return InvalidModel(f"{self._source}: {key} {told}", param=key)


def shape_of_metadata(
    metadata: GgufMetadata,
    family: Family,
    vocabulary: Vocabulary,
    *,
    tensor_names: Collection[str],
    vocab_size: int,
    rope_factors: tuple[float, ...],
    source: str,
) -> ModelShape:
    """What the metadata says, and what only the presence of a tensor says: biases and a head of its own."""
    prefix = family.gguf_name
    heads = metadata.get(f"{prefix}.attention.head_count", int)
    hidden_size = metadata.get(f"{prefix}.embedding_length", int)
    shape = ModelShape(
        architecture=family.name,
        hidden_size=hidden_size,
        num_layers=metadata.get(f"{prefix}.block_count", int),
        num_heads=heads,
        num_kv_heads=_or(metadata.find(f"{prefix}.attention.head_count_kv", int), heads),
        head_dim=_head_dim(metadata, prefix or "", hidden_size, heads),
        intermediate_size=metadata.get(f"{prefix}.feed_forward_length", int),
        vocab_size=vocab_size,
        context_len=_context_len(metadata, prefix or ""),
        rms_eps=metadata.get(f"{prefix}.attention.layer_norm_rms_epsilon", float),
        rope_theta=_or(metadata.find(f"{prefix}.rope.freq_base", float), _DEFAULT_THETA),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        qk_norm=family.qk_norm,
        tied_embeddings="output.weight" not in tensor_names,
        bos_id=vocabulary.bos_id,
        eos_ids=_endings(metadata, vocabulary),
        rope_factors=rope_factors,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        experts=_experts(metadata, family),
    )
    _refuse_variants(metadata, prefix or "", shape.head_dim)
    check_shape(shape, source)
    return shape


def vocabulary_of_metadata(metadata: GgufMetadata) -> Vocabulary:
    model = metadata.get(f"{_TOKENIZER}.model", str)
    if model not in ("gpt2", "llama"):
        raise metadata.wrong(f"{_TOKENIZER}.model", f"is {model[:40]}, not gpt2 or llama")
    pre = metadata.find(f"{_TOKENIZER}.pre", str) or "default"
    pieces = metadata.items(f"{_TOKENIZER}.tokens", str)
    kinds = metadata.items(f"{_TOKENIZER}.token_type", int)
    scores = metadata.items(f"{_TOKENIZER}.scores", float)
    for name, values in (("token_type", kinds), ("scores", scores)):
        if values and len(values) != len(pieces):
            raise metadata.wrong(f"{_TOKENIZER}.{name}", f"has {len(values)} items for {len(pieces)} tokens")
    if not set(kinds) <= set(PieceKind):
        raise metadata.wrong(f"{_TOKENIZER}.token_type", "has a kind that is not known")
    merges = metadata.items(f"{_TOKENIZER}.merges", str)
    is_sentencepiece = model == "llama"
    if not (scores if is_sentencepiece else merges):
        raise metadata.wrong(f"{_TOKENIZER}.{'scores' if is_sentencepiece else 'merges'}", "is missing")
    ids = {name: _token_id(metadata, name, len(pieces)) for name in ("bos", "eos", "unknown")}
    return Vocabulary(
        model=model,
        pre=pre,
        pieces=pieces,
        kinds=kinds or (int(PieceKind.NORMAL),) * len(pieces),
        scores=scores,
        merges=merges,
        add_space_prefix=_or(metadata.find(f"{_TOKENIZER}.add_space_prefix", bool), is_sentencepiece),
        chat_template=metadata.find("tokenizer.chat_template", str) or "",
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unknown_id=ids["unknown"],
        add_bos=_or(metadata.find(f"{_TOKENIZER}.add_bos_token", bool), is_sentencepiece or pre in _BEGINNING_PRES),
        bos_token="" if ids["bos"] is None else pieces[ids["bos"]],
        eos_token="" if ids["eos"] is None else pieces[ids["eos"]],
    )


def _token_id(metadata: GgufMetadata, name: str, num_pieces: int) -> int | None:
    key = f"{_TOKENIZER}.{name}_token_id"
    token = metadata.find(key, int)
    if token is not None and not 0 <= token < num_pieces:
        raise metadata.wrong(key, f"is {token}, outside a vocabulary of {num_pieces}")
    return token


def _endings(metadata: GgufMetadata, vocabulary: Vocabulary) -> tuple[int, ...]:
    named = [_token_id(metadata, name, len(vocabulary.pieces)) for name in ("eos", "eot", "eom")]
    special = (PieceKind.CONTROL, PieceKind.USER_DEFINED)
    spelled = [
        token
        for token, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.kinds, strict=True))
        if kind in special and piece in _ENDINGS
    ]
    return tuple(dict.fromkeys(token for token in [*named, *spelled] if token is not None))


def _head_dim(metadata: GgufMetadata, prefix: str, hidden_size: int, heads: int) -> int:
    asked = metadata.find(f"{prefix}.attention.key_length", int)
    if asked is not None:
        if metadata.find(f"{prefix}.attention.value_length", int) not in (None, asked):
            raise metadata.wrong(f"{prefix}.attention.value_length", "differs from key_length")
        return asked
    if heads < 1 or hidden_size % heads:
        raise metadata.wrong(f"{prefix}.attention.head_count", f"of {heads} cannot split {hidden_size}")
    return hidden_size // heads


def _context_len(metadata: GgufMetadata, prefix: str) -> int:
    context_len = metadata.get(f"{prefix}.context_length", int)
    window = metadata.find(f"{prefix}.attention.sliding_window", int)
    return min(context_len, window) if window else context_len


def _experts(metadata: GgufMetadata, family: Family) -> ExpertShape | None:
    """In every layer, their weights normed: all that files of these families can say."""
    prefix = family.gguf_name
    num_experts = metadata.find(f"{prefix}.expert_count", int)
    if not num_experts:
        if family.experts is not None:
            raise metadata.wrong(f"{prefix}.expert_count", "announces no experts")
        return None
    if not family.experts_in_gguf:
        raise metadata.wrong(f"{prefix}.expert_count", "announces experts, which are not supported")
    unusual = {
        "expert_shared_count": metadata.find(f"{prefix}.expert_shared_count", int) not in (None, 0),
        "expert_group_count": metadata.find(f"{prefix}.expert_group_count", int) not in (None, 0, 1),
        "expert_gating_func": metadata.find(f"{prefix}.expert_gating_func", int) not in (None, _SOFTMAX),
        "expert_weights_scale": metadata.find(f"{prefix}.expert_weights_scale", float) not in (None, 0.0, 1.0),
        "expert_weights_norm": metadata.find(f"{prefix}.expert_weights_norm", bool) is False,
    }
    for name in unusual:
        if unusual[name]:
            raise metadata.wrong(f"{prefix}.{name}", "asks for another kind of experts, which is not supported")
    length = metadata.find(f"{prefix}.expert_feed_forward_length", int)
    inner_size = metadata.get(f"{prefix}.feed_forward_length", int) if length is None else length
    return ExpertShape(num_experts, metadata.get(f"{prefix}.expert_used_count", int), inner_size)


def _refuse_variants(metadata: GgufMetadata, prefix: str, head_dim: int) -> None:
    if metadata.find(f"{prefix}.rope.dimension_count", int) not in (None, head_dim):
        raise metadata.wrong(f"{prefix}.rope.dimension_count", "is a part of the head, which is not supported")
    scaling = metadata.find(f"{prefix}.rope.scaling.type", str)
    if scaling not in (None, "none"):
        raise metadata.wrong(f"{prefix}.rope.scaling.type", f"is {scaling[:40]}, which is not supported")
    if metadata.find(f"{prefix}.rope.scale_linear", float) not in (None, 1.0):
        raise metadata.wrong(f"{prefix}.rope.scale_linear", "is not supported")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
