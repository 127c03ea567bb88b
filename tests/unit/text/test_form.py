"""Forms: what a template writes around what people say, found without showing it any of that."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import InvalidInput, QueueFull
from headrace.text.byte_vocabulary import TEMPLATE, byte_vocabulary
from headrace.text.form import MAX_CHARS, Form, Forms, Shape, contents_of
from headrace.text.former import MAX_LITERAL_CHARS, Former
from headrace.text.limited import LimitedPool
from headrace.text.limited_process import Limits
from headrace.text.renderer import Renderer
from headrace.text.rendering import Formed, RenderJob, TemplateSource
from headrace.text.template import ChatTemplate, Conversation
from headrace.text.tokenizer import Tokenizer
from tests.unit.text import templates
from tests.unit.text.templates import SPECIAL_IDS

FORMER = Former(Renderer())
# Templates that look at what was said in a way that no form can tell, or that may.
CURIOUS = {
    "length": "{% for m in messages %}{% if m.content | length > 5 %}long {% endif %}{{ m.content }}{% endfor %}",
    "first letter": "{% for m in messages %}{{ m.content[0] }}{{ m.content }}{% endfor %}",
    "slice": "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
    "replaced": "{% for m in messages %}{{ m.content | replace('a', 'b') }}{% endfor %}",
    "replaced by a method": "{% for m in messages %}{{ m.content.replace('a', 'b') }}{% endfor %}",
    "equal": "{% for m in messages %}{% if m.content == 'x' %}!{% endif %}{{ m.content }}{% endfor %}",
    "equal from the other side": "{% for m in messages %}{% if 'x' != m.content %}!{% endif %}{{ m.content }}{% endfor %}",
    "one of a list": "{% for m in messages %}{% if m.content in ['x', 'y'] %}!{% endif %}{{ m.content }}{% endfor %}",
    "part of a text": "{% for m in messages %}{% if m.content in 'xyz' %}!{% endif %}{{ m.content }}{% endfor %}",
    "key": "{% for m in messages %}{{ {'x': 'y'}.get(m.content, '') }}{{ m.content }}{% endfor %}",
    "letters": "{% for m in messages %}{% for c in m.content %}{{ c }}.{% endfor %}{% endfor %}",
    "upper": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "json": "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "json of all": "{{ messages | tojson }}",
    "shown": "{{ messages }}",
    "joined": "{{ messages | map(attribute='content') | join(', ') }}",
    "joined by a method": "{% for m in messages %}{{ '-'.join(['a', m.content]) }}{% endfor %}",
    "formatted": "{% for m in messages %}{{ '%-9s' % m.content }}{% endfor %}",
    "formatted with others": "{% for m in messages %}{{ '%.2s %s' % (m.content, 'x') }}{% endfor %}",
    "formatted by a method": "{% for m in messages %}{{ '{:>9}'.format(m.content) }}{% endfor %}",
    "repeated": "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    "number": "{% for m in messages %}{% if m.content | int == 7 %}!{% endif %}{{ m.content }}{% endfor %}",
    "macro": "{% macro f(x) %}{{ x }}{% endmacro %}{% for m in messages %}{% if f(m.content) == 'x' %}!{% endif %}{% endfor %}",
    "captured": "{% for m in messages %}{% set x %}{{ m.content }}{% endset %}{{ x | upper }}{% endfor %}",
    "stripped of more": "{% for m in messages %}{{ m.content.strip('\\n') }}{% endfor %}",
    "joined and stripped": "{% for m in messages %}{{ ('\\n' + m.content) | trim }}{% endfor %}",
    "begins when joined": "{% for m in messages %}{% if ('a' + m.content).startswith('ab') %}!{% endif %}x{% endfor %}",
    "role of a special token": "{% for m in messages %}{{ '<|' + m.content + '|>' }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
}
PLAIN = {
    "chatml": templates.CHATML,
    "qwen": templates.QWEN,
    "assembled": templates.ASSEMBLED,
    "thinking": templates.THINKING,
    "fake": TEMPLATE,
    "joined": "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ ':' ~ (m.content | trim) ~ '<|im_end|>' }}{% endfor %}",
    "asked": "{% for m in messages %}{% if m.content is string and m.content %}{{ m['content'] }}{% endif %}</s>{% endfor %}",
    "noted": "{% for m in messages %}{% if not m.content.startswith(('<a>', '<b>')) %}[INST]{{ m.content }}{% endif %}{% endfor %}",
}
FRAGMENTS = (
    *SPECIAL_IDS,
    "<|",
    "|>",
    "user",
    "<a>",
    "</think>",
    "x",
    " ",
    "\n",
    "\ue000",
    "\U0010fffd",
    "{{ 1 }}",
    "é",
)
spoken = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=6).map("".join)
roles = st.lists(st.sampled_from(("system", "user", "assistant")), min_size=1, max_size=4)


def job_of(text: str, *messages: dict[str, Any]) -> msgspec.Raw:
    source = TemplateSource(text, SPECIAL_IDS, bos_token="<|begin_of_text|>", eos_token="<|im_end|>")
    return msgspec.Raw(msgspec.msgpack.encode(RenderJob(source, list(messages), now_s=1e9)))


def formed(text: str, *messages: dict[str, Any]) -> Formed:
    return FORMER.form(job_of(text, *messages))


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_form_is_the_prompt_with_blanks() -> None:
    found = formed(templates.CHATML, user("hi"))
    assert found.pieces == [1, "user\nhi", 2, "\n", 1, "assistant\n"]
    assert found.form == Form([1, ["user\n", 0], 2, ["\n"], 1, ["assistant\n"]])
    assert found.form.fill([" you "]) == [1, "user\n you ", 2, "\n", 1, "assistant\n"]


def test_what_all_prompts_of_a_form_share_is_encoded_once() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [len(text), 99]

    form = Form([["once "], 1, ["user\n", 0], 2, ["\n"], 1, ["assistant", "\n"], 2, ["\n"], 1, ["x" * 65]], ["no"])
    settled = form.settled(encode)
    assert asked == ["\n", "assistant\n"]
    assert settled == Form([["once "], 1, ["user\n", 0], 2, 1, 99, 1, 10, 99, 2, 1, 99, 1, ["x" * 65]], ["no"])


def test_a_template_that_strips_has_a_form_that_does() -> None:
    form = formed(PLAIN["joined"], user("hi")).form
    assert form is not None
    assert form.fill([" you \n"]) == [1, "user:you", 2]


def test_a_text_that_is_asked_for_is_noted() -> None:
    form = formed(templates.THINKING, user("a"), {"role": "assistant", "content": "b"}).form
    assert form is not None and form.absent == ["</think>"]
    assert form.fits(["<think>", "b"]) and not form.fits(["a", "<think>c</think>b"])


@pytest.mark.parametrize("template", CURIOUS)
def test_a_template_that_looks_at_what_was_said_has_no_form(template: str) -> None:
    assert formed(CURIOUS[template], user("hello")).form is None


@pytest.mark.parametrize("template", PLAIN)
def test_plain_templates_have_forms(template: str) -> None:
    assert formed(PLAIN[template], user("hello")).form is not None


@pytest.mark.parametrize("template", [*PLAIN, *CURIOUS])
@given(data=st.data(), roles=roles)
@settings(max_examples=15, deadline=None)
def test_a_filled_form_is_what_the_template_renders(template: str, roles: list[str], data: st.DataObject) -> None:
    text = (PLAIN | CURIOUS)[template]
    form = formed(text, *({"role": role, "content": "x"} for role in roles)).form
    contents = [data.draw(spoken) for _ in roles]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    if form is None or contents_of(messages) is None or not form.fits(contents):
        return
    try:
        pieces = formed(text, *messages).pieces
    except InvalidInput:
        pytest.fail("a form for what the template refuses")
    assert form.fill(contents) == pieces


def test_a_form_is_small() -> None:
    assert formed("y" * MAX_LITERAL_CHARS + "{{ messages[0].content }}", user("a")).form is not None
    assert formed("y" * (MAX_LITERAL_CHARS + 1) + "{{ messages[0].content }}", user("a")).form is None


def test_contents_are_of_messages_that_hold_nothing_else() -> None:
    parts = [{"type": "text", "text": "hi"}]
    assert contents_of([user("a"), user(parts)]) == ["a", "hi"]
    for other in (
        user(""),
        user(" \n"),
        user(None),
        user(parts * 2),
        user("x" * (MAX_CHARS + 1)),
        {**user("a"), "name": "n"},
        {**user("a"), "tool_calls": []},
    ):
        assert contents_of([user("a"), other]) is None


def test_the_forms_used_last_are_kept() -> None:
    forms = Forms(remembered=2)
    shapes = [Shape(("user",) * size, True) for size in (1, 2, 3)]
    forms.file(shapes[0], Form([1]))
    forms.file(shapes[1], None)
    assert forms.find(shapes[0]) == Form([1])
    forms.file(shapes[2], Form([3]))
    assert [shape in forms for shape in shapes] == [True, False, True]


class CountedPool(LimitedPool):
    """Notes what is asked of its processes."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.asked: list[str] = []
        self.failure: Exception | None = None

    async def call(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(kind)
        if kind == "form" and self.failure is not None:
            raise self.failure
        return await super().call(kind, *args, **kwargs)


@pytest.fixture(scope="module")
def processes() -> Iterator[CountedPool]:
    with CountedPool(Limits(job_s=10.0)) as pool:
        yield pool


@pytest.fixture
def pool(processes: CountedPool) -> CountedPool:
    processes.asked.clear()
    processes.failure = None
    return processes


def chat(pool: LimitedPool, text: str) -> ChatTemplate:
    return ChatTemplate(text, SPECIAL_IDS, pool)


def test_a_prompt_has_the_same_ids_before_and_after_its_form_is_known(pool: CountedPool) -> None:
    tokenizer = Tokenizer(byte_vocabulary())
    template = ChatTemplate(TEMPLATE, tokenizer.special_ids, pool, encode=tokenizer.encode_behind)
    conversation = Conversation([user("Hi,"), {"role": "assistant", "content": "you"}, user("there\n")])

    async def story() -> None:
        first, second = [await template.render(conversation) for _ in range(2)]
        assert pool.asked.count("form") == 1
        assert [piece for piece in second if isinstance(piece, str)] == ["user\nHi,", "assistant\nyou", "user\nthere\n"]
        assert tokenizer.encode_parts(first) == tokenizer.encode_parts(second)

    asyncio.run(story())


def test_only_the_first_conversation_of_a_shape_asks_a_process(pool: CountedPool) -> None:
    async def story() -> None:
        template = chat(pool, templates.CHATML)
        for content in ("hi", "you"):
            pieces = await template.render(Conversation([user(content)]))
            assert pieces == [1, f"user\n{content}", 2, "\n", 1, "assistant\n"]
        await template.render(Conversation([user("a"), {"role": "assistant", "content": "b"}, user("c")]))

    asyncio.run(story())
    assert pool.asked == ["describe", "form", "form"]


def test_what_is_more_than_plain_is_always_rendered_by_the_template(pool: CountedPool) -> None:
    async def story() -> None:
        template = chat(pool, templates.THINKING)
        await template.render(Conversation([user("hi")]))
        await template.render(Conversation([user("hi")], variables={"enable_thinking": False}))
        await template.render(Conversation([user("hi")], tools=[templates.TOOL]))
        await template.render(Conversation([{**user("hi"), "name": "me"}]))
        turns = [user("a"), {"role": "assistant", "content": "b"}]
        await template.render(Conversation(turns))
        turns[1]["content"] = "<think>c</think>b"
        assert "assistant\nb" in await template.render(Conversation(turns))

    asyncio.run(story())
    assert pool.asked == ["describe", "form", "render", "render", "render", "form", "render"]


def test_a_template_without_forms_is_asked_for_one_once(pool: CountedPool) -> None:
    async def story() -> None:
        template = chat(pool, CURIOUS["upper"])
        for _ in range(3):
            assert await template.render(Conversation([user("hi")])) == ["HI"]

    asyncio.run(story())
    assert pool.asked == ["describe", "form", "render", "render"]


def test_a_form_that_takes_too_much_is_done_without(pool: CountedPool) -> None:
    async def story() -> None:
        template = chat(pool, templates.CHATML)
        pool.failure = InvalidInput("it takes too long")
        for _ in range(2):
            assert (await template.render(Conversation([user("hi")])))[0] == 1

    asyncio.run(story())
    assert pool.asked == ["describe", "form", "render", "render"]


def test_a_form_that_was_not_to_be_had_is_asked_for_again(pool: CountedPool) -> None:
    async def story() -> None:
        template = chat(pool, templates.CHATML)
        pool.failure = QueueFull("too many wait", retry_after_s=1.0)
        with pytest.raises(QueueFull):
            await template.render(Conversation([user("hi")]))
        pool.failure = None
        await template.render(Conversation([user("hi")]))

    asyncio.run(story())
    assert pool.asked == ["describe", "form", "form"]
