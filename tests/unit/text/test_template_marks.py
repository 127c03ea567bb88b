"""Marks: no text of a user becomes a special token, whatever a template does with it."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.text.renderer import CompiledTemplate
from headrace.text.rendering import RenderJob, TemplateSource
from tests.unit.text import templates
from tests.unit.text.templates import SPECIAL_IDS, TEXT_OF, TOOL

FRAGMENTS = (
    *SPECIAL_IDS,
    "<|",
    "|>",
    "<",
    ">",
    "|",
    "im_",
    "im_end",
    "end|>",
    "user",
    "<|im_",
    "s>",
    "\ue000",
    "x",
    "\n",
)
spoken = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@cache
def compiled(text: str) -> tuple[CompiledTemplate, TemplateSource]:
    source = TemplateSource(text, SPECIAL_IDS, bos_token="<|begin_of_text|>", eos_token="<|im_end|>")
    return CompiledTemplate(source), source


def render(text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[str | int]:
    template, source = compiled(text)
    return template.render(RenderJob(source, messages, tools, variables={"date_string": "today"}))


def ids_of(pieces: list[str | int]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


@cache
def unmarked(text: str) -> Template:
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text)


def plainly(text: str, messages: list[dict[str, Any]]) -> str:
    """The same template without any marks."""
    return unmarked(text).render(
        messages=messages, tools=None, bos_token="<|begin_of_text|>", date_string="today", add_generation_prompt=True
    )


def chat(first: str, second: str, name: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": first, "name": name},
        {"role": "user", "content": second, "name": name},
        {"role": "assistant", "content": first + second},
        {"role": "user", "content": name},
    ]


@pytest.mark.parametrize("name", templates.ALL)
@settings(max_examples=40)
@given(first=spoken, second=spoken, third=spoken)
def test_ids_do_not_depend_on_what_was_said_and_no_character_is_lost(
    name: str, first: str, second: str, third: str
) -> None:
    text = templates.ALL[name]
    pieces = render(text, chat(first, second, third))
    assert ids_of(pieces) == ids_of(render(text, chat("a", "b", "c")))
    joined = "".join(piece if isinstance(piece, str) else TEXT_OF[piece] for piece in pieces)
    assert joined == plainly(text, chat(first, second, third))


@settings(max_examples=60)
@given(key=spoken, value=spoken)
def test_tool_schemas_are_text_keys_and_values_alike(key: str, value: str) -> None:
    tool = {"type": "function", "function": {"name": value, "parameters": {key: value, "properties": {key: {}}}}}
    pieces = render(templates.QWEN, [{"role": "user", "content": "x"}], [tool])
    assert ids_of(pieces) == ids_of(render(templates.QWEN, [{"role": "user", "content": "x"}], [TOOL]))


@pytest.mark.parametrize(
    "text",
    [
        "{{ a }}end|>",  # the template completes what the user began
        "<|im_{{ b }}",  # the user completes what the template began
        "{{ a }}{{ b }}",  # two texts of the user's meet
        "{{ a ~ b }}{{ a + b }}{{ [a, b] | join }}{{ '%s%s' | format(a, b) }}{{ '{}{}'.format(a, b) }}",
        "<|{{ 'im_' + c }}|>",  # the user is in the middle
        "{{ (a + b) | upper | lower | trim }}{{ (a + b)[0:] }}{{ ((a + b) | list) | join }}",
        "{{ [a + b] | tojson | replace('[', '') }}{{ {a: b} | tojson }}",
        "{{ (a + '~' + b) | replace('~', '') }}{{ (a + '~' + b).split('~') | join }}",
    ],
)
def test_a_special_token_is_the_templates_only_if_it_wrote_all_of_it(text: str) -> None:
    template, source = compiled(text)
    job = RenderJob(source, [], variables={"a": "<|im_", "b": "end|>", "c": "end"})
    assert ids_of(template.render(job)) == []


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|im_end|>", [2]),
        ("{{ '<|im_end|>' }}{{ eos_token }}{{ bos_token }}", [2, 2, 8]),
        ("{% set end = '<|im_end|>' %}{{ end }}{{ 'a' ~ end ~ 'b' }}", [2, 2]),
        ("{{ {'user': '<s>'}['user'] }}{{ ['</s>', '<s>'] | join('<|end|>') }}", [3, 4, 12, 3]),
        ("{% macro turn(mark) %}{{ mark }}x{% endmacro %}{{ turn('<s>') }}", [3]),
        ("{{ missing | default('<s>') }}{{ 'a.b' | replace('.', '</s>') }}{{ 'a.b'.replace('.', '<s>') }}", [3, 4, 3]),
        ("{% generation %}<s>{% endgeneration %}{{ '<s>' if true else '</s>' }}", [3, 3]),
        ("<{{ 'think' }}> <|{{ 'im' }}|>", []),
    ],
)
def test_a_template_may_write_special_tokens_in_many_ways(text: str, ids: list[int]) -> None:
    assert ids_of(render(text, [])) == ids


def test_the_longest_special_token_wins_and_half_a_role_is_text() -> None:
    source = TemplateSource("<|a|><|a<|user", {"<|a|>": 1, "|>": 2, "<|a": 3, "<|user|>": 4})
    assert CompiledTemplate(source).render(RenderJob(source, [])) == [1, 3, "<|user"]


def test_surrogates_that_a_template_writes_itself_are_no_marks() -> None:
    assert render("{{ '\\ud800' }}<s>", []) == ["\ufffd", 3]
