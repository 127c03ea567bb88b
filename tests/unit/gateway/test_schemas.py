"""Every field of the bodies: wrong types, null, bounds. A refusal names the field; nothing but a refusal comes out."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidInput
from headrace.gateway.endpoints import ROUTES
from headrace.gateway.openapi import document
from headrace.gateway.schemas.chat import ChatBody
from headrace.gateway.schemas.completion import CompletionBody
from headrace.gateway.schemas.decode import decode
from headrace.gateway.schemas.tokens import DetokenizeBody
from tests.unit.gateway.bodies import CHAT, COMPLETION, chat_ask, completion_ask, completions_of, refused

NOT_INTS = ["1", True, 1.5, [], {}, 2**64, -(2**63) - 1]
NOT_FLOATS = ["1", True, [], {}, 1e308, -1e308, 2**64]
NOT_TEXTS = [7, True, [], {}]
NOT_FLAGS = ["true", 1, 0, [], {}]
NOT_OBJECTS = [7, True, "x", []]
NOT_WORDS = [*NOT_TEXTS, "magic"]
NOT_LISTS = [7, True, "x", {}, [7.5]]

INTS = (
    *("n", "max_tokens", "min_tokens", "top_k", "seed", "prompt_logprobs", "truncate_prompt_tokens"),
    *("max_completion_tokens", "top_logprobs", "best_of"),
)
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
FLAGS = (
    *("stream", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "echo", "return_token_ids"),
    *("parallel_tool_calls", "add_generation_prompt", "continue_final_message", "store"),
)
TEXTS = (
    *("model", "cache_salt", "session_id", "user", "guided_regex", "guided_grammar", "regex", "ebnf", "grammar"),
    *("reasoning_effort", "safety_identifier", "prompt_cache_key", "suffix"),
)
WORDS = ("service_tier", "verbosity", "prompt_cache_retention")
OBJECTS = (
    *("stream_options", "response_format", "structured_outputs", "logit_bias", "chat_template_kwargs", "metadata"),
    *("prompt_cache_options", "prediction", "audio", "moderation", "web_search_options"),
)
LISTS = (
    *("messages", "allowed_token_ids", "bad_words", "stop_token_ids", "guided_choice", "tools", "functions"),
    "modalities",
)
# These take several kinds of values.
MIXED: dict[str, list[Any]] = {
    "stop": [7, True, {}, [7], [""], ""],
    "priority": [True, 1.5, [], {}],
    "guided_json": [7, []],
    "json_schema": [7, []],
    "prompt": [7, True, {}, [], [1.5], [True], [[]], [1, [2, [3]]], [-1], [2**31], [[-1]], [{}]],
    "tool_choice": [7, [], "any", {}, {"type": "function"}, {"type": "magic"}],
    "function_call": [7, [], "required", {}],
}
WRONG: dict[str, list[Any]] = {
    **dict.fromkeys(INTS, NOT_INTS),
    **dict.fromkeys(FLOATS, NOT_FLOATS),
    **dict.fromkeys(FLAGS, NOT_FLAGS),
    **dict.fromkeys(TEXTS, NOT_TEXTS),
    **dict.fromkeys(WORDS, NOT_WORDS),
    **dict.fromkeys(OBJECTS, NOT_OBJECTS),
    **dict.fromkeys(LISTS, NOT_LISTS),
    **MIXED,
}
# By body: a flag in one and a number in the other.
CHAT_WRONG = WRONG | {"logprobs": NOT_FLAGS, "chat_template": ["{{ x }}", 7]}
COMPLETION_WRONG = WRONG | {"logprobs": NOT_INTS}
CHAT_FIELDS = [field.name for field in msgspec.structs.fields(ChatBody)]
COMPLETION_FIELDS = [field.name for field in msgspec.structs.fields(CompletionBody)]


@pytest.mark.parametrize("field", CHAT_FIELDS)
def test_chat_refuses_the_wrong_types_of_a_field(field: str) -> None:
    for value in CHAT_WRONG[field]:
        error = refused(chat_ask, **{field: value})
        assert error.param is not None, (field, value)
        assert error.param == field or error.param.startswith((f"{field}.", f"{field}[")), (value, error.param)


@pytest.mark.parametrize("field", COMPLETION_FIELDS)
def test_completions_refuse_the_wrong_types_of_a_field(field: str) -> None:
    for value in COMPLETION_WRONG[field]:
        error = refused(completions_of, **{field: value})
        assert error.param is not None, (field, value)
        assert error.param == field or error.param.startswith((f"{field}.", f"{field}[")), (value, error.param)


def test_null_is_a_field_that_was_not_given() -> None:
    optional = {name: None for name in CHAT_FIELDS if name not in CHAT}
    assert chat_ask(**optional) == chat_ask()
    optional = {name: None for name in COMPLETION_FIELDS if name not in COMPLETION}
    assert completion_ask(**optional) == completion_ask()


@pytest.mark.parametrize("field", ["model", "messages"])
def test_what_is_needed_is_neither_null_nor_missing(field: str) -> None:
    assert refused(chat_ask, **{field: None}).param == field
    body = {name: value for name, value in CHAT.items() if name != field}
    with pytest.raises(InvalidInput) as caught:
        decode(msgspec.json.encode(body), ChatBody)
    assert caught.value.param == field


def test_unknown_fields_are_ignored() -> None:
    assert chat_ask(tenant_id="other", is_admin=True, api_base="http://x", lora_path=7) == chat_ask()


BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("n", [1, 128], [0, -1, 129]),
    ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31, 10**12]),
    ("max_completion_tokens", [1, 2**31 - 1], [0, -1, 2**31, 10**12]),
    ("min_tokens", [0, 5], [-1, 2**31]),
    ("temperature", [0, 0.0, 2, 1e-6], [-0.0, -0.1, 2.1, 1e-320, 1e-39]),
    ("top_p", [0, 1, 0.5], [-0.0, -0.1, 1.1, 1e-320]),
    ("min_p", [0, 1], [-0.0, 1.1, -1]),
    ("top_k", [-1, 0, 1, 2**31 - 1], [-2, 2**31]),
    ("presence_penalty", [-2, 2, 0], [-2.1, 2.1, -0.0, 1e-320, -1e-320]),
    ("frequency_penalty", [-2, 2, 0], [-2.1, 2.1, -0.0, 1e-320]),
    ("repetition_penalty", [0.5, 1, 2], [0, -1, 1e4, -0.0]),
    ("seed", [-(2**63), 0, 2**63 - 1], [2**63, 2**64, -(2**63) - 1]),
    ("stop", ["x", ["x"] * 16, [], "x" * 1024], ["", [""], ["x"] * 17, ["x"] * 100_000, "x" * 1025, ["y" * 1_000_000]]),
    ("stop_token_ids", [[], [0] * 64], [[0] * 65, [-1], [2**31]]),
    ("allowed_token_ids", [[0], [1] * 1024], [[], [0] * 1025, [-1]]),
    (
        "logit_bias",
        [{}, {"5": 100, "6": -100}],
        [{"5": 101}, {"x": 1}, {"": 1}, {"٣": 1}, {"-1": 1}, {"5": -0.0}, {"1" * 10: 1}],
    ),
    ("logit_bias", [{str(i): 1 for i in range(1024)}], [{str(i): 1 for i in range(1025)}, {"5": True}, {"5": "1"}]),
    ("truncate_prompt_tokens", [-1, 1], [0, -2, 2**31]),
    ("prompt_logprobs", [0, 20], [-1, 21]),
    ("user", ["", "x" * 512], ["x" * 513, "x" * 1_000_000]),
    (
        "metadata",
        [{}, {"k" * 64: "v" * 512}],
        [{"k" * 65: "v"}, {"k": "v" * 513}, {"k": 1}, {str(i): "" for i in range(17)}],
    ),
    ("tools", [[]], [[{"type": "function", "function": {"name": f"f{i}"}} for i in range(1001)]]),
    ("guided_choice", [["a"]], [[], ["a"] * 5001]),
    ("guided_regex", ["a+"], ["", "a" * 20_000]),
    ("priority", [-(10**30), 0, 10**30, "batch", "PLUS"], ["vip", ""]),
    ("chat_template_kwargs", [{"enable_thinking": False}], [{str(i): 1 for i in range(65)}]),
    ("modalities", [["text"]], [["text", "audio"], ["text", "text", "text"]]),
    ("messages", [[{"role": "user", "content": ""}] * 10_000], [[], [{"role": "user", "content": ""}] * 10_001]),
]


@pytest.mark.parametrize(("field", "good", "bad"), BOUNDS)
def test_bounds_of_numbers_lists_and_texts(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        chat_ask(**{field: value})
    for value in bad:
        error = refused(chat_ask, **{field: value})
        assert error.param is not None, value
        assert error.param.split(".")[0].split("[")[0] == field
        assert len(error.message) < 500


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400"])
def test_numbers_that_json_or_floats_have_not(number: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(b'{"model":"m","messages":[{"role":"user","content":""}],"temperature":' + number + b"}", ChatBody)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b'"x"', b"7", b'{"model":"m"', b"\xef\xbb\xbf{}", '{"model":"m"}'.encode("utf-16"),
        b'{"model":"\xff"}', b'{"model":"\\ud800","messages":[]}', b"{" * 5000, b'{"x":' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    for kind in (ChatBody, CompletionBody):
        with pytest.raises(InvalidInput):
            decode(body, kind)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b'{"model":"m",}', ": see its byte 13"),
        (b'{"model":"m"', ": it ends too early"),
        (b'{"model":"\xff"}', ""),
        (b'{"model":"a\\ud800b"}', ": see its byte 17"),
        (b'{"model":"a\\ud800"}', ": see its byte 17"),
        (b'{"model":"a\\ud800', ": it ends too early"),
        (b'{"model":"a\\ud8', ": it ends too early"),
    ],
)
def test_where_json_ends_to_be_json_is_told(body: bytes, where: str) -> None:
    with pytest.raises(InvalidInput, match=f"the body is not valid JSON in UTF-8{where}$"):
        decode(body, ChatBody)


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_a_body_that_was_forgotten_is_called_empty(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="the body is empty: send JSON"):
        decode(body, ChatBody)


def test_json_that_nests_without_end_is_refused_in_every_free_field() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"properties": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": deep}}
    assert refused(chat_ask, tools=[tool]).param == "tools[0].function.parameters"
    assert refused(chat_ask, response_format=schema).param == "response_format.json_schema.schema"
    assert refused(chat_ask, guided_json=msgspec.json.encode(deep).decode()).param == "guided_json"
    assert refused(chat_ask, chat_template_kwargs=deep).param == "chat_template_kwargs"


def test_a_client_s_value_is_not_repeated_in_a_refusal() -> None:
    secret = "<script>" + "x" * 100_000
    for fields in ({"verbosity": secret}, {"messages": [{"role": secret, "content": ""}]}, {"user": secret}):
        assert "script" not in refused(chat_ask, **fields).message


ALLOWED = {"mode": "any", "tools": [{"type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verbosity": "loud"}, "verbosity: must be one of high, low, medium"),
        ({"service_tier": "gold"}, "service_tier: must be one of auto, default, fast, flex, priority, scale"),
        ({"modalities": ["text", "smell"]}, "modalities[1]: must be one of audio, text"),
        ({"tool_choice": "maybe"}, "tool_choice: must be one of auto, none, required, an object"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type: must be one of function, custom, allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
            "tool_choice.allowed_tools.mode: must be one of auto, required",
        ),
        ({"tools": [{"type": "shell"}]}, "tools[0].type: must be one of function, custom"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type: must be one of text, json_object, json_schema, regex, grammar",
        ),
        (
            {"messages": [{"role": "wizard", "content": ""}]},
            "messages[0].role: must be one of system, developer, user, assistant, tool, function",
        ),
        ({"priority": "gold"}, "priority must be an integer, batch, free, plus or enterprise"),
    ],
)
def test_what_is_none_of_a_closed_set_is_told_the_set(fields: dict[str, Any], message: str) -> None:
    assert refused(chat_ask, **fields).message == message


def test_products_are_bounded_where_their_factors_are() -> None:
    assert refused(completions_of, prompt=["x"] * 9, n=128).param == "prompt"
    assert refused(completions_of, prompt=["x"] * 1025).param == "prompt"
    assert refused(completions_of, prompt=["x"] * 256, logprobs=20).param == "logprobs"
    assert refused(completions_of, prompt=["x"] * 256, logprobs=1, prompt_logprobs=20).param == "logprobs"
    assert len(completions_of(prompt=["x"] * 204, logprobs=20)) == 204
    assert len(completions_of(prompt=["x"] * 8, n=128)) == 8


def test_a_body_of_more_values_than_any_field_takes_is_not_even_decoded() -> None:
    for prompt in (b"1," * 500_001 + b"1", b"[1]," * 100_001 + b"[1]"):
        with pytest.raises(InvalidInput, match="too many values"):
            decode(b'{"model":"m","prompt":[' + prompt + b"]}", CompletionBody)
    assert len(decode(b'{"model":"m","prompt":[' + b"1," * 100_000 + b"1]}", CompletionBody).prompt) == 100_001
    assert completion_ask(prompt="x, {[" * 30_000).raw == "x, {[" * 30_000


def test_as_many_ids_are_decoded_as_the_document_says() -> None:
    schemas = msgspec.json.decode(document(ROUTES))["components"]["schemas"]
    most = schemas["DetokenizeBody"]["properties"]["tokens"]["maxItems"]
    assert len(decode(b'{"model":"m","tokens":[' + b"1," * (most - 1) + b"1]}", DetokenizeBody).tokens) == most
    with pytest.raises(InvalidInput) as refused:
        decode(b'{"tokens":[' + b"1," * most + b"1]}", DetokenizeBody)
    assert refused.value.param == "tokens"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def complaint(make: Any, fields: dict[str, Any]) -> InvalidInput | None:
    try:
        assert make(**fields)
    except InvalidInput as error:
        return error
    return None


@given(st.dictionaries(st.sampled_from(CHAT_FIELDS), JSON, min_size=1, max_size=4))
def test_chat_takes_any_json_or_refuses_it_by_name(fields: dict[str, Any]) -> None:
    error = complaint(chat_ask, fields)
    assert error is None or error.param


@given(st.dictionaries(st.sampled_from(COMPLETION_FIELDS), JSON, min_size=1, max_size=4))
def test_completions_take_any_json_or_refuse_it_by_name(fields: dict[str, Any]) -> None:
    error = complaint(completions_of, fields)
    assert error is None or error.param
