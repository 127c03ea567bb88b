"""What a model is told of tools, by its template or by us, and the schema that forces a call."""

import asyncio
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import msgspec
import pytest
from llguidance import LLMatcher
from msgspec.structs import replace

from headrace.serving.ask import Ask
from headrace.serving.tools import call_schema, plan_tools
from headrace.text.grammar import CallForm, GrammarDesk
from headrace.text.grammar_source import grammar_source, matcher_limits
from headrace.text.limited import LimitedPool
from headrace.text.rendering import Traits
from tests.unit.serving.network_rig import LEXICON, VOCABULARY
from tests.unit.serving.scripted import ScriptedRig
from tests.unit.text.templates import CHATML

pytestmark = pytest.mark.unit

PLAIN = Traits(system=True, tools=False, tool_calls=False, bos=False, content="string")
KNOWING = Traits(system=True, tools=True, tool_calls=True, bos=False, content="string")
TOOL = {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": {"type": "object"}}}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def plan(traits: Traits, messages: list[dict[str, Any]], syntax: str = "hermes", **fields: Any) -> Any:
    return plan_tools(Ask(messages=messages, **fields), messages, syntax, traits)


def test_a_template_that_knows_tools_is_given_them() -> None:
    planned = plan(KNOWING, [USER], tools=[TOOL])
    assert (planned.messages, planned.tools, planned.syntax) == ([USER], [TOOL], "hermes")


def test_one_that_does_not_is_told_in_front_in_the_form_its_syntax_reads() -> None:
    planned = plan(PLAIN, [USER], tools=[TOOL])
    system, user = planned.messages
    assert planned.tools == () and user == USER
    assert system["role"] == "system" and '"description":"Does it."' in system["content"]
    assert '<tool_call>\n{"name":' in system["content"]
    bare = plan(PLAIN, [USER], "json", tools=[TOOL]).messages[0]["content"]
    assert "<tool_call>" not in bare and '{"name":' in bare


def test_a_system_message_keeps_its_place_and_a_template_without_one_gets_it_with_the_first() -> None:
    system = {"role": "system", "content": "Be brief."}
    planned = plan(PLAIN, [system, USER], tools=[TOOL])
    assert len(planned.messages) == 2 and planned.messages[0]["content"].startswith("Be brief.\n\nYou can call")
    planned = plan(replace(PLAIN, system=False), [USER], tools=[TOOL])
    assert len(planned.messages) == 1 and planned.messages[0]["content"].endswith("\n\nhi")


def test_earlier_calls_and_results_are_written_out_where_the_template_would_lose_them() -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert plan(KNOWING, messages).messages == messages
    written = plan(PLAIN, messages).messages
    assert written[1] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    }
    assert written[2] == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}


def test_a_forced_call_keeps_its_tools_references_and_data() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"const": {"$ref": "#/left/alone"}}},
        "required": ["a"],
        "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/y"}}, "y": {"type": "integer"}},
    }
    named = {"type": "function", "function": {"name": "g", "parameters": parameters}}
    schema = call_schema([TOOL, named])
    good = {"name": "g", "arguments": {"a": [1], "b": {"$ref": "#/left/alone"}}}
    jsonschema.validate(good, schema)
    for bad in ({**good, "name": "h"}, {**good, "more": 1}, {"name": "g", "arguments": {"a": ["x"]}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


@pytest.mark.parametrize(
    ("syntax", "choice", "tag", "most"),
    [("llama3", "required", "", 1), ("hermes", "f", "<tool_call>", 1), ("hermes", "required", "<tool_call>", 16)],
)
def test_calls_are_forced_in_the_form_that_is_read(syntax: str, choice: str, tag: str, most: int) -> None:
    planned = plan(KNOWING, [USER], syntax, tools=[TOOL], tool_choice=choice)
    form = msgspec.json.decode(planned.grammar.source, type=CallForm)
    assert (form.open_tag, form.most, planned.is_named) == (tag, most, choice == "f")


def test_beside_a_schema_a_call_can_be_made_where_its_tags_tell_it_from_an_answer(pool: LimitedPool) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    planned = plan(KNOWING, [USER], tools=[TOOL], json_schema=schema)
    assert (planned.syntax, planned.names, planned.is_forced) == ("hermes", {"f"}, False)
    GrammarDesk(pool).check_sync(planned.grammar, param="tools")
    matcher = LLMatcher(LEXICON.tokens, grammar_source(planned.grammar), limits=matcher_limits(planned.grammar))
    for good in ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', '{\n  "age": 7\n}'):
        assert matcher.validate_tokens(list(good.encode())) == len(good)
    for bad in ('<tool_call>\n{"name": "g"', '{"age": "7"'):
        assert matcher.validate_tokens(list(bad.encode())) < len(bad)
    assert plan(KNOWING, [USER], tools=[TOOL], regex="a+").syntax == ""
    for syntax in ("json", "llama3"):
        bare = plan(KNOWING, [USER], syntax, tools=[TOOL], json_schema=schema)
        assert (bare.syntax, bare.grammar) == ("", None)


def test_a_hundred_tools_can_be_forced_and_their_options_are_ours(pool: LimitedPool) -> None:
    parameters = {
        "x-guidance": {"whitespace_flexible": True},
        "type": "object",
        "properties": {f"p{place}": {"type": "string"} for place in range(5)},
    }
    tools = [
        {"type": "function", "function": {"name": f"tool_number_{number}", "parameters": parameters}}
        for number in range(100)
    ]
    planned = plan(KNOWING, [USER], tools=tools, tool_choice="required")
    GrammarDesk(pool).check_sync(planned.grammar, param="tools")
    matcher = LLMatcher(LEXICON.tokens, grammar_source(planned.grammar), limits=matcher_limits(planned.grammar))
    good = '<tool_call>\n{"name": "tool_number_7", "arguments": {"p0": "x", "p3": "y"}}\n</tool_call>'
    assert matcher.validate_tokens(list(good.encode())) == len(good)
    for bad in ('<tool_call>\n{ "name"', '<tool_call>\n{"name":"', '{"name": "'):
        assert matcher.validate_tokens(list(bad.encode())) < len(bad)


def test_a_plain_chatml_model_is_told_of_tools_and_its_bare_calls_are_read(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool, replace(VOCABULARY, chat_template=CHATML))
        stream = await rig.open(Ask(messages=[USER], tools=[TOOL]))
        assert "You can call these functions" in rig.prompt()
        rig.worker.say(b'{"name": "f", "arguments": {}}', end="stop")
        calls = [call for record in stream.records for part in record.parts for call in part.calls]
        assert calls[0].name == "f" and "".join(call.arguments for call in calls) == "{}"
        rig.model.close()

    asyncio.run(story())
