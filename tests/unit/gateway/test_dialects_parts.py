"""What is encoded in parts is what is encoded at once."""

import msgspec
import pytest

from headrace.gateway.dialects.chat import ChatDialect
from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.dialects.envelope import Wants
from headrace.gateway.dialects.parts import encode_in_parts
from headrace.streams.record import Alternative, Part, Score
from tests.unit.gateway.told import HEADING, records_of


@pytest.mark.parametrize("kind", [ChatDialect, CompletionDialect])
@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 1000])
def test_a_reply_is_the_same(kind: type[ChatDialect | CompletionDialect], size: int) -> None:
    scores = (Score(0, b"x", None), *[Score(7, b'"\xc3', -1.0, (Alternative(8, b"b", -2.0),) * 3)] * size)
    prompt = Part(0, tuple(range(size)), "p", scores, is_prompt=True)
    said = [Part(choice, (1,) * size, "é\u2028", scores[1:], finish="stop") for choice in range(3)]
    wants = Wants(logprobs=True, prompt_logprobs=True, token_ids=True, echo=True)
    reply = kind(HEADING, wants, 3).reply(records_of([prompt], said))
    assert encode_in_parts(reply) == msgspec.json.encode(reply)


@pytest.mark.parametrize("value", [None, [], {}, "x", [[1] * 300, [[2] * 300]], {"a": [1] * 300}, [[[[[[1]]]]]]])
def test_any_value_is_the_same(value: object) -> None:
    assert encode_in_parts(value) == msgspec.json.encode(value)
