"""Text completions as the official client reads them, streamed and whole."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.dialects.envelope import Wants
from headrace.gateway.errors import StreamFailed
from headrace.streams.record import Alternative, Ending, Failure, Part, Record, Score
from tests.unit.gateway.told import HEADING, USAGE, by_index, chunks, events, lagging, records_of, streams


def dialect(num_choices: int = 1, /, **wants: Any) -> CompletionDialect:
    return CompletionDialect(HEADING, Wants(**wants), num_choices)


def whole(found: CompletionDialect, records: list[Record]) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(found.reply(records)), type=dict[str, Any])


def joined(found: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = [{"text": "", "lists": {}, "ids": [], "finish": None} for _ in range(num_choices)]
    for said in by_index(found):
        choice = choices[said["index"]]
        choice["text"] += said["text"]
        for name, values in (said["logprobs"] or {}).items():
            choice["lists"].setdefault(name, []).extend(values)
        choice["ids"] += said.get("token_ids", [])
        choice["finish"] = said["finish_reason"] or choice["finish"]
    return choices


@given(st.data(), st.booleans(), st.booleans())
def test_a_stream_put_together_is_the_whole_body(data: Any, logprobs: bool, token_ids: bool) -> None:
    num_choices, records = data.draw(streams(has_calls=False))
    found = dialect(num_choices, logprobs=logprobs, token_ids=token_ids)
    body = whole(found, records)
    Completion.model_validate(body, strict=True)
    expected = joined([body], num_choices)
    told = chunks(found, records)
    assert joined(told, num_choices) == expected
    for chunk in told:
        # The types know no chunk: a reason is missing until the last.
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(chunk, strict=True)
    merged = joined(chunks(found, data.draw(lagging(records))), num_choices)
    for choice, other in zip(merged, expected, strict=True):
        # A merged part has one place in the text for all of its tokens.
        choice["lists"].pop("text_offset", None), other["lists"].pop("text_offset", None)
    assert merged == expected


def test_a_plain_chunk_is_these_bytes() -> None:
    assert dialect().frame(Record(2, (Part(1, (5,), "lo"),))) == (
        b'id: 2\ndata: {"id":"chatcmpl-1","object":"text_completion","created":1700000000,"model":"tiny",'
        b'"system_fingerprint":"fp_1","choices":[{"index":1,"text":"lo","logprobs":null,"finish_reason":null}]}\n\n'
    )
    assert dialect().frame(Record(1, (Part(0, (5,)),))) == b""


PROMPT = Part(
    0,
    (8, 9),
    "xy",
    (Score(8, b"x", None), Score(9, b"y", -1.0, (Alternative(7, b"z", -0.25), Alternative(9, b"y", -1.0)))),
    is_prompt=True,
)


def test_an_echo_is_scored_with_the_reply() -> None:
    said = Part(0, (1,), "a", (Score(1, b"a", -0.5),), finish="length", offset=2)
    for records in (records_of([PROMPT, said]), records_of([PROMPT], [said])):
        found = dialect(echo=True, logprobs=True)
        choice = whole(found, records)["choices"][0]
        assert choice["text"] == "xya" and choice["finish_reason"] == "length"
        assert choice["logprobs"] == {
            "tokens": ["x", "y", "a"],
            "token_logprobs": [None, -1.0, -0.5],
            "top_logprobs": [None, {"z": -0.25, "y": -1.0}, {"a": -0.5}],
            "text_offset": [0, 1, 2],
        }
        assert joined(chunks(found, records), 1)[0]["lists"] == choice["logprobs"]


PARTY = "🎉".encode()
START, END = b"<|im_start|>", b"<|im_end|>"


def parts_of(*said: tuple[list[bytes], str], echo: int = 0) -> list[Part]:
    """The tokens and the text of each part; the first `echo` of them are of the prompt."""
    parts: list[Part] = []
    offset = 0
    for place, (tokens, text) in enumerate(said):
        scores = tuple(Score(1, token, -1.0) for token in tokens)
        is_prompt = place < echo
        parts.append(Part(0, (1,) * len(tokens), text, scores, offset=0 if is_prompt else offset, is_prompt=is_prompt))
        offset += len(text)
    parts[-1] = msgspec.structs.replace(parts[-1], finish="stop")
    return parts


def offsets(parts: list[Part]) -> list[int]:
    found = dialect(echo=True, logprobs=True)
    records = records_of(*[[part] for part in parts])
    (choice,) = whole(found, records)["choices"]
    assert joined(chunks(found, records), 1)[0]["lists"] == choice["logprobs"]
    told: list[int] = choice["logprobs"]["text_offset"]
    return told


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param(
            parts_of(([b"a"], "a"), ([PARTY[:2], PARTY[2:3], PARTY[3:]], "🎉"), ([b"b"], "b"),
                     ([PARTY[:1], PARTY[1:2], PARTY[2:]], "🎉"), ([END], "")),
            [0, 1, 1, 1, 2, 3, 3, 3, 4], id="half characters",
        ),
        pytest.param(
            parts_of(([b"a", PARTY[:2], PARTY[2:3], PARTY[3:], b"b", PARTY[:1], PARTY[1:2], PARTY[2:], END], "a🎉b🎉")),
            [0, 1, 1, 1, 2, 3, 3, 3, 4], id="half characters, merged",
        ),
        pytest.param(parts_of(([b"a" + PARTY[:2]], "a"), ([PARTY[2:] + b"b", b"c"], "🎉bc")), [0, 1, 3], id="across parts"),
        pytest.param(parts_of(([START, START, END, b"abcd"], "abcd"), ([b"x"], "x"), echo=1), [0, 0, 0, 0, 4], id="hidden"),
        pytest.param(parts_of(([START, b"ab"], "<|im_start|>ab"), ([b"x"], "x"), echo=1), [0, 12, 14], id="shown"),
        pytest.param(parts_of(([b"\xff", PARTY[:2], b"a", b"b"], "\ufffd\ufffdab")), [0, 1, 1, 3], id="no characters"),
        pytest.param(parts_of(([START, b" Hi", b" you"], "Hi you"), ([b"x"], "x"), echo=1), [0, 0, 2, 6], id="opening space"),
        pytest.param(
            parts_of(([b"caf", "é".encode(), b" au", b" lait"], "cafe\u0301 au lait"), ([b"x"], "x"), echo=1),
            [0, 3, 5, 8, 13], id="another form",
        ),
        pytest.param(parts_of(([b"a.\n"], "a."), ([b"b"], "\nb"), ([b"c\n\n"], "c")), [0, 3, 4], id="held back"),
    ],
)  # fmt: skip
def test_offsets_count_characters_of_the_text(parts: list[Part], expected: list[int]) -> None:
    assert offsets(parts) == expected


@given(st.data(), st.text(st.sampled_from("aé€🎉 "), max_size=8))
def test_offsets_are_those_of_the_characters_that_bytes_complete(data: Any, text: str) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    said: list[tuple[list[bytes], str]] = []
    expected, waiting, num_chars = list[int](), list[bytes](), 0
    for begin, end in pairwise(cuts):
        if data.draw(st.booleans()):
            waiting.append(START)
            expected.append(num_chars)
        waiting.append(raw[begin:end])
        expected.append(num_chars)
        complete = raw[:end].decode(errors="ignore")
        if len(complete) > num_chars:
            said.append((waiting, complete[num_chars:]))
            waiting, num_chars = [], len(complete)
    parts = parts_of(*said, ([*waiting, END], ""))
    assert offsets(parts) == [*expected, num_chars]


def test_a_prompt_may_be_all_that_is_scored() -> None:
    records = records_of([PROMPT], [Part(0, finish="length", offset=2)])
    choice = whole(dialect(echo=True, logprobs=True), records)["choices"][0]
    assert choice["text"] == "xy" and choice["logprobs"]["tokens"] == ["x", "y"]


def test_scores_of_a_prompt_that_is_not_echoed_stand_apart() -> None:
    quiet = msgspec.structs.replace(PROMPT, text="")
    records = records_of([quiet, Part(0, (1,), "a", (Score(1, b"a", -0.5),), finish="stop")])
    choice = whole(dialect(logprobs=True, prompt_logprobs=True, token_ids=True), records)["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a"] and choice["text"] == "a"
    assert choice["prompt_token_ids"] == [8, 9] and choice["token_ids"] == [1]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "7": {"logprob": -0.25, "rank": 1, "decoded_token": "z"},
            "9": {"logprob": -1.0, "rank": 2, "decoded_token": "y"},
        },
    ]


def test_tokens_that_look_alike_are_one_entry_the_likeliest() -> None:
    half = "é".encode()
    score = Score(1, half[:1], -3.0, (Alternative(2, half[1:], -0.5), Alternative(1, half[:1], -3.0)))
    choice = whole(dialect(logprobs=True), records_of([Part(0, (1,), "", (score,), finish="stop")]))["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}]


def test_usage_comes_last_and_an_error_instead_of_it() -> None:
    told = chunks(dialect(usage=True), records_of([Part(0, (1,), "a", finish="stop")]))
    assert told[0]["usage"] is None and told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == USAGE.completion_tokens
    failed = dialect(usage=True).frame(Record(3, ending=Ending(USAGE, Failure("timed_out", "Too late.", 504))))
    assert [msgspec.json.decode(data)["error"]["code"] for _, data in events(failed)[:-1]] == ["timed_out"]
    assert events(failed)[-1][1] == "[DONE]"


def test_a_choice_that_never_ended_has_no_whole_body() -> None:
    with pytest.raises(StreamFailed):
        dialect(2).reply(records_of([Part(0, (1,), "a", finish="stop")]))
