"""Chat completions as the official client reads them, streamed and whole."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.gateway.dialects.chat import ChatDialect
from headrace.gateway.dialects.envelope import Wants
from headrace.gateway.errors import StreamFailed
from headrace.streams.reader import merge
from headrace.streams.record import CallDelta, Ending, Failure, Part, Record, Score, Usage
from tests.unit.gateway.told import HEADING, USAGE, by_index, chunks, events, lagging, records_of, streams

HELLO = records_of([Part(0, (1,), "Hel")], [Part(0, (2,), "lo")], [Part(0, (3,), "!", finish="stop")])


def dialect(num_choices: int = 1, /, **wants: Any) -> ChatDialect:
    return ChatDialect(HEADING, Wants(**wants), num_choices)


def whole(found: ChatDialect, records: list[Record]) -> dict[str, Any]:
    body = msgspec.json.encode(found.reply(records))
    ChatCompletion.model_validate_json(body, strict=True)
    return msgspec.json.decode(body, type=dict[str, Any])


def joined(found: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    """The choices that a client puts together from chunks."""
    choices: list[dict[str, Any]] = [
        {"text": "", "calls": {}, "logprobs": [], "ids": [], "finish": None} for _ in range(num_choices)
    ]
    for said in by_index(found):
        choice, delta = choices[said["index"]], said["delta"]
        choice["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            known = choice["calls"].setdefault(call["index"], {"id": "", "type": "", "name": "", "arguments": ""})
            known["id"] += call.get("id", "")
            known["type"] += call.get("type", "")
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
        choice["logprobs"] += (said["logprobs"] or {"content": []})["content"]
        choice["ids"] += said.get("token_ids", [])
        if said["finish_reason"] is not None:
            assert choice["finish"] is None
            choice["finish"] = said["finish_reason"]
    return choices


def choices_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of a whole body."""
    return [
        {
            "text": choice["message"]["content"] or "",
            "calls": {
                place: {"id": call["id"], "type": call["type"], **call["function"]}
                for place, call in enumerate(choice["message"].get("tool_calls", []))
            },
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "ids": choice.get("token_ids", []),
            "finish": choice["finish_reason"],
        }
        for choice in body["choices"]
    ]


@given(st.data(), st.booleans(), st.booleans(), st.booleans())
def test_a_stream_put_together_is_the_whole_body(data: Any, has_calls: bool, logprobs: bool, token_ids: bool) -> None:
    num_choices, records = data.draw(streams(has_calls=has_calls))
    found = dialect(num_choices, logprobs=logprobs, token_ids=token_ids)
    expected = choices_of(whole(found, records))
    for seen in (records, data.draw(lagging(records))):
        told = chunks(found, seen)
        for chunk in told:
            ChatCompletionChunk.model_validate_json(msgspec.json.encode(chunk), strict=True)
        assert joined(told, num_choices) == expected
        roles = [said["index"] for said in by_index(told) if "role" in said["delta"]]
        assert sorted(roles) == list(range(num_choices)), "each choice has its role once"


@given(streams(has_calls=True), st.booleans())
def test_an_event_has_the_number_of_its_record_and_is_one_line(stream: tuple[int, list[Record]], usage: bool) -> None:
    num_choices, records = stream
    for record in records:
        frame = dialect(num_choices, usage=usage).frame(record)
        if frame:
            assert {number for number, _ in events(frame)} == {record.number}
            lines = frame.decode().splitlines()
            assert all(line.startswith(("id: ", "data: ")) or not line for line in lines), lines


def test_frames_are_a_function_of_the_record() -> None:
    assert [dialect().frame(record) for record in HELLO] == [dialect().frame(record) for record in HELLO]


def test_a_plain_chunk_is_these_bytes() -> None:
    assert dialect().frame(HELLO[1]) == (
        b'id: 2\ndata: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"tiny",'
        b'"system_fingerprint":"fp_1","choices":[{"index":0,"delta":{"content":"lo"},"logprobs":null,'
        b'"finish_reason":null}]}\n\n'
    )
    assert dialect().frame(HELLO[-1]) == b"id: 4\ndata: [DONE]\n\n"


def test_the_first_event_names_the_role_of_every_choice() -> None:
    told = chunks(
        dialect(2), records_of([Part(1, (1,), "b")], [Part(0, (1,), "a", finish="stop")], [Part(1, finish="stop")])
    )
    assert [choice["delta"] for choice in told[0]["choices"]] == [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "b"},
    ]
    assert told[1]["choices"][0]["delta"] == {"content": "a"}


def test_a_record_without_anything_to_tell_has_no_frame() -> None:
    silent = Record(2, (Part(0, (5,)),))
    assert dialect().frame(silent) == b""
    assert dialect(token_ids=True).frame(silent) != b""


def test_usage_is_null_until_the_last_chunk() -> None:
    told = chunks(dialect(usage=True), HELLO)
    assert [chunk["usage"] for chunk in told[:-1]] == [None] * 3
    assert told[-1]["choices"] == [] and told[-1]["usage"]["total_tokens"] == 12
    assert told[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    parsed = ChatCompletionChunk.model_validate(told[-1], strict=True)
    assert parsed.usage is not None and parsed.usage.completion_tokens == 5
    assert all("usage" not in chunk for chunk in chunks(dialect(), HELLO))


def test_running_usage_is_in_every_chunk() -> None:
    records = [msgspec.structs.replace(HELLO[0], usage=Usage(7, 0, 1)), *HELLO[1:]]
    told = chunks(dialect(running_usage=True), records)
    assert told[0]["usage"]["completion_tokens"] == 1 and told[0]["usage"]["total_tokens"] == 8
    assert told[1]["usage"] is None
    assert told[-1]["usage"]["total_tokens"] == 12


def test_a_call_is_named_once_and_its_arguments_follow() -> None:
    first = Part(0, (1,), calls=(CallDelta(0, "call_a", "look"),))
    rest = [
        Part(0, (2,), calls=(CallDelta(0, arguments='{"a"'),)),
        Part(0, (3,), calls=(CallDelta(0, arguments=":1}"),)),
    ]
    records = records_of([first], *[[part] for part in rest], [Part(0, finish="tool_calls")])
    deltas = [said["delta"] for said in by_index(chunks(dialect(), records))]
    assert deltas == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"index": 0, "id": "call_a", "type": "function", "function": {"name": "look", "arguments": ""}}
            ],
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {},
    ]
    choice = whole(dialect(), records)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "call_a", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}],
    }


def test_a_call_that_broke_is_text_in_a_whole_body() -> None:
    good = CallDelta(0, "call_a", "look", "{}")
    broken = (CallDelta(1, "call_b", "jump", '{"a'), CallDelta(1, broken_text='<tool_call>{"name":"jump"', place=3))
    records = records_of(
        [Part(0, text="Now", calls=(good,))],
        [Part(0, calls=broken[:1])],
        [Part(0, calls=broken[1:], finish="tool_calls")],
    )
    message = whole(dialect(), records)["choices"][0]["message"]
    assert message["content"] == 'Now<tool_call>{"name":"jump"'
    assert [call["id"] for call in message["tool_calls"]] == ["call_a"]
    alone = records_of([Part(0, calls=broken[:1])], [Part(0, calls=broken[1:], finish="tool_calls")])
    choice = whole(dialect(), alone)["choices"][0]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert [said["finish_reason"] for said in by_index(chunks(dialect(), alone))] == [None, "tool_calls"]


def test_a_call_that_broke_stands_where_it_was_written() -> None:
    first, second = CallDelta(0, "call_a", "look", "{"), CallDelta(1, "call_b", "look", "{")
    # Five characters were said before: the prompt's.
    records = records_of(
        [Part(0, text="a ", calls=(first,), offset=5)],
        [Part(0, text="b ", calls=(CallDelta(0, broken_text="{1 ", place=7), second), offset=7)],
        [Part(0, text=" c", calls=(CallDelta(1, broken_text="{2", place=9),), offset=9, finish="stop")],
    )
    for told in records, [merge(records)]:
        assert whole(dialect(), told)["choices"][0]["message"]["content"] == "a {1 b {2 c"


def test_calls_in_the_form_that_was_before_tools() -> None:
    records = records_of(
        [Part(0, calls=(CallDelta(0, "call_a", "look", "{"),))],
        [Part(0, calls=(CallDelta(0, arguments="}"),), finish="tool_calls")],
    )
    found = dialect(legacy_calls=True)
    told = list(by_index(chunks(found, records)))
    assert [said["delta"]["function_call"] for said in told] == [{"name": "look", "arguments": "{"}, {"arguments": "}"}]
    assert told[-1]["finish_reason"] == "function_call"
    choice = whole(found, records)["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "look", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]


def test_log_probabilities_have_exact_bytes_and_are_finite() -> None:
    scores = (Score(1, "é".encode()[:1], float("-inf")), Score(2, b"a", -0.5))
    records = records_of([Part(0, (1, 2), "é", scores, finish="stop")])
    content = whole(dialect(logprobs=True), records)["choices"][0]["logprobs"]["content"]
    assert content[0] == {"token": "\ufffd", "bytes": [0xC3], "logprob": -9999.0, "top_logprobs": []}
    assert content[1] == {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}
    assert whole(dialect(), records)["choices"][0]["logprobs"] is None


def test_a_prompt_s_ids_and_scores_are_told_where_they_are_wanted() -> None:
    prompt = Part(0, (8, 9), scores=(Score(8, b"x", None), Score(9, b"y", -1.0)), is_prompt=True)
    records = records_of([prompt, Part(0, (1,), "a")], [Part(0, (2,), "b", finish="stop")])
    body = whole(dialect(token_ids=True, prompt_logprobs=True), records)
    assert body["prompt_token_ids"] == [8, 9] and body["choices"][0]["token_ids"] == [1, 2]
    assert body["prompt_logprobs"] == [None, {"9": {"logprob": -1.0, "rank": None, "decoded_token": "y"}}]
    assert body["choices"][0]["message"]["content"] == "ab"
    told = chunks(dialect(token_ids=True), records)
    assert told[0]["prompt_token_ids"] == [8, 9] and "prompt_token_ids" not in told[1]
    assert [said["token_ids"] for said in by_index(told)] == [[1], [2]]
    assert "prompt_token_ids" not in whole(dialect(), records)


def test_an_opening_stands_before_the_reply() -> None:
    found = dialect(opening="Well, ")
    assert joined(chunks(found, HELLO), 1)[0]["text"] == "Well, Hello!"
    assert whole(found, HELLO)["choices"][0]["message"]["content"] == "Well, Hello!"


def test_metadata_is_in_each_chunk_and_stages_in_the_last() -> None:
    first = Record(1, (Part(0, (4,), "a", index=3, finish="stop"),), step=17, age_s=0.125)
    records = [first, Record(2, ending=Ending(USAGE, stages={"decode": 0.25}), age_s=0.5)]
    told = chunks(dialect(metadata=True), records)
    assert told[0]["headrace"] == {
        "request_id": "req_1", "chunk_seq": 1, "token_index": 3, "is_final": False, "batch_id": 17, "latency_ms": 125.0,
    }  # fmt: skip
    assert told[1]["headrace"]["is_final"] and told[1]["headrace"]["stages_ms"] == {"decode": 250.0}
    assert told[1]["choices"] == [] and "usage" not in told[1]


def test_who_did_not_ask_for_metadata_gets_usage_and_no_stages() -> None:
    last = chunks(dialect(usage=True), HELLO)[-1]
    assert last["usage"]["completion_tokens"] and "headrace" not in last
    assert "stages_ms" in chunks(dialect(usage=True, metadata=True), HELLO)[-1]["headrace"]


@pytest.mark.parametrize("before", [0, 2])
def test_a_broken_stream_says_so_once_and_is_done(before: int) -> None:
    failure = Failure("runner_failed", "The worker is gone.", 500)
    records = [*HELLO[:before], Record(before + 1, ending=Ending(USAGE, failure))]
    found = events(b"".join([dialect(usage=True).frame(record) for record in records]))
    assert found[-1][1] == "[DONE]" and len(found) == before + 2
    assert msgspec.json.decode(found[-2][1]) == {
        "error": {"message": "The worker is gone.", "type": "server_error", "param": None, "code": "runner_failed"}
    }


def test_a_choice_that_failed_has_no_whole_body_and_no_reason_in_a_stream() -> None:
    records = records_of([Part(0, (1,), "a", finish="error")])
    with pytest.raises(StreamFailed):
        dialect().reply(records)
    assert [said["finish_reason"] for said in by_index(chunks(dialect(), records))] == [None]


def test_a_tier_is_told_where_it_was_asked_for() -> None:
    found = ChatDialect(msgspec.structs.replace(HEADING, service_tier="default"), Wants(), 1)
    assert whole(found, HELLO)["service_tier"] == "default"
    assert chunks(found, HELLO)[0]["service_tier"] == "default"
    assert "service_tier" not in whole(dialect(), HELLO)


def test_who_speaks_since_when_is_told_and_nothing_else_changes() -> None:
    found = dialect(2, usage=True).bound(7.9, "fp_2")
    assert (found.heading.created, found.heading.fingerprint) == (7, "fp_2")
    told = chunks(found, records_of([Part(0, (1,), "a", finish="stop"), Part(1, finish="stop")]))
    assert told[0]["system_fingerprint"] == "fp_2" and len(told[0]["choices"]) == 2 and told[0]["usage"] is None
