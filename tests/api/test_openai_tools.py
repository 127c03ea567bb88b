"""Tools and structured output through the official `openai` client, against the fake.

What the fake says is noise; what a grammar allows of it is not. So the forced ways are tested here, and that the others
leave a reply as it is.
"""

import json
from typing import Any, Literal

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel, Field

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
SEEDED: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "What is the weather like in Paris?"}],
    "max_completion_tokens": 1000,
    "seed": 7,
    "tools": [WEATHER, CLOCK],
}
PARIS: Any = {"type": "function", "function": {"name": "get_weather"}}


def message(client: OpenAI, **fields: Any) -> ChatCompletionMessage:
    found: ChatCompletionMessage = client.chat.completions.create(**{**SEEDED, **fields}).choices[0].message
    return found


def only(calls: Any) -> Any:
    (call,) = calls
    assert call.type == "function"
    return call


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_text_stays_text_where_no_call_is_forced(client: OpenAI, choice: str) -> None:
    reply = message(client, tool_choice=choice, max_completion_tokens=20)
    assert reply.content and reply.tool_calls is None


def test_a_required_call_is_one_of_the_tools(client: OpenAI) -> None:
    for seed in range(4):
        fields = {**SEEDED, "seed": seed, "parallel_tool_calls": False}
        reply = client.chat.completions.create(**fields, tool_choice="required").choices[0]
        assert reply.finish_reason == "tool_calls" and reply.message.tool_calls
        assert len(reply.message.tool_calls) == 1
        for call in reply.message.tool_calls:
            assert call.type == "function" and call.id and call.function.name in ("get_weather", "get_time")
            check_arguments(call.function.name, call.function.arguments)


def test_a_named_call_is_that_one(client: OpenAI) -> None:
    for name in ("get_weather", "get_time"):
        reply = message(client, tool_choice={"type": "function", "function": {"name": name}})
        assert reply.tool_calls is not None and len(reply.tool_calls) == 1
        (call,) = reply.tool_calls
        assert call.type == "function" and call.function.name == name
        check_arguments(name, call.function.arguments)


def check_arguments(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "get_time":
        assert found == {}
    else:
        assert set(found) == {"city", "days"} and found["city"] in ("Paris", "Rome", "Oslo") and 1 <= found["days"] <= 7


def test_calls_stream_by_fragments(client: OpenAI) -> None:
    whole = only(message(client, tool_choice=PARIS).tool_calls)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**SEEDED, tool_choice=PARIS, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    # The id, the kind and the name come once, with the first fragment.
    assert deltas[0].id and deltas[0].type == "function"
    assert deltas[0].function is not None and deltas[0].function.name == "get_weather"
    assert all(delta.id is None and delta.function is not None and not delta.function.name for delta in deltas[1:])
    assert len(deltas) > 2
    fragments = [delta.function.arguments or "" for delta in deltas if delta.function is not None]
    assert "".join(fragments) == whole.function.arguments
    # As OpenAI's: a call that was named by the caller ends with "stop".
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert not any(chunk.delta.content for chunk in chunks)


def test_the_stream_helper_puts_a_call_together(client: OpenAI) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with client.chat.completions.stream(**{**SEEDED, "tools": [strict]}, tool_choice=PARIS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    call = only(final.choices[0].message.tool_calls)
    assert call.function.name == "get_weather" and call.function.parsed_arguments == json.loads(call.function.arguments)
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds


def test_a_conversation_goes_on_with_the_result_of_a_call(client: OpenAI) -> None:
    first = client.chat.completions.create(**SEEDED, tool_choice=PARIS)
    asked = first.choices[0].message
    call = only(asked.tool_calls)
    answer = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 24 degrees"}
    # As the client's own documentation has it: the message goes back as it came.
    messages = [*SEEDED["messages"], asked, answer]
    second = client.chat.completions.create(**{**SEEDED, "messages": messages, "max_completion_tokens": 20})
    assert second.choices[0].message.content and first.usage is not None and second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + len("Sunny, 24 degrees")


class Measurement(BaseModel):
    unit: Literal["celsius", "fahrenheit"]
    degrees: int = Field(ge=-60, le=60)
    hours: list[Literal["dawn", "noon", "dusk"]] = Field(min_length=1, max_length=3)


def test_parse_fills_a_model(client: OpenAI) -> None:
    for seed in range(3):
        fields = {**SEEDED, "seed": seed, "tools": []}
        choice = client.chat.completions.parse(**fields, response_format=Measurement).choices[0]
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Measurement)


def test_a_streamed_structure_is_parsed_as_well(client: OpenAI) -> None:
    fields = {**SEEDED, "tools": []}
    whole = client.chat.completions.parse(**fields, response_format=Measurement).choices[0].message.parsed
    with client.chat.completions.stream(**fields, response_format=Measurement) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == whole is not None


def test_a_json_object_is_one(client: OpenAI) -> None:
    for seed in range(3):
        reply = message(client, seed=seed, tools=[], response_format={"type": "json_object"})
        assert isinstance(json.loads(reply.content or ""), dict)


def test_each_choice_has_its_own_grammar(client: OpenAI) -> None:
    reply = client.chat.completions.parse(**{**SEEDED, "tools": []}, response_format=Measurement, n=3)
    assert len(reply.choices) == 3 and all(choice.message.parsed for choice in reply.choices)


def test_functions_of_the_old_form_still_work(client: OpenAI) -> None:
    fields = {name: value for name, value in SEEDED.items() if name != "tools"}
    reply = client.chat.completions.create(
        **fields, functions=[WEATHER["function"]], function_call={"name": "get_weather"}
    ).choices[0]
    assert reply.finish_reason == "stop" and reply.message.function_call is not None
    check_arguments("get_weather", reply.message.function_call.arguments)
