"""What clients get: whole replies and the choices of chunks, in OpenAI's shapes. Owns the fields; fills none in.

A field that is UNSET is left out. Beyond OpenAI's are vLLM's `token_ids`, `prompt_token_ids` and `prompt_logprobs`.
"""

from msgspec import UNSET, Struct, UnsetType


class PromptDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int
    text_tokens: int
    audio_tokens: int = 0
    image_tokens: int = 0


class CompletionDetails(Struct, frozen=True):
    text_tokens: int
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageReply(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(Struct, frozen=True, gc=False):
    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(Struct, frozen=True):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(Struct, frozen=True, gc=False):
    logprob: float
    rank: int | None
    decoded_token: str


# By token id, as text; None for the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionReply(Struct, frozen=True):
    name: str
    arguments: str


class CallReply(Struct, frozen=True):
    id: str
    function: FunctionReply
    type: str = "function"


class MessageReply(Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    tool_calls: list[CallReply] | UnsetType = UNSET
    function_call: FunctionReply | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: MessageReply
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    system_fingerprint: str | None = None
    object: str = "chat.completion"
    service_tier: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallChunk(Struct, frozen=True):
    """`id`, `type` and the name come once, with the first of a call."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[CallChunk] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists. The first token of a prompt has no log-probability. Offsets count characters of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionReply(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    system_fingerprint: str | None = None
    object: str = "text_completion"


class ChunkMetadata(Struct, frozen=True):
    """What `x-headrace-metadata: 1` adds to each chunk. `token_index` is of the first choice in it."""

    request_id: str
    chunk_seq: int
    token_index: int
    is_final: bool
    batch_id: int
    latency_ms: float
    stages_ms: dict[str, float] | UnsetType = UNSET


class ModelReply(Struct, frozen=True):
    """`max_model_len` as vLLM has it. `state` is the best of its replicas'."""

    id: str
    created: int
    owned_by: str
    max_model_len: int
    state: str
    aliases: list[str]
    object: str = "model"
    root: str | None = None
    parent: str | None = None


class ModelsReply(Struct, frozen=True):
    data: list[ModelReply]
    object: str = "list"
