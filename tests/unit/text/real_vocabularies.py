"""The vocabularies of two real models, and the same as the library alone would build them. Downloads nothing."""

import lzma
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.text.tokenizer import Tokenizer
from headrace.weights.vocabulary import PieceKind, Vocabulary

DATA = Path(__file__).parents[2] / "data"
SMOLLM2_CONTROLS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"),
    *("<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>"),
    *("<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>"),
)
QWEN2_CONTROLS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
QWEN2_UNUSED = tuple(f"[PAD{number}]" for number in range(151_665, 151_936))
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = ("smollm2", "qwen2")


@cache
def vocabulary(name: str) -> Vocabulary:
    alphabet, *merges = lzma.decompress((DATA / f"{name}.merges.xz").read_bytes()).decode().split("\n")
    ordinary = [*alphabet, *(merge.replace(" ", "") for merge in merges)]
    if name == "smollm2":
        pieces, kinds = [*SMOLLM2_CONTROLS, *ordinary], [PieceKind.CONTROL] * 17 + [PieceKind.NORMAL] * len(ordinary)
        bos_id, eos_id = 1, 2
    else:
        pieces = [*ordinary, *QWEN2_CONTROLS, *QWEN2_UNUSED]
        kinds = [PieceKind.NORMAL] * len(ordinary) + [_qwen2_kind(piece) for piece in pieces[len(ordinary) :]]
        bos_id, eos_id = 151_643, 151_645
    pre = "smollm" if name == "smollm2" else name
    return Vocabulary(
        model="gpt2",
        pre=pre,
        pieces=tuple(pieces),
        kinds=tuple(map(int, kinds)),
        merges=tuple(merges),
        bos_id=bos_id,
        eos_id=eos_id,
        unknown_id=0 if name == "smollm2" else None,
    )


def _qwen2_kind(piece: str) -> PieceKind:
    if piece.startswith("[PAD"):
        return PieceKind.UNUSED
    return PieceKind.USER_DEFINED if "tool_call" in piece else PieceKind.CONTROL


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(vocabulary(name))


@cache
def library_tokenizer(name: str) -> tokenizers.Tokenizer:
    """With its special tokens, as `transformers` has it."""
    source = vocabulary(name)
    used = [token for token, kind in enumerate(source.kinds) if kind != PieceKind.UNUSED]
    ids = {source.pieces[token]: token for token in used}
    model = models.BPE(vocab=ids, merges=[(a, b) for a, b in (merge.split(" ") for merge in source.merges)])
    library = tokenizers.Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "smollm2")
    if name == "smollm2":
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        library.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    library.decoder = decoders.ByteLevel()
    for kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED):
        added = [source.pieces[token] for token in used if source.kinds[token] == kind]
        special = kind == PieceKind.CONTROL
        library.add_tokens([AddedToken(piece, special=special, normalized=False) for piece in added])
    return library
