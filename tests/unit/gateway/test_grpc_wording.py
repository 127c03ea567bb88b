"""Chunks of gRPC: they say what server-sent events say, whatever was said, and wherever one begins to read."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.dialects.chat import ChatDialect
from headrace.gateway.dialects.completion import CompletionDialect
from headrace.gateway.dialects.envelope import Wants
from headrace.gateway.grpc import headrace_pb2 as pb
from headrace.gateway.grpc.wording import ChunkWording
from headrace.streams.record import CallDelta, Ending, Failure, Part, Record, Score, Usage
from headrace.streams.stream import Stream
from tests.unit.gateway.told import HEADING, chunks, records_of, streams

Said = dict[int, tuple[str, list[int], str | None, list[float]]]


def worded(dialect: ChatDialect | CompletionDialect, records: Sequence[Record]) -> ChunkWording:
    stream = Stream("req_1", "first", dialect, model="tiny")
    stream.records = list(records)
    return ChunkWording(stream)


def heard(wording: ChunkWording, records: Sequence[Record]) -> list[pb.PredictChunk]:
    return [pb.PredictChunk.FromString(data) for _, data in wording.frames(records)]


def joined(found: Iterable[pb.PredictChunk]) -> Said:
    """By choice: text, ids, finish, log-probabilities."""
    said: Said = {}
    for chunk in found:
        for choice in chunk.choices:
            text, ids, finish, scores = said.get(choice.index, ("", [], None, []))
            finish = choice.finish_reason if choice.HasField("finish_reason") else finish
            scores = scores + [score.logprob for score in choice.logprobs]
            said[choice.index] = (text + choice.text, [*ids, *choice.token_ids], finish, scores)
    return said


def as_events(found: Iterable[dict[str, Any]]) -> Said:
    said: Said = {}
    for chunk in found:
        for choice in chunk["choices"]:
            text, ids, finish, scores = said.get(choice["index"], ("", [], None, []))
            content = choice["delta"].get("content") if "delta" in choice else choice["text"]
            scored = choice["logprobs"] or {}
            new = scored.get("token_logprobs") or [entry["logprob"] for entry in scored.get("content", ())]
            finish = choice["finish_reason"] or finish
            said[choice["index"]] = (text + (content or ""), ids + choice["token_ids"], finish, scores + new)
    return said


@given(streams(has_calls=True), st.booleans())
def test_chat_is_what_its_events_are(told: tuple[int, list[Record]], echoes: bool) -> None:
    num_choices, records = told
    dialect = ChatDialect(HEADING, Wants(token_ids=True, logprobs=True, opening="So, " if echoes else ""), num_choices)
    assert joined(heard(worded(dialect, records), records)) == as_events(chunks(dialect, records))


@given(streams(has_calls=False))
def test_a_completion_is_what_its_events_are(told: tuple[int, list[Record]]) -> None:
    num_choices, records = told
    dialect = CompletionDialect(HEADING, Wants(token_ids=True, logprobs=True), num_choices)
    assert joined(heard(worded(dialect, records), records)) == as_events(chunks(dialect, records))


@given(streams(has_calls=True), st.data())
def test_a_chunk_is_the_same_for_whoever_reads_it_from_wherever(told: tuple[int, list[Record]], data: Any) -> None:
    num_choices, records = told
    dialect = ChatDialect(HEADING, Wants(), num_choices)
    whole = worded(dialect, records).frames(records)
    after = data.draw(st.integers(0, len(records) - 1))
    assert worded(dialect, records).frames(records[after:]) == [each for each in whole if each[0] > after]
    reading = worded(dialect, records)
    reading.frames(records)
    assert reading.end(records[-1]) == worded(dialect, records).end(records[-1])


def test_a_prompt_that_is_told_is_no_part_of_what_was_said() -> None:
    prompt = Part(0, (7, 8), "Once", (Score(7, b"O", None), Score(8, b"nce", -0.5)), is_prompt=True)
    records = records_of([prompt, Part(0, (9,), " upon", finish="length")])
    wants = Wants(token_ids=True, echo=True, prompt_logprobs=True)
    (chunk,) = heard(worded(CompletionDialect(HEADING, wants, 1), records), records[:1])
    (choice,) = chunk.choices
    assert (choice.text, list(choice.token_ids), list(choice.prompt_token_ids)) == ("Once upon", [9], [7, 8])
    assert [score.HasField("logprob") for score in choice.prompt_logprobs] == [False, True]


def test_tool_calls_come_in_fragments_with_a_name_once() -> None:
    records = records_of(
        [Part(0, (1,), calls=(CallDelta(0, "call_1", "look", "{"),))],
        [Part(0, (2,), calls=(CallDelta(0, arguments="}"), CallDelta(1, broken_text="<tool>")), finish="tool_calls")],
    )
    first, second = heard(worded(ChatDialect(HEADING, Wants(), 1), records), records[:2])
    assert list(first.choices[0].tool_calls) == [pb.ToolCall(index=0, id="call_1", name="look", arguments="{")]
    assert list(second.choices[0].tool_calls) == [pb.ToolCall(index=0, arguments="}")]
    assert second.choices[0].finish_reason == "tool_calls"


def test_the_end_tells_what_was_used_and_what_broke() -> None:
    records = records_of([Part(0, (1, 2), "a")], [Part(0, (3,), "b", index=2)])
    wording = worded(ChatDialect(HEADING, Wants(), 1), records)
    end = pb.PredictChunk.FromString(wording.end(records[-1]))
    assert (end.is_final, end.chunk_seq, end.global_seq, wording.failure) == (True, 3, 3, None)
    assert dict(end.stages_ms) == {"decode": 250.0}
    failure = Failure("row_failed", "It broke.", 500, "prompt")
    broken = pb.PredictChunk.FromString(wording.end(Record(1), failure))
    assert (broken.error.code, broken.error.param, broken.error.type) == ("row_failed", "prompt", "server_error")
    assert not broken.HasField("usage") and wording.failure is failure
    ended = Record(3, ending=Ending(Usage(), failure))
    assert pb.PredictChunk.FromString(wording.end(ended)).error.status == 500


def test_the_stubs_are_those_of_the_proto(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    source = Path(__file__).parents[3] / "src"
    proto = "headrace/gateway/grpc/headrace.proto"
    assert protoc.main(["", f"-I{source}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", proto]) == 0
    for name in ("headrace_pb2.py", "headrace_pb2.pyi"):
        folder = Path(proto).parent
        assert (tmp_path / folder / name).read_text() == (source / folder / name).read_text()
