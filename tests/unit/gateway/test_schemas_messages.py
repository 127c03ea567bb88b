"""Conversations: roles, parts, calls and their answers."""

from typing import Any

import pytest

from headrace.gateway.schemas.tokens import TokenizeBody, tokenize_ask
from headrace.serving.ask import Ask
from tests.unit.gateway.bodies import chat_ask, refused

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}


def rendered(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    found = chat_ask(messages=list(messages)).messages
    assert found is not None
    return found


def test_every_role_reaches_the_template() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": "be kind", "name": "s"},
        {"role": "user", "content": "hi", "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "a cat", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "A cat.", "reasoning_content": "it purrs"},
    ]
    assert rendered(*messages) == messages


def test_parts_of_text_are_kept_and_a_single_one_is_plain_text() -> None:
    one, two = (
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b", "prompt_cache_breakpoint": {"mode": "explicit"}},
    )
    assert rendered({"role": "user", "content": [one]})[0]["content"] == "a"
    assert rendered({"role": "user", "content": [one, two]})[0]["content"] == [one, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "refusal", "refusal": "no"},
    ],
)
def test_parts_that_are_no_text_are_refused_with_their_place(part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "what is this?"}
    error = refused(chat_ask, messages=[{"role": "user", "content": "hi"}, {"role": "user", "content": [text, part]}])
    assert error.param == "messages[1].content[1].type"
    assert part["type"] in error.message and "text" in error.message


def test_an_assistant_s_refusal_is_its_text() -> None:
    user = {"role": "user", "content": "hi"}
    assert rendered(user, {"role": "assistant", "refusal": "no"})[1]["content"] == "no"
    part = {"type": "refusal", "refusal": "never"}
    assert rendered(user, {"role": "assistant", "content": [part]})[1]["content"] == "never"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "magic"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "name": "n" * 257}, "messages[0].name"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": 7}]}, "messages[0].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [CALL] * 257}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": "call_1"}, "messages[0].tool_call_id"),
        ({"role": "function", "content": "x", "name": "look"}, "messages[0].name"),
        ("hello", "messages[0]"),
        (None, "messages[0]"),
    ],
)
def test_messages_that_are_none(message: Any, param: str) -> None:
    assert refused(chat_ask, messages=[message]).param == param


def test_a_tool_answers_a_call_that_was_made_before_it() -> None:
    answer = {"role": "tool", "content": "x", "tool_call_id": "call_1"}
    error = refused(chat_ask, messages=[answer, {"role": "assistant", "tool_calls": [CALL]}])
    assert error.param == "messages[0].tool_call_id"


def test_the_deprecated_function_messages_become_calls() -> None:
    found = rendered(
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "a cat"},
    )
    call = found[1]["tool_calls"][0]
    assert call["function"] == {"name": "look", "arguments": "{}"}
    assert found[2] == {"role": "tool", "name": "look", "content": "a cat", "tool_call_id": call["id"]}


def test_tokenize_takes_a_prompt_or_messages() -> None:
    def asked(**fields: Any) -> Ask:
        return tokenize_ask(TokenizeBody(**fields))

    assert asked(prompt="x") == Ask(raw="x")
    assert refused(asked).param == "prompt"
    messages = chat_ask().messages
    found = tokenize_ask(TokenizeBody(messages=[], add_generation_prompt=False))
    assert found.messages == [] and not found.add_generation_prompt
    assert messages == [{"role": "user", "content": "hi"}]
    assert refused(asked, messages=[], continue_final_message=True, add_generation_prompt=True).param == (
        "continue_final_message"
    )
