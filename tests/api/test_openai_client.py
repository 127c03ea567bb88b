"""The official `openai` client, unmodified, against the fake: chats, streams, texts, models, ids and headers.

The fake's words mean nothing, but with a seed they are always the same: what one way of asking says, another must.
"""

import asyncio
import re
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.api.live_server import PATIENCE_S, LiveServer, eventually

SEEDED: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_completion_tokens": 40,
    "seed": 7,
}


def said(client: OpenAI, **fields: Any) -> str:
    reply = client.chat.completions.create(**{**SEEDED, **fields})
    content: str | None = reply.choices[0].message.content
    assert content
    return content


def stop_in(text: str) -> str:
    """From inside one word to inside the next, some words from the start: no token of the fake's begins or ends there."""
    return next(found[0] for found in re.finditer(r"[a-z] [a-z]", text) if text.index(found[0]) > 20)


def test_a_chat_has_every_field(client: OpenAI) -> None:
    reply = client.chat.completions.create(**SEEDED)
    (choice,) = reply.choices
    assert (reply.object, reply.model, choice.index, choice.message.role) == ("chat.completion", "fake", 0, "assistant")
    assert choice.finish_reason == "length" and choice.message.content and choice.message.refusal is None
    assert reply.id.startswith("chatcmpl-") and reply.created > 1.7e9 and reply.system_fingerprint
    usage = reply.usage
    assert usage is not None and usage.completion_tokens == 40
    assert usage.total_tokens == usage.prompt_tokens + 40 and usage.prompt_tokens_details is not None


def test_content_in_parts_is_the_same_message(client: OpenAI) -> None:
    whole = said(client)
    parts = [{"type": "text", "text": "Hello"}]
    assert said(client, messages=[{"role": "user", "content": parts}]) == whole
    assert said(client, messages=[{"role": "user", "content": "Hello!"}]) != whole
    several = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    reply = client.chat.completions.create(**{**SEEDED, "messages": [{"role": "user", "content": several}]})
    assert reply.choices[0].message.content
    # Two texts, not the words of a list that holds them.
    assert reply.usage is not None and reply.usage.prompt_tokens <= len("<|im_start|>user\nHel\nlo") + 10


def test_every_role_is_understood(client: OpenAI) -> None:
    roles = ("system", "user", "assistant", "developer", "user")
    reply = client.chat.completions.create(
        **{**SEEDED, "messages": [{"role": role, "content": f"I am {role}"} for role in roles]}
    )
    assert reply.usage is not None and reply.usage.prompt_tokens > sum(len(f"I am {role}") for role in roles)


def test_a_stream_says_the_same_and_has_one_end(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(**SEEDED, stream=True))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == said(client)
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert len(choices) > 5 and len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_options_add_one_chunk_with_the_usage(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(**SEEDED, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all("usage" in chunk.model_fields_set and chunk.choices for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 40


def test_the_stream_helper_puts_the_reply_together(client: OpenAI) -> None:
    # The helper takes a reply that was cut by its limit for an error: this one ends at a stop string.
    text = said(client)
    stop = stop_in(text)
    with client.chat.completions.stream(**SEEDED, stop=stop) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(stop)]
    assert final.choices[0].finish_reason == "stop"
    assert kinds.count("content.delta") > 5 and kinds.count("content.done") == 1


def test_three_choices_differ_and_are_told_apart(client: OpenAI) -> None:
    reply = client.chat.completions.create(**SEEDED, n=3)
    texts = [choice.message.content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == said(client)
    assert reply.usage is not None and reply.usage.completion_tokens == 120
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**SEEDED, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_a_seed_repeats_and_another_does_not(client: OpenAI) -> None:
    assert said(client) == said(client)
    assert said(client, seed=8) != said(client)
    assert said(client, seed=None) != said(client, seed=None)


@pytest.mark.parametrize("streamed", [False, True])
def test_text_ends_before_a_stop_string_that_spans_tokens(client: OpenAI, streamed: bool) -> None:
    text = said(client)
    stop = stop_in(text)
    expected = text[: text.index(stop)]
    fields: dict[str, Any] = {**SEEDED, "stop": ["never in there", stop]}
    if not streamed:
        (choice,) = client.chat.completions.create(**fields).choices
        assert (choice.message.content, choice.finish_reason) == (expected, "stop")
        return
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_hold(client: OpenAI, limit: str) -> None:
    fields: dict[str, Any] = {name: value for name, value in SEEDED.items() if name != "max_completion_tokens"}
    reply = client.chat.completions.create(**{**fields, limit: 3})
    assert reply.usage is not None and reply.usage.completion_tokens == 3


def test_fields_of_other_servers_pass_through_the_client(client: OpenAI) -> None:
    more = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 2, "return_token_ids": True, "no_such_field": 1}
    reply = client.chat.completions.create(**SEEDED, extra_body=more)
    ids = (reply.choices[0].model_extra or {})["token_ids"]
    assert len(ids) == 40 and all(isinstance(token, int) for token in ids)


def test_completions_take_texts_and_ids_alike(client: OpenAI) -> None:
    def texts(prompt: Any, **fields: Any) -> list[str]:
        reply = client.completions.create(model="default", prompt=prompt, max_tokens=8, seed=7, **fields)
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        return [choice.text for choice in reply.choices]

    (first,), (second,) = texts("ab"), texts("cd")
    assert first and first != second
    assert texts(["ab", "cd"]) == [first, second]
    # The fake's ids are bytes.
    assert texts([97, 98]) == [first]
    assert texts([[97, 98], [99, 100]]) == [first, second]
    assert texts(["ab", "cd"], echo=True) == ["ab" + first, "cd" + second]
    assert len(texts(["ab", "cd"], n=2)) == 4


def test_completions_stream(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "default", "prompt": ["ab", "cd"], "max_tokens": 8, "seed": 7, "echo": True}
    whole = [choice.text for choice in client.completions.create(**fields).choices]
    texts, ends = ["", ""], []
    for chunk in client.completions.create(**fields, stream=True):
        assert chunk.object == "text_completion"
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert texts == whole and sorted(ends) == [0, 1]


def test_models_are_listed_and_found_by_alias(client: OpenAI) -> None:
    (listed,) = client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == ("fake", "model", "headrace")
    assert client.models.retrieve("fake") == client.models.retrieve("default") == listed
    assert (listed.model_extra or {})["max_model_len"] == 8192


def test_a_request_has_an_id_and_tells_its_stages(client: OpenAI, fake_server: LiveServer) -> None:
    raw = client.chat.completions.with_raw_response.create(**SEEDED)
    reply = raw.parse()
    request_id = raw.headers["x-request-id"]
    assert reply._request_id == request_id and reply.id == "chatcmpl-" + request_id.removeprefix("req_")
    timing = dict(re.findall(r"([a-z-]+);dur=([0-9.]+)", raw.headers["server-timing"]))
    assert {"receive", "authenticate", "tokenise", "route", "prefill", "decode", "detokenise"} <= set(timing)
    told_ms = sum(map(float, timing.values()))
    assert abs(told_ms - int(raw.headers["openai-processing-ms"])) < 2.0
    # What was told with the answer is what the explanation says, but for the client's own part.
    status, explained = fake_server.ask("GET", f"/v1/requests/{request_id}/explain")
    assert status == 200 and abs(explained["stages"]["decode"] * 1e3 - float(timing["decode"])) < 0.01


@pytest.mark.parametrize("header", ["X-Request-Id", "X-Client-Request-Id"])
def test_a_client_may_name_its_request(client: OpenAI, header: str) -> None:
    name = f"mine-{header.lower()}"
    assert client.chat.completions.create(**SEEDED, extra_headers={header: name})._request_id == name


def test_the_async_client_asks_many_things_at_once(client: OpenAI, fake_server: LiveServer) -> None:
    async def ask_all() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{fake_server.url}/v1", api_key=fake_server.key, max_retries=0, timeout=PATIENCE_S
        ) as many:

            async def whole(seed: int) -> str:
                reply = await many.chat.completions.create(**{**SEEDED, "seed": seed})
                return reply.choices[0].message.content or ""

            async def streamed(seed: int) -> str:
                text = ""
                async for chunk in await many.chat.completions.create(**{**SEEDED, "seed": seed}, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*(ask(seed) for seed in range(10) for ask in (whole, streamed)))

    texts = asyncio.run(ask_all())
    assert texts[0::2] == texts[1::2] == [said(client, seed=seed) for seed in range(10)]


def test_a_stream_that_is_closed_half_way_is_cancelled(client: OpenAI, fake_server: LiveServer) -> None:
    fields = {**SEEDED, "max_completion_tokens": 4000}
    headers = {"x-request-id": "closed-half-way", "x-headrace-on-disconnect": "cancel"}
    with client.chat.completions.create(**fields, stream=True, extra_headers=headers) as stream:
        for number, _ in enumerate(stream):
            if number == 3:
                break

    def explanation() -> dict[str, Any] | None:
        status, found = fake_server.ask("GET", "/v1/requests/closed-half-way/explain")
        return dict(found) if status == 200 else None

    told = eventually(explanation, "the request never ended")
    assert told["error"] == "disconnected" and told["finish_reasons"] == ["error"]
    assert 3 <= told["usage"]["completion_tokens"] < 4000
    assert said(client)
