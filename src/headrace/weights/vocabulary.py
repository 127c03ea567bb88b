"""What a model's files say about its text side: pieces, merges, special tokens, chat template.

Owns the record only; `text` builds a tokeniser from it. Exactly one of `tokenizer_json` (Hugging Face
folders) and `pieces` (GGUF) is filled.
"""

from enum import IntEnum

from msgspec import Struct


class PieceKind(IntEnum):
    """Kinds of a GGUF vocabulary, with the numbers of its `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary(Struct, frozen=True):
    tokenizer_json: bytes = b""
    # GGUF: `model` is "gpt2" (byte-level BPE) or "llama" (SentencePiece); `pre` names the pre-tokeniser.
    model: str = ""
    pre: str = ""
    pieces: tuple[str, ...] = ()
    kinds: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    add_space_prefix: bool = False
    # Both: what the chat template and the encoder need to know.
    chat_template: str = ""
    bos_id: int | None = None
    eos_id: int | None = None
    unknown_id: int | None = None
    add_bos: bool = False
    bos_token: str = ""
    eos_token: str = ""
