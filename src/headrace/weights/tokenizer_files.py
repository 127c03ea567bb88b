"""The text side of a Hugging Face folder: tokenizer.json, its config, the chat template. Builds no tokeniser."""

from msgspec import Struct

from headrace.core.errors import InvalidModel
from headrace.weights.document import DocumentFolder, parse_json
from headrace.weights.vocabulary import Vocabulary

_MOST_TOKENIZER_BYTES = 2**28
_DEFAULT_TEMPLATE = "default"


class _AddedToken(Struct):
    id: int
    content: str


class _Model(Struct):
    # Unigram lists its pieces with scores; the others map them to ids.
    vocab: dict[str, int] | list[tuple[str, float]]


class _Tokenizer(Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []

    def ids(self) -> dict[str, int]:
        """Every piece with its id; added tokens are on top."""
        vocab = self.model.vocab
        pieces = vocab if isinstance(vocab, dict) else {piece: place for place, (piece, _) in enumerate(vocab)}
        return pieces | {token.content: token.id for token in self.added_tokens}


class _Special(Struct):
    content: str


class _NamedTemplate(Struct):
    name: str
    template: str


class _TokenizerConfig(Struct):
    bos_token: str | _Special | None = None
    eos_token: str | _Special | None = None
    unk_token: str | _Special | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _TemplateFile(Struct):
    chat_template: str


def read_vocabulary(folder: DocumentFolder, vocab_size: int) -> Vocabulary:
    """Refused if it has an id that no row of the embeddings stands for; fewer ids than rows is padding."""
    data = folder.read("tokenizer.json", _MOST_TOKENIZER_BYTES)
    if not data:
        raise InvalidModel("tokenizer.json is missing", param="tokenizer.json")
    ids = parse_json(data, _Tokenizer, "tokenizer.json").ids()
    highest, lowest = max(ids.values(), default=-1), min(ids.values(), default=0)
    if highest >= vocab_size or lowest < 0 or not ids:
        told = f"its ids go from {lowest} to {highest}, the embeddings have {vocab_size} rows"
        raise InvalidModel(f"tokenizer.json: {told}", param="tokenizer.json")
    config = folder.read_json("tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()
    bos, eos, unknown = (_text(token) for token in (config.bos_token, config.eos_token, config.unk_token))
    return Vocabulary(
        tokenizer_json=data,
        chat_template=_chat_template(folder, config),
        bos_id=ids.get(bos),
        eos_id=ids.get(eos),
        unknown_id=ids.get(unknown),
        add_bos=bool(config.add_bos_token),
        bos_token=bos,
        eos_token=eos,
    )


def _chat_template(folder: DocumentFolder, config: _TokenizerConfig) -> str:
    """A file of its own wins over the one inside tokenizer_config.json, as in transformers."""
    template = folder.read_text("chat_template.jinja")
    if template:
        return template
    file = folder.read_json("chat_template.json", _TemplateFile)
    if file is not None:
        return file.chat_template
    inside = config.chat_template or ""
    if isinstance(inside, str):
        return inside
    return next((named.template for named in inside if named.name == _DEFAULT_TEMPLATE), "")


def _text(token: str | _Special | None) -> str:
    if token is None:
        return ""
    return token if isinstance(token, str) else token.content
