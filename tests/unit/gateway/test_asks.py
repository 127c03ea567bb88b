"""What bodies ask of the service: the mapping of fields, and fields that contradict each other."""

from typing import Any

import pytest

from headrace.core.errors import InvalidInput
from headrace.core.request import Tier
from headrace.gateway.schemas.asks import blame, blamed
from headrace.gateway.schemas.headers import Targets, lowered_tier, read_targets, wants_metadata
from headrace.serving.ask import Ask, check_ask
from tests.unit.gateway.bodies import (
    chat_ask,
    chat_body,
    completion_ask,
    completion_body,
    completions_of,
    refused,
)

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "jump", "description": "up", "strict": True}}


def test_a_plain_chat_asks_for_what_openai_s_defaults_say() -> None:
    expected = Ask(messages=[{"role": "user", "content": "hi"}], temperature=1.0, priority=Tier.PLUS)
    assert chat_ask() == expected
    check_ask(expected)


def test_every_sampling_field_reaches_the_ask() -> None:
    ask = chat_ask(
        n=3, max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.1, logit_bias={"5": -100}, allowed_token_ids=[1, 2], seed=7,
        stop="END", stop_token_ids=[3], include_stop_str_in_output=True, ignore_eos=True, skip_special_tokens=False,
        truncate_prompt_tokens=100, return_token_ids=True, logprobs=True, top_logprobs=4, prompt_logprobs=2,
    )  # fmt: skip
    assert ask == Ask(
        messages=[{"role": "user", "content": "hi"}], priority=Tier.PLUS, n=3, max_tokens=9, min_tokens=2,
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1.0, frequency_penalty=-1.0,
        repetition_penalty=1.1, logit_bias={"5": -100.0}, allowed_ids=[1, 2], seed=7, stop=["END"], stop_ids=[3],
        include_stop=True, ignore_eos=True, skip_special_tokens=False, truncate_prompt_tokens=100,
        return_token_ids=True, logprobs=4, prompt_logprobs=2,
    )  # fmt: skip


def test_the_newer_limit_wins_over_the_older() -> None:
    assert chat_ask(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert refused(chat_ask, max_tokens=5, max_completion_tokens=3, min_tokens=4).param == "min_tokens"


def test_top_k_is_off_at_minus_one_and_zero() -> None:
    assert chat_ask(top_k=-1).top_k == chat_ask(top_k=0).top_k == 0


def test_log_probabilities_of_chat_are_a_flag_and_a_number() -> None:
    assert chat_ask(logprobs=True).logprobs == 0
    assert chat_ask(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat_ask(logprobs=False, top_logprobs=0).logprobs is None
    assert refused(chat_ask, top_logprobs=3).param == "top_logprobs"


def test_tools_and_the_choice_among_them() -> None:
    ask = chat_ask(tools=[TOOL, OTHER], parallel_tool_calls=False)
    assert ask.tools == [
        TOOL,
        {
            "type": "function",
            "function": {
                "name": "jump",
                "description": "up",
                "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
                "strict": True,
            },
        },
    ]
    assert ask.tool_choice == "auto" and not ask.parallel_tool_calls
    for choice in ("auto", "none", "required"):
        assert chat_ask(tools=[TOOL], tool_choice=choice).tool_choice == choice
    named = chat_ask(tools=[TOOL, OTHER], tool_choice={"type": "function", "function": {"name": "jump"}})
    assert named.tool_choice == "jump" and len(named.tools) == 2
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
    ask = chat_ask(tools=[TOOL, OTHER], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert ask.tools == [TOOL] and ask.tool_choice == "required"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "required"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "custom", "custom": {"name": "look"}}}, "tool_choice.type"),
        ({"tools": [TOOL], "functions": [{"name": "look"}]}, "functions"),
        ({"function_call": {"name": "look"}}, "function_call"),
        ({"functions": [{"name": "look"}, {"name": "look"}]}, "functions[1].name"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ],
)
def test_tools_that_cannot_be_called(fields: dict[str, Any], param: str) -> None:
    assert refused(chat_ask, **fields).param == param


def test_deprecated_functions_are_tools_one_at_a_time() -> None:
    ask = chat_ask(functions=[{"name": "look", "parameters": {"type": "object"}}], function_call={"name": "look"})
    assert ask.tools == [TOOL] and ask.tool_choice == "look" and not ask.parallel_tool_calls
    (bare,) = chat_ask(functions=[{"name": "look"}]).tools
    assert bare["function"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert chat_ask(functions=[{"name": "look"}]).tool_choice == "auto"
    assert chat_ask(functions=[{"name": "look"}], function_call="none").tool_choice == "none"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, {"json_schema": {}}),
        ({"response_format": {"type": "regex", "regex": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "regex", "value": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "grammar", "grammar": "start: A"}}, {"grammar": "start: A"}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_json": '{"type":"object"}'}, {"json_schema": {"type": "object"}}),
        ({"json_schema": '{"type":"object"}'}, {"json_schema": {"type": "object"}}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a", "b"]}, {"choices": ["a", "b"]}),
        ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
        ({"ebnf": "start: A"}, {"grammar": "start: A"}),
        ({"grammar": "start: A"}, {"grammar": "start: A"}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choices": ["a"]}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {}}, {}),
    ],
)  # fmt: skip
def test_the_shape_of_a_reply_in_every_server_s_words(fields: dict[str, Any], shape: dict[str, Any]) -> None:
    for ask in (chat_ask(**fields), completion_ask(**fields)):
        names = ("json_schema", "regex", "choices", "grammar")
        found = {name: getattr(ask, name) for name in names if getattr(ask, name) is not None}
        assert found | ({"json_object": True} if ask.json_object else {}) == shape


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": 7}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
    ],
)  # fmt: skip
def test_shapes_that_are_none(fields: dict[str, Any], param: str) -> None:
    assert refused(chat_ask, **fields).param == param


def test_a_template_is_the_model_s_and_its_variables_are_the_client_s() -> None:
    assert refused(chat_ask, chat_template="{{ ''.__class__ }}").param == "chat_template"
    ask = chat_ask(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert ask.chat_template_kwargs == {"reasoning_effort": "low", "enable_thinking": False}


def test_a_reply_may_continue_the_last_message() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    ask = chat_ask(messages=messages, continue_final_message=True)
    assert ask.continue_final_message and not ask.add_generation_prompt
    assert not chat_ask(add_generation_prompt=False).add_generation_prompt
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat_ask, messages=messages, **both).param == "continue_final_message"


def test_streams_have_options_and_others_have_not() -> None:
    assert chat_ask(stream=True, stream_options={"include_usage": True}) == chat_ask()
    assert refused(chat_ask, stream_options={"include_usage": True}).param == "stream_options"
    assert refused(chat_ask, stream=True, prompt_logprobs=1).param == "prompt_logprobs"
    assert (
        refused(chat_ask, stream=True, stream_options={"include_usage": "yes"}).param == "stream_options.include_usage"
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, [1, 2])]),
        ([[1, 2], [3]], [(None, [1, 2]), (None, [3])]),
        ("", [("", None)]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: list[tuple[str | None, list[int] | None]]) -> None:
    asks = completions_of(prompt=prompt, n=2)
    assert [(ask.raw, ask.ids) for ask in asks] == expected
    assert all(ask.n == 2 and ask.max_tokens == 16 for ask in asks)


@pytest.mark.parametrize("prompt", [["a", 1], [1, [2]], ["a", [1]]])
def test_a_prompt_is_no_mixture(prompt: Any) -> None:
    assert refused(completions_of, prompt=prompt).param == "prompt"


def test_an_echo_is_scored_and_needs_no_reply() -> None:
    ask = completion_ask(echo=True, logprobs=2, max_tokens=0)
    assert ask.echo and ask.score_only and ask.max_tokens == 1 and ask.logprobs == ask.prompt_logprobs == 2
    assert completion_ask(echo=True).prompt_logprobs is None
    assert not completion_ask(echo=True, max_tokens=1).score_only
    assert completion_ask(logprobs=2).prompt_logprobs is None
    assert refused(completions_of, max_tokens=0).param == "max_tokens"
    assert refused(chat_ask, max_tokens=0).param == "max_tokens"
    assert refused(chat_ask, max_completion_tokens=0).param == "max_completion_tokens"


def test_what_completions_had_once_is_refused_where_it_would_matter() -> None:
    assert completion_ask(suffix="", best_of=1) == completion_ask()
    assert completion_ask(n=2, best_of=2).n == 2
    assert refused(completions_of, suffix="end").param == "suffix"
    assert refused(completions_of, best_of=3).param == "best_of"
    assert refused(completions_of, min_tokens=5, max_tokens=4).param == "min_tokens"
    assert refused(completions_of, min_tokens=17).param == "min_tokens"


@pytest.mark.parametrize(
    ("priority", "tier", "expected"),
    [
        (None, Tier.PLUS, Tier.PLUS),
        (0, Tier.PLUS, Tier.PLUS),
        (-(10**9), Tier.FREE, Tier.FREE),
        (1, Tier.ENTERPRISE, Tier.PLUS),
        (10**30, Tier.ENTERPRISE, Tier.BATCH),
        ("batch", Tier.ENTERPRISE, Tier.BATCH),
        ("enterprise", Tier.FREE, Tier.FREE),
        ("Plus", Tier.ENTERPRISE, Tier.PLUS),
    ],
)
def test_priority_only_lowers_a_tenant_s_tier(priority: int | str | None, tier: Tier, expected: Tier) -> None:
    assert lowered_tier(priority, tier) is expected
    assert chat_ask(tier, priority=priority).priority is expected


def test_headers_set_the_times_that_matter() -> None:
    headers = {
        "x-headrace-ttft-target-ms": "250",
        "x-headrace-itl-target-ms": "12.5",
        "x-headrace-deadline-ms": " 60000 ",
        "x-headrace-queue-timeout-ms": "1",
    }
    targets = read_targets(headers)
    assert targets == Targets(0.25, 0.0125, 60.0, 0.001)
    ask = chat_ask(Tier.PLUS, targets)
    assert (ask.ttft_target_s, ask.itl_target_s, ask.deadline_s, ask.queue_timeout_s) == (0.25, 0.0125, 60.0, 0.001)
    assert read_targets({}) == Targets()


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e3", "1_000", "٣", "9" * 11, "9999999999", "soon"])
def test_headers_that_are_no_times(value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_targets({"x-headrace-deadline-ms": value})
    assert caught.value.param == "x-headrace-deadline-ms"


def test_metadata_is_asked_for() -> None:
    assert wants_metadata({"x-headrace-metadata": "1"})
    assert not wants_metadata({"x-headrace-metadata": "0"}) and not wants_metadata({})


def test_what_is_blamed_is_the_client_s_field() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
    body = chat_body(max_completion_tokens=5, response_format=schema)
    assert blamed("max_tokens", body) == "max_completion_tokens"
    assert blamed("json_schema", body) == "response_format.json_schema.schema"
    assert blamed("ids", body) == "messages" and blamed("ids", completion_body()) == "prompt"
    assert blamed("max_tokens", completion_body()) == "max_tokens"
    assert blamed("deadline_s", body) == "x-headrace-deadline-ms"
    assert blamed("seed", body) == "seed"


@pytest.mark.parametrize(
    ("message", "param", "told"),
    [
        ("stop_ids holds more than 64 ids", "stop_ids", "stop_token_ids holds more than 64 ids"),
        ("prompt (5) and max_tokens (9) exceed", "max_tokens", "prompt (5) and max_completion_tokens (9) exceed"),
        ("the prompt has 5 tokens", "prompt", "the prompt has 5 tokens"),
        ("too late", None, "too late"),
    ],
)
def test_complaints_name_fields_as_the_client_does(message: str, param: str | None, told: str) -> None:
    error = InvalidInput(message, param=param)
    blame(error, chat_body(max_completion_tokens=9))
    assert error.message == told
