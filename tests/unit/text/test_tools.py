"""Tool calls are read from streams as models write them; what is no call stays text to the last character."""

import gc
import json
import weakref
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from headrace.core.errors import InvalidInput
from headrace.text.tools.events import ArgumentsDelta, CallEnded, CallStarted, TextDelta, ToolEvent
from headrace.text.tools.scan import MAX_DEPTH, Step, ValueScanner
from headrace.text.tools.syntax import DIALECTS, open_syntax, pick_syntax


class Reply:
    """A stream's events, put together as a client would."""

    def __init__(self, syntax: str, deltas: list[str] | str) -> None:
        reader = open_syntax(syntax)
        self.events: list[ToolEvent] = [event for delta in deltas for event in reader.push(delta)] + reader.finish()
        self.text = "".join(event.text for event in self.events if isinstance(event, TextDelta))
        started = [event for event in self.events if isinstance(event, CallStarted)]
        self.calls = [(call.name, self.arguments(call.index)) for call in started]
        self.ends = [event for event in self.events if isinstance(event, CallEnded)]
        assert [call.index for call in started] == [end.index for end in self.ends] == list(range(len(started)))

    def arguments(self, index: int) -> str:
        return "".join(e.text for e in self.events if isinstance(e, ArgumentsDelta) and e.index == index)

    @property
    def broken(self) -> list[str]:
        return [end.broken_text for end in self.ends if end.broken_text]


CALL = '{"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2.5e3, -0]}}'
ARGUMENTS = '{"city": "Köln", "days": [1, 2.5e3, -0]}'
LLAMA_CALL = '{"type": "function", "name": "f", "parameters": {"a": "}\\"{"}}'


def test_a_stream_that_is_over_is_not_kept_for_the_garbage_collector() -> None:
    gc.disable()
    try:
        reader = open_syntax("hermes")
        reader.push(CALL)
        over = weakref.ref(reader)
        del reader
        assert over() is None
    finally:
        gc.enable()


def test_hermes_calls_with_text_around_them() -> None:
    reply = Reply("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call> done")
    assert reply.calls == [("get_weather", ARGUMENTS)] * 2
    assert reply.text == "Let me see.\n\n done"
    assert not reply.broken


def test_arguments_stream_as_they_are_written() -> None:
    reader = open_syntax("hermes")
    assert reader.push('<tool_call>{"name": "f", "arg') == []
    assert reader.push('uments": {"a') == [CallStarted(0, "f"), ArgumentsDelta(0, '{"a')]
    assert reader.push('": 1 }') == [ArgumentsDelta(0, '": 1 }')]
    assert reader.push("}") == [CallEnded(0)]
    assert reader.push("</tool_call>") == reader.finish() == []


def test_text_is_not_kept_waiting() -> None:
    reader = open_syntax("hermes")
    assert reader.push("a < b <too") == [TextDelta("a < b ")]
    assert reader.push("th>") == [TextDelta("<tooth>")]


def test_arguments_before_the_name_wait_for_it() -> None:
    reader = open_syntax("hermes")
    assert reader.push('<tool_call>{"arguments": {"a": 1}, ') == []
    assert reader.push('"name": "f"}') == [CallStarted(0, "f"), ArgumentsDelta(0, '{"a": 1}'), CallEnded(0)]


def test_a_tagged_call_may_lack_arguments_and_have_other_keys() -> None:
    assert Reply("hermes", '<tool_call>{"name": "now", "why": [1, 2]}</tool_call>').calls == [("now", "{}")]


def test_llama_calls_bare_tagged_and_in_a_row() -> None:
    arguments = '{"a": "}\\"{"}'
    assert Reply("llama3", LLAMA_CALL).calls == [("f", arguments)]
    tagged = Reply("llama3", f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}")
    assert tagged.calls == [("f", arguments)] * 2
    assert tagged.text == ""
    late = Reply("llama3", f"Sure: <|python_tag|>{LLAMA_CALL}")
    assert (late.text, late.calls) == ("Sure: ", [("f", arguments)])


def test_llama_code_behind_the_tag_is_text() -> None:
    code = '<|python_tag|>brave_search.call(query="{}")'
    reply = Reply("llama3", code)
    assert (reply.text, reply.calls) == (code, [])


def test_json_calls_alone_in_lists_and_behind_text() -> None:
    assert Reply("json", CALL).calls == [("get_weather", ARGUMENTS)]
    several = Reply("json", f"[{CALL},\n {CALL}]\n")
    assert (several.calls, several.text) == ([("get_weather", ARGUMENTS)] * 2, "\n")
    behind = Reply("json", f"I will call:\n{CALL}\nNow wait.")
    assert (behind.calls, behind.text) == ([("get_weather", ARGUMENTS)], "I will call:\n\nNow wait.")


@pytest.mark.parametrize("syntax", DIALECTS)
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 7}',
        '{"result": [1, 2, {"name": "x", "arguments": {}}]}',
        "[1, 2]",
        "[]",
        "[link](http://x) {",
        "int main() {\n{\n}\n}",
        '{"name": "", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f"}',
        '{"name": "\\ud83d", "arguments": {}}',
        '<tool_call>{"nom": }</tool_call>',
        "<tool_call>print(1)</tool_call>",
        "<tool_call><tool_call",
        '<tool_call>{"name": "f", "name": "g"}',
        '<|python_tag|>{"name": ',
        "<|python_tag|><|python_tag",
        '{"name": "' + "x" * 300,
        "<tool_call>" + " " * 1000 + "{",
        " \n\t ",
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(syntax: str, text: str) -> None:
    for reply in (Reply(syntax, [text]), Reply(syntax, text)):
        assert (reply.text, reply.calls) == (text, [])


@pytest.mark.parametrize("text", [CALL[:-2], CALL[:60], CALL[:-1] + ', "arguments": {}}', CALL[:50] + "\n" + CALL[50:]])
def test_a_call_that_breaks_after_it_started_is_ended_and_kept_as_text(text: str) -> None:
    reply = Reply("hermes", f"a<tool_call>{text}")
    assert [name for name, _ in reply.calls] == ["get_weather"]
    assert ARGUMENTS.startswith(reply.calls[0][1])
    assert reply.text.removeprefix("a") == f"<tool_call>{text}".removeprefix(reply.broken[0])


def test_a_whole_call_behind_a_broken_one_is_still_a_call() -> None:
    reply = Reply("hermes", f'<tool_call>{{"name" oops</tool_call><tool_call>{CALL}</tool_call>')
    assert reply.calls == [("get_weather", ARGUMENTS)]
    assert reply.text == '<tool_call>{"name" oops</tool_call>'


def test_a_call_without_its_closing_tag_is_a_call() -> None:
    reply = Reply("hermes", f"<tool_call>{CALL}\n")
    assert (reply.calls, reply.text) == ([("get_weather", ARGUMENTS)], "\n")


def test_an_unknown_syntax_is_the_callers_fault() -> None:
    with pytest.raises(InvalidInput, match="'xml'"):
        open_syntax("xml")


def test_the_syntax_is_guessed_from_the_template_then_the_family() -> None:
    assert pick_syntax("... <tool_call></tool_call> ...", "llama") == "hermes"
    assert pick_syntax("... <|python_tag|> ...", "llama") == "llama3"
    assert pick_syntax("", "qwen3") == "hermes"
    assert pick_syntax("{{ messages }}", "llama") == "json"


ENDS = st.sampled_from(
    ["", " text ", "\n", "[", "{", "<tool", "<tool_call>", "</tool_call>", "<|python_tag|>", "; ", ",", "]"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3)
CALLS = st.builds(
    lambda name, arguments, indent: json.dumps({"name": name, "arguments": arguments}, indent=indent),
    st.text(min_size=1, max_size=5),
    OBJECTS,
    st.sampled_from([None, 1]),
)


END = (-1, Step.MORE)


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(borders)]


@pytest.mark.parametrize("syntax", DIALECTS)
@given(parts=st.lists(ENDS | CALLS, max_size=6), size=st.integers(0, 400), places=st.lists(st.integers(0, 400)))
def test_any_cut_of_a_stream_gives_the_same_reply(syntax: str, parts: list[str], size: int, places: list[int]) -> None:
    text = "".join(parts)[:size]
    whole, pieces, letters = Reply(syntax, [text]), Reply(syntax, cut(text, places)), Reply(syntax, text)
    for other in (pieces, letters):
        assert (other.text, other.calls, other.ends) == (whole.text, whole.calls, whole.ends)


@settings(max_examples=50)
@given(name=st.text(min_size=1, max_size=5), arguments=OBJECTS, places=st.lists(st.integers(0, 400)))
def test_arguments_are_exactly_what_was_written(name: str, arguments: dict[str, object], places: list[int]) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    call = f'{{"name": {json.dumps(name)}, "arguments": {written}}}'
    for syntax, text in (("hermes", f"<tool_call>{call}</tool_call>"), ("llama3", call), ("json", f"[{call}]")):
        reply = Reply(syntax, cut(text, places))
        assert (reply.calls, reply.text) == ([(name, written)], "")


@given(st.text(alphabet='{}[]",:\\u0123-+.eEtruefalsn \n', max_size=14) | VALUES.map(json.dumps))
def test_the_scanner_takes_what_json_takes(text: str) -> None:
    try:
        json.loads(text)
        is_json = True
    except ValueError:
        is_json = False
    value = text.rstrip(" \n")
    scanner = ValueScanner()
    end, step = next(
        ((at, step) for at, step in enumerate(map(scanner.feed, value + "\n")) if step is not Step.MORE), END
    )
    # A value ends with its last character; only a number needs the line end behind it.
    assert ((end, step) in ((len(value) - 1, Step.DONE), (len(value), Step.OVER))) == is_json


def test_nesting_is_bounded() -> None:
    scanner = ValueScanner()
    assert [scanner.feed("[") for _ in range(MAX_DEPTH)] == [Step.MORE] * MAX_DEPTH
    assert scanner.feed("[") is Step.BAD
