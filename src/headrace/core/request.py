"""What a client asked of the engine, and the checks that need no engine to make.

Owns the request and its sampling parameters. Knows ids, never text.
"""

from collections.abc import Sequence
from enum import IntEnum

from msgspec import Struct

from headrace.core.errors import InvalidInput

MAX_STOP_IDS = 64
MAX_LOGPROBS = 32
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_IDS = 1024
# Far beyond any logit.
MAX_BIAS = 1e4


class Tier(IntEnum):
    """Order of service before fairness. A request may ask for a lower tier than its tenant's."""

    BATCH = 0
    FREE = 1
    PLUS = 2
    ENTERPRISE = 3


class Admission(IntEnum):
    """How memory is promised: `GUARANTEED` reserves its expected output, `ELASTIC` may be preempted."""

    ELASTIC = 0
    GUARANTEED = 1


class SamplingParams(Struct, frozen=True):
    """How the next token is chosen. The random number is a function of (seed, choice, position) alone."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    # Alternatives to report beside each token's log-probability; None: no log-probabilities.
    logprobs: int | None = None
    # The same for the ids of the prompt; such a request neither reads nor feeds the prefix cache.
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Nothing but these may be sampled; empty: everything may.
    allowed_ids: tuple[int, ...] = ()
    # The row waits for a mask before it is sampled (grammar).
    masked: bool = False


class Request(Struct, frozen=True):
    """One generation to run: `n = 3` is three of these that differ in `choice`.

    `replay_ids` are tokens already delivered by a lost worker: generation goes on after them.
    `prefix_root` and `block_hashes` (see `core.hashing`) are made where the prompt is tokenised;
    an empty root means that this request neither reads nor feeds the prefix cache.
    """

    request_id: str
    tenant: str
    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = SamplingParams()
    choice: int = 0
    tier: Tier = Tier.PLUS
    admission: Admission = Admission.ELASTIC
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    queue_timeout_s: float | None = None
    deadline_s: float | None = None
    replay_ids: tuple[int, ...] = ()
    prefix_root: bytes = b""
    block_hashes: tuple[bytes, ...] = ()


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-3, 1e3),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("top_k", 0, 2**31 - 1),
    ("seed", -(2**63), 2**64 - 1),
    ("min_tokens", 0, 2**31 - 1),
)


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse numbers that are not finite or out of range, naming the field."""
    for name, low, high in _RANGES:
        if not low <= getattr(sampling, name) <= high:  # NaN is neither
            raise InvalidInput(f"{name} must be a number from {low:g} to {high:g}", param=name)
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidInput(f"{name} must be a number from 0 to {MAX_LOGPROBS}", param=name)
    if sampling.stop_ids:
        _check_ids("stop_ids", sampling.stop_ids, MAX_STOP_IDS, vocab_size)
    if sampling.allowed_ids:
        _check_ids("allowed_ids", sampling.allowed_ids, MAX_ALLOWED_IDS, vocab_size)
    if sampling.logit_bias:
        _check_biases(sampling.logit_bias, vocab_size)


def check_ends(sampling: SamplingParams, eos_ids: Sequence[int]) -> None:
    """Refuse a reply that may hold nothing but what ends it, and may not end yet: no id would be left to take."""
    if not sampling.allowed_ids or not sampling.min_tokens:
        return
    ends = {*sampling.stop_ids, *(() if sampling.ignore_eos else eos_ids)}
    if ends.issuperset(sampling.allowed_ids):
        raise InvalidInput(
            "allowed_ids holds nothing but ids that end the reply, and min_tokens forbids these", param="allowed_ids"
        )


def _check_ids(name: str, ids: tuple[int, ...], most: int, vocab_size: int) -> None:
    if len(ids) > most:
        raise InvalidInput(f"{name} holds more than {most} ids", param=name)
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidInput(f"{name} holds an id outside the vocabulary", param=name)


def _check_biases(biases: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    if len(biases) > MAX_LOGIT_BIAS:
        raise InvalidInput(f"logit_bias holds more than {MAX_LOGIT_BIAS} ids", param="logit_bias")
    for token, bias in biases:
        if not 0 <= token < vocab_size:
            raise InvalidInput("logit_bias holds an id outside the vocabulary", param="logit_bias")
        if not abs(bias) <= MAX_BIAS:  # NaN is not within it
            raise InvalidInput(f"logit_bias holds a bias beyond ±{MAX_BIAS:g}", param="logit_bias")


def check_times(request: Request) -> None:
    """Refuse targets and limits that are not positive, finite seconds."""
    for name in ("ttft_target_s", "itl_target_s", "queue_timeout_s", "deadline_s"):
        value = getattr(request, name)
        if value is not None and not 0.0 < value <= 1e6:
            raise InvalidInput(f"{name} must be a positive number of seconds", param=name)
