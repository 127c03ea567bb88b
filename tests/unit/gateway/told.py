"""Streams as they might have been said, and what the official client makes of their frames."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from headrace.gateway.dialects.envelope import Heading
from headrace.streams.reader import merge
from headrace.streams.record import Alternative, CallDelta, Dialect, Ending, Part, Record, Score, Usage

HEADING = Heading("chatcmpl-1", "req_1", 1_700_000_000, "tiny", "fp_1")
USAGE = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=5)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.sampled_from(
    ["\u2028", "\x85", "\u2029\r\n", '"\\', "data: [DONE]\n\n", "🎉", ""]
)
LOGPROBS = st.floats(-20, 0, width=32) | st.just(float("-inf"))


def records_of(*steps: Sequence[Part], usage: Usage = USAGE) -> list[Record]:
    """Numbered from 1, with the ending behind them."""
    said = [Record(number, tuple(parts)) for number, parts in enumerate(steps, start=1)]
    return [*said, Record(len(said) + 1, ending=Ending(usage, stages={"decode": 0.25}))]


def events(data: bytes) -> list[tuple[int | None, str]]:
    """Id and data of each event, as the official client cuts them."""
    return [(int(event.id) if event.id else None, event.data) for event in SSEDecoder().iter_bytes(iter([data]))]


def chunks(dialect: Dialect, records: Iterable[Record]) -> list[dict[str, Any]]:
    """All chunks of a stream that ended well."""
    found = [data for record in records for _, data in events(dialect.frame(record))]
    assert found[-1] == "[DONE]" and found.count("[DONE]") == 1
    return [msgspec.json.decode(data, type=dict[str, Any]) for data in found[:-1]]


@st.composite
def scores(draw: Callable[..., Any], ids: Sequence[int]) -> tuple[Score, ...]:
    found = []
    for token in ids:
        top = draw(st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=3), LOGPROBS), max_size=2))
        alternatives = tuple(Alternative(*entry) for entry in top)
        found.append(Score(token, draw(st.binary(max_size=3)), draw(LOGPROBS), alternatives))
    return tuple(found)


@st.composite
def choice_parts(draw: Callable[..., Any], choice: int, *, has_calls: bool) -> list[Part]:
    """All that one choice says, in order, with a finish in its last part."""
    parts: list[Part] = []
    index = offset = num_calls = 0
    for _ in range(draw(st.integers(1, 5))):
        ids = tuple(draw(st.lists(st.integers(0, 500), max_size=2)))
        text = draw(TEXTS)
        calls: list[CallDelta] = []
        if has_calls and draw(st.booleans()):
            calls.append(CallDelta(num_calls, f"call_{choice}_{num_calls}", "look", draw(st.sampled_from(["", "{"]))))
            num_calls += 1
        elif num_calls:
            calls.append(CallDelta(num_calls - 1, arguments=draw(TEXTS)))
        parts.append(Part(choice, ids, text, draw(scores(ids)), tuple(calls), None, index, offset))
        index += len(ids)
        offset += len(text)
    finish = "tool_calls" if num_calls else draw(st.sampled_from(["stop", "length", "content_filter"]))
    parts[-1] = msgspec.structs.replace(parts[-1], finish=finish)
    return parts


@st.composite
def streams(draw: Callable[..., Any], *, has_calls: bool) -> tuple[int, list[Record]]:
    """How many choices, and the records: choices speak in any order, several in one record or alone."""
    num_choices = draw(st.integers(1, 3))
    waiting = [draw(choice_parts(choice, has_calls=has_calls)) for choice in range(num_choices)]
    steps: list[list[Part]] = []
    while any(waiting):
        live = [parts for parts in waiting if parts]
        speaking = draw(st.lists(st.sampled_from(range(len(live))), min_size=1, max_size=len(live), unique=True))
        steps.append([live[which].pop(0) for which in speaking])
    return num_choices, records_of(*steps)


@st.composite
def lagging(draw: Callable[..., Any], records: Sequence[Record]) -> list[Record]:
    """The same stream as a reader sees it that does not keep up; the ending stays alone."""
    rest, found = list(records[:-1]), []
    while rest:
        size = draw(st.integers(1, len(rest)))
        found.append(merge(rest[:size]))
        del rest[:size]
    return [*found, records[-1]]


def by_index(found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for chunk in found:
        yield from chunk["choices"]
