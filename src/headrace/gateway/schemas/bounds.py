"""How much of anything a request may hold. Owns every bound of the HTTP bodies, as types that decoding enforces.

A bound is met before anything is made of the value: a body that breaks one is refused with the field's name.
"""

import math
from typing import Annotated, Any

from msgspec import Meta

from headrace.core.errors import InvalidInput
from headrace.core.request import MAX_ALLOWED_IDS, MAX_LOGIT_BIAS, MAX_STOP_IDS
from headrace.serving.ask import MAX_CHOICES
from headrace.text.grammar import MAX_CHOICES as MAX_GUIDED_CHOICES
from headrace.text.grammar import MAX_DEPTH as MAX_DEPTH
from headrace.text.grammar import MAX_REGEX_BYTES, MAX_SOURCE_BYTES
from headrace.text.stop import MAX_STOP_CHARS, MAX_STOPS
from headrace.text.template import MAX_MESSAGES as MAX_MESSAGES
from headrace.text.template import MAX_TOOLS as MAX_TOOLS

MAX_INT32 = 2**31 - 1
# Of a body that is long enough to hold them: commas and opening brackets, be they JSON's or a text's. More of them are
# more tokens than a context holds, or made to keep the loop busy.
LONG_BODY_BYTES = 128 << 10
MAX_BODY_COMMAS = 500_000
MAX_BODY_BRACKETS = 100_000
MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20
# Of one request: choices of all prompts, and those times the log-probabilities of each of their tokens.
MAX_SEQUENCES = 1024
MAX_SCORES = 4096
MAX_PARTS = 10_000
MAX_CALLS = 256
MAX_BAD_WORDS = 128
MAX_VARIABLES = 64
MAX_VARIABLE_DEPTH = 16
MAX_BIAS = 100.0
# The least that is not nothing in single precision, which is what sampling computes in.
LEAST_FLOAT = 1.1754943508222875e-38

Flag = bool | None
Name = Annotated[str, Meta(max_length=256)]
Label = Annotated[str, Meta(max_length=512)]
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Repetition = Annotated[float, Meta(ge=1e-3, le=1e3)]
# -1 and 0 are both "off".
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
# -1 is the model's context.
Truncation = Annotated[int, Meta(ge=-1, le=MAX_INT32)]

Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)]
AllowedIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_IDS)]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
# That it is a number is checked once there are not too many of them.
BiasKey = Annotated[str, Meta(min_length=1, max_length=9)]
Biases = Annotated[dict[BiasKey, Bias], Meta(max_length=MAX_LOGIT_BIAS)]
BadWords = Annotated[list[Stop], Meta(max_length=MAX_BAD_WORDS)]

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]
Variables = Annotated[dict[str, Any], Meta(max_length=MAX_VARIABLES)]

Regex = Annotated[str, Meta(min_length=1, max_length=MAX_REGEX_BYTES)]
Source = Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE_BYTES)]
GuidedChoices = Annotated[list[str], Meta(min_length=1, max_length=MAX_GUIDED_CHOICES)]


def check_values(data: bytes) -> None:
    """Refuse a body with more values than any field takes, before they are made."""
    if len(data) < LONG_BODY_BYTES:
        return
    if data.count(b",") > MAX_BODY_COMMAS or data.count(b"{") + data.count(b"[") > MAX_BODY_BRACKETS:
        raise InvalidInput("the body holds too many values")


def check_float(value: float, param: str) -> None:
    """Refuse what lies in the range and is no number to compute with: -0.0, and what single precision has not."""
    if abs(value) < LEAST_FLOAT and (value or math.copysign(1.0, value) < 0.0):
        raise InvalidInput(f"{param} must be zero or at least {LEAST_FLOAT:.3g} in size", param=param)


def check_depth(value: object, most: int, param: str) -> None:
    """Refuse JSON that nests deeper than `most`. A row of brackets costs as much as there are of them."""
    level: list[object] = [value]
    for _ in range(most + 1):
        following: list[object] = []
        for item in level:
            if type(item) is dict:
                following.extend(item.values())
            elif type(item) is list:
                following.extend(item)
        if not following:
            return
        level = following
    raise InvalidInput(f"{param} nests deeper than {most}", param=param)


def check_product(n: int, prompts: int, logprobs: int, *, n_param: str = "n") -> None:
    """Refuse a request whose parts are within bounds and whose product is not."""
    if n * prompts > MAX_SEQUENCES:
        raise InvalidInput(f"n times the number of prompts must be at most {MAX_SEQUENCES}", param=n_param)
    if n * prompts * logprobs > MAX_SCORES:
        raise InvalidInput(f"n times prompts times logprobs must be at most {MAX_SCORES}", param="logprobs")
