"""The official `openai` client and the default model: what can only be seen where words and chances mean something, and
where steps take their time.

The model is small. So it is asked what it surely knows, and where its shape is given, only the shape is relied on.
All tests of its server are here, so that it is started once.
"""

import http.client
import json
import math
import threading
import time
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel

from tests.api.live_server import LiveServer

FRANCE: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
    "temperature": 0,
}
SENTENCE = "The capital of France is Paris"
LONG_TOKENS, SHORT_TOKENS, NUM_SHORT = 400, 10, 15
# A machine that is busy with something else may take a second for a token.
MOST_S = 600.0
STORY: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "ignore_eos": True,
    "temperature": 0,
}


class Capital(BaseModel):
    country: Literal["France", "Italy"]
    capital: Literal["Paris", "Rome", "Oslo", "Berlin"]


def test_it_knows_paris(model_client: OpenAI) -> None:
    (choice,) = model_client.chat.completions.create(**FRANCE, max_tokens=20).choices
    assert "Paris" in (choice.message.content or "") and choice.finish_reason == "stop"


def test_it_knows_paris_without_the_client_too(model_server: LiveServer) -> None:
    assert "Paris" in model_server.text(**FRANCE, max_tokens=20)
    assert model_server.ready["models"][0]["context_len"] == 8192


def test_parse_is_really_filled(model_client: OpenAI) -> None:
    found = model_client.chat.completions.parse(**FRANCE, max_tokens=100, response_format=Capital).choices[0].message
    assert found.parsed == Capital(country="France", capital="Paris")


def test_a_forced_call_has_what_was_asked_for(model_client: OpenAI) -> None:
    shape = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": shape}}
    reply = model_client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        temperature=0,
        max_tokens=80,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
    ).choices[0]
    assert reply.finish_reason == "tool_calls" and reply.message.tool_calls is not None
    (call,) = reply.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather" and "Paris" in call.function.arguments


def test_log_probabilities_belong_to_the_tokens(model_client: OpenAI) -> None:
    choice = model_client.chat.completions.create(**FRANCE, max_tokens=5, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    items = choice.logprobs.content
    assert "".join(item.token for item in items) == choice.message.content and len(items) == 5
    for item in items:
        assert bytes(item.bytes or ()).decode() == item.token and item.logprob <= 0.0
        # Greedy: the token is the likeliest of the three, which come in order.
        assert len(item.top_logprobs) == 3 and item.top_logprobs[0].token == item.token
        chances = [other.logprob for other in item.top_logprobs]
        assert chances == sorted(chances, reverse=True) and math.fsum(map(math.exp, chances)) <= 1.0 + 1e-6


def test_log_probabilities_stream_with_their_tokens(model_client: OpenAI) -> None:
    chunks = model_client.chat.completions.create(**FRANCE, max_tokens=4, logprobs=True, stream=True)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    items = [item for each in choices if each.logprobs for item in each.logprobs.content or ()]
    text = "".join(choice.delta.content or "" for choice in choices)
    assert len(items) == 4 and "".join(item.token for item in items) == text


def test_a_bias_forces_and_forbids(model_client: OpenAI, model_server: LiveServer) -> None:
    def id_of(text: str) -> str:
        body = {"model": "default", "prompt": text, "add_special_tokens": False}
        (token,) = model_server.ask("POST", "/tokenize", body)[1]["tokens"]
        return str(token)

    def first(**fields: Any) -> str:
        return model_client.chat.completions.create(**FRANCE, max_tokens=1, **fields).choices[0].message.content or ""

    plain = first()
    assert plain and plain != " Paris"
    assert first(logit_bias={id_of(" Paris"): 100}) == " Paris"
    assert first(logit_bias={id_of(plain): -100}) not in (plain, "")


def test_a_seed_repeats_what_is_drawn(model_client: OpenAI) -> None:
    def drawn(seed: int) -> str:
        fields = {**FRANCE, "temperature": 1.5, "messages": [{"role": "user", "content": "Tell me a story."}]}
        return model_client.chat.completions.create(**fields, max_tokens=8, seed=seed).choices[0].message.content or ""

    assert drawn(1) == drawn(1) and len({drawn(seed) for seed in (1, 2, 3)}) > 1


def test_a_prompt_is_scored_as_evaluation_harnesses_ask(model_client: OpenAI) -> None:
    def scored(prompt: Any) -> Any:
        (choice,) = model_client.completions.create(
            model="default", prompt=prompt, max_tokens=0, echo=True, logprobs=1, temperature=0
        ).choices
        assert choice.text == SENTENCE and choice.logprobs is not None
        return choice.logprobs

    found = scored(SENTENCE)
    tokens, chances, offsets = found.tokens, found.token_logprobs, found.text_offset
    assert "".join(tokens) == SENTENCE and len(tokens) == len(chances) == len(offsets) == len(found.top_logprobs)
    # Nothing stands before the first token that could make it likely.
    assert chances[0] is None and found.top_logprobs[0] is None and all(chance <= 0.0 for chance in chances[1:])
    assert [SENTENCE[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True)] == [True] * len(
        tokens
    )
    # What it knows is likelier than what is wrong, and it is its own first guess.
    assert list(found.top_logprobs[-1]) == [" Paris"]
    wrong = model_client.completions.create(
        model="default", prompt=SENTENCE.replace("Paris", "Oslo"), max_tokens=0, echo=True, logprobs=1, temperature=0
    ).choices[0]
    assert wrong.logprobs is not None and wrong.logprobs.token_logprobs is not None
    place = len([token for token in tokens if token != " Paris"])
    assert chances[place] > (wrong.logprobs.token_logprobs[place] or 0.0) + 2.0


def test_echo_and_output_are_scored_in_one_row(model_client: OpenAI) -> None:
    (choice,) = model_client.completions.create(
        model="default", prompt=SENTENCE, max_tokens=3, echo=True, logprobs=2, temperature=0
    ).choices
    found = choice.logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert (
        "".join(found.tokens) == choice.text and choice.text.startswith(SENTENCE) and len(choice.text) > len(SENTENCE)
    )
    assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(len(found.tokens))]
    assert found.token_logprobs is not None and len(found.token_logprobs) == len(found.tokens)


def answered(server: LiveServer, max_tokens: int) -> Any:
    """How many tokens the answer has, or why there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=MOST_S)
    headers = {
        "Authorization": f"Bearer {server.key}",
        "Content-Type": "application/json",
        # Nobody is sent away because fifteen prompts are more than a slow machine reads in its tier's time.
        "x-headrace-ttft-target-ms": str(int(1e3 * MOST_S)),
    }
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({**STORY, "max_tokens": max_tokens}), headers)
        response = connection.getresponse()
        reply = json.loads(response.read())
        return reply["usage"]["completion_tokens"] if response.status == 200 else reply
    finally:
        connection.close()


def test_short_requests_end_long_before_a_long_one(model_server: LiveServer) -> None:
    """One long request and fifteen short ones at once, over HTTP: the short ones do not wait."""
    ended_s: dict[int, float] = {}
    told: dict[int, Any] = {}
    limits = [LONG_TOKENS] + [SHORT_TOKENS] * NUM_SHORT

    def ask(number: int) -> None:
        told[number] = answered(model_server, limits[number])
        ended_s[number] = time.monotonic()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(limits))]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [told[number] for number in range(len(limits))] == limits
    long_s = ended_s.pop(0) - began_s
    worst_s = max(ended_s.values()) - began_s
    # A fortieth of its tokens, with time for sixteen prompts: far less than half of its time.
    assert worst_s < 0.5 * long_s, f"the worst short request took {worst_s:.1f} s of the long one's {long_s:.1f} s"
