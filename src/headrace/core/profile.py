"""What a model was measured to do on one machine: the document that planner, router and autoscaler may read.

Owns its shape, its version and the bounds of every number in it. How it is measured is in `cli.profile`, where it lies
in `weights.profiles`; this reads no file.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from headrace.core.config import CostProfile, check_profile
from headrace.core.errors import InvalidInput

FORMAT = "headrace-profile"
# Raised with every change that an older reader would misread.
VERSION = 1

Count = Annotated[int, Meta(ge=0, le=2**53)]
Some = Annotated[int, Meta(ge=1, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Rate = Annotated[float, Meta(ge=0, le=1e12)]
Text = Annotated[str, Meta(max_length=1000)]


class _Part(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class DecodePoint(_Part, frozen=True):
    """Steps of `rows` decode rows and nothing else. `itl` is the time from one step's end to the next: what a reader of
    any of these streams waits for a token. `kv_tokens` is what all rows together read in a mean step."""

    rows: Some
    prompt_tokens: Some
    kv_tokens: Some
    steps: Some
    itl_p50_s: Seconds
    itl_p95_s: Seconds
    tokens_per_s: Rate


class PromptPoint(_Part, frozen=True):
    """One prompt alone, cut into chunks as the engine cuts it. `itl_s` is a decode step behind it, where there was room."""

    tokens: Some
    tries: Some
    ttft_s: Seconds
    tokens_per_s: Rate
    itl_s: Seconds | None


class Knee(_Part, frozen=True):
    """The rows at which tokens/s over inter-token time is greatest, for prompts of one length. `is_last`: no more rows
    were measured, so that it may lie further out."""

    prompt_tokens: Some
    rows: Some
    tokens_per_s: Rate
    itl_s: Seconds
    is_last: bool


class MemoryUse(_Part, frozen=True):
    """`blocks` were taken for KV; `room_blocks` would have fitted, had the slots any use for them."""

    weights_bytes: Count
    workspace_bytes: Count
    block_bytes: Some
    block_tokens: Some
    blocks: Some
    room_blocks: Count

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_tokens

    def sequences(self, tokens: int) -> int:
        """How many sequences that have come to `tokens` tokens the blocks hold at once."""
        return self.blocks // -(-tokens // self.block_tokens)


class Machine(_Part, frozen=True):
    """`device` names the card, or the processor again."""

    device: Text
    processor: Text
    cores: Count
    python: Text
    torch: Text
    headrace: Text


class ModelProfile(_Part, frozen=True):
    """`files` are sha256 by file name of what was measured; `fingerprint` names its numerics. The five coefficients are
    those of `CostProfile`; they have no defaults here: a plan on a guess is not a plan."""

    name: Text
    model: Text
    files: dict[str, str]
    fingerprint: Text
    device: Text
    dtype: Text
    measured_at: Text
    machine: Machine
    slots: Some
    context_len: Some
    max_step_tokens: Some
    max_step_s: Seconds
    c0_s: Seconds
    c_in_s: Seconds
    c_out_s: Seconds
    c_kv_s: Seconds
    c_att_s: Seconds
    # How far the coefficients are from what they were fitted to, as shares of it.
    fit_error_median: Rate
    fit_error_worst: Rate
    decode: Annotated[tuple[DecodePoint, ...], Meta(min_length=1, max_length=1000)]
    prompts: Annotated[tuple[PromptPoint, ...], Meta(min_length=1, max_length=1000)]
    knees: Annotated[tuple[Knee, ...], Meta(min_length=1, max_length=1000)]
    memory: MemoryUse
    # What was left out of the sweep, in words.
    notes: Annotated[tuple[Text, ...], Meta(max_length=1000)] = ()
    format: str = FORMAT
    version: int = VERSION

    @property
    def cost(self) -> CostProfile:
        return CostProfile(self.c0_s, self.c_in_s, self.c_out_s, self.c_kv_s, self.c_att_s)


def is_profile(raw: object) -> bool:
    """Whether a document calls itself one, of whatever version."""
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def convert_profile(raw: object, where: str, param: str) -> ModelProfile:
    """From what a JSON document held. InvalidInput for what is no profile, one of another version, or a damaged one."""
    if not isinstance(raw, dict) or not is_profile(raw):
        raise InvalidInput(f"{where} is not a Headrace profile", param=param)
    version = raw.get("version")
    if version != VERSION:
        told = f"version {version}" if isinstance(version, int) else "no version that this Headrace knows"
        message = f"{where} has {told}, and this Headrace reads {VERSION}: measure again (headrace models profile)"
        raise InvalidInput(message, param=param)
    try:
        profile = msgspec.convert(raw, ModelProfile)
        check_profile(profile.cost)
    except (msgspec.ValidationError, InvalidInput, RecursionError) as error:
        raise InvalidInput(f"{where} is damaged: {error}", param=param) from None
    return profile
