"""What a reply looks like: stops over chunk borders, tool calls in fragments, echoed and scored prompts."""

import asyncio
import json

import jsonschema  # type: ignore[import-untyped]
import pytest

from headrace.core.errors import InvalidInput
from headrace.core.event import Outcome
from headrace.serving.ask import Ask
from headrace.streams.reader import merge
from headrace.streams.record import CallDelta, Usage
from headrace.streams.stream import Stream
from headrace.text.limited import LimitedPool
from tests.unit.serving.network_rig import TOKENIZER, finishes, ids_of, network_rig, score_of, text_of
from tests.unit.serving.scripted import ScriptedRig

pytestmark = pytest.mark.unit

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Oslo"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def chat(**fields: object) -> Ask:
    return Ask(messages=[{"role": "user", "content": "hi"}], **fields)  # type: ignore[arg-type]


def calls_of(stream: Stream, choice: int = 0) -> list[CallDelta]:
    return [call for record in stream.records for part in record.parts if part.choice == choice for call in part.calls]


def test_nothing_of_a_stop_string_leaks_and_the_abort_follows_at_once(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(Ask(raw="a", stop=["END", "é!"]))
        rig.worker.say(b"one EN")
        assert text_of(stream) == "one " and rig.worker.aborts == []
        rig.worker.say("two é".encode())
        assert text_of(stream) == "one ENtwo "
        rig.worker.say(b"!")
        assert rig.worker.aborts == [(0, len("one ENtwo é!".encode()))]
        assert not stream.is_ended, "the worker's end brings the counters"
        rig.worker.say(b"never shown")
        rig.worker.end(0, Outcome.ABORTED, "aborted")
        assert text_of(stream) == "one ENtwo " and finishes(stream) == {0: "stop"}
        assert stream.ending is not None and stream.ending.usage.completion_tokens == 13
        rig.model.close()

    asyncio.run(story())


def test_what_was_held_back_comes_with_the_end_and_a_kept_stop_stays(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        held = await rig.open(Ask(raw="a", stop="END"))
        rig.worker.say(b"one EN", end="length")
        assert text_of(held) == "one EN" and finishes(held) == {0: "length"}
        kept = await rig.open(Ask(raw="a", stop="END", include_stop=True))
        rig.worker.say(b"one ENDtwo", key=1)
        rig.worker.end(1, Outcome.ABORTED, "aborted")
        assert text_of(kept) == "one END" and finishes(kept) == {0: "stop"}
        rig.model.close()

    asyncio.run(story())


def test_a_stop_over_the_engine_is_the_cut_truth(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            whole = text_of(await rig.say(Ask(raw="abc", max_tokens=60)))
            stop = whole[20:25]
            stream = await rig.say(Ask(raw="abc", max_tokens=60, stop=stop))
            assert text_of(stream) == whole[: whole.index(stop)]
            assert stream.ending is not None
            assert stream.ending.usage.completion_tokens == len(ids_of(stream))
            rig.assert_nothing_left()

    asyncio.run(story())


def test_a_call_is_told_in_fragments_between_texts(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(chat(tools=[WEATHER, CLOCK]))
        assert '"name": "weather"' in rig.prompt()
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        rig.worker.say(f"Let me see.{call}\n{call}".encode(), end="stop")
        assert text_of(stream) == "Let me see.\n"
        first, *rest = calls_of(stream)
        assert (first.index, first.name, len(first.id), first.id[:5]) == (0, "weather", 29, "call_")
        assert {call.index for call in rest} == {0, 1} and len(rest) > 10
        joined = merge(stream.records).parts[0].calls
        assert [json.loads(call.arguments) for call in joined] == [{"city": "Oslo"}] * 2
        assert joined[0].id != joined[1].id and finishes(stream) == {0: "tool_calls"}
        rig.model.close()

    asyncio.run(story())


def test_without_tools_or_with_choice_none_everything_is_text(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
        for key, ask in enumerate((chat(), chat(tools=[CLOCK], tool_choice="none"))):
            stream = await rig.open(ask)
            assert "clock" not in rig.prompt(key)
            rig.worker.say(call.encode(), key=key, end="stop")
            assert text_of(stream) == call and finishes(stream) == {0: "stop"} and not calls_of(stream)
        rig.model.close()

    asyncio.run(story())


@pytest.mark.parametrize("call", ['{"name": "secret", "arguments": {}}', '{"arguments": {}, "name": "secret"}'])
def test_a_call_of_what_nobody_offered_is_text(pool: LimitedPool, call: str) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"

    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(chat(tools=[WEATHER]))
        rig.worker.say(text.encode(), end="stop")
        assert calls_of(stream) == [] and text_of(stream) == text and finishes(stream) == {0: "stop"}
        rig.model.close()

    asyncio.run(story())


def test_a_reply_that_may_call_once_ends_with_its_call(pool: LimitedPool) -> None:
    call = b'<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'

    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(chat(tools=[WEATHER, CLOCK], parallel_tool_calls=False))
        rig.worker.say(b"Now:\n" + call + b"\n")
        assert [abort[0] for abort in rig.worker.aborts] == [0]
        rig.worker.say(call)
        rig.worker.end(0, Outcome.ABORTED, "aborted")
        assert [call.name for call in calls_of(stream) if call.name] == ["clock"]
        assert text_of(stream) == "Now:\n" and finishes(stream) == {0: "tool_calls"}
        many = await rig.open(chat(tools=[WEATHER, CLOCK]))
        rig.worker.say(call + b"\n" + call, key=1, end="stop")
        assert [call.name for call in calls_of(many) if call.name] == ["clock", "clock"]
        rig.model.close()

    asyncio.run(story())


def test_a_call_cut_off_by_length_says_length(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(chat(tools=[CLOCK]))
        rig.worker.say(b'<tool_call>\n{"name": "clock", "arguments": {"a": ', end="length")
        assert finishes(stream) == {0: "length"}
        assert calls_of(stream)[-1].broken_text.startswith("<tool_call>")
        rig.model.close()

    asyncio.run(story())


def test_a_call_that_broke_off_says_where_it_was_written(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        stream = await rig.open(chat(tools=[CLOCK]))
        rig.worker.say(b"Well:\n")
        rig.worker.say(b'<tool_call>{"name": "clock", "arguments": {} oh no', end="stop")
        broken = next(call for call in calls_of(stream) if call.broken_text)
        text = text_of(stream)
        assert text[: broken.place] + broken.broken_text + text[broken.place :] == (
            'Well:\n<tool_call>{"name": "clock", "arguments": {} oh no'
        )
        rig.model.close()

    asyncio.run(story())


def test_a_call_that_broke_off_is_no_call_to_be_run(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        whole = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
        broken = '<tool_call>\n{"name": "clock", "arguments": {"a": '
        for key, (said, choice, finish) in enumerate(
            (
                (broken, "auto", "stop"),
                (broken, "required", "stop"),
                (whole + broken, "auto", "tool_calls"),
                (whole, "auto", "tool_calls"),
            )
        ):
            stream = await rig.open(chat(tools=[CLOCK], tool_choice=choice))
            rig.worker.say(said.encode(), key=key, end="stop")
            assert finishes(stream) == {0: finish}
        rig.model.close()

    asyncio.run(story())


def test_a_forced_call_that_is_cut_off_is_still_a_call_and_no_text(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        for key, said in enumerate((b'<tool_call>\n{"name": "clock", "arguments": {', b"<tool_call>\n{", b"<tool")):
            stream = await rig.open(chat(tools=[CLOCK], tool_choice="required"))
            rig.worker.say(said, key=key, end="length")
            assert text_of(stream) == "" and finishes(stream) == {0: "length"}
            assert [call.name for call in calls_of(stream) if call.name] == ["clock"] * (key == 0)
            assert not any(call.broken_text for call in calls_of(stream))
        rig.model.close()

    asyncio.run(story())


@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), ("weather", "stop")])
def test_a_forced_call_is_one_and_valid(pool: LimitedPool, choice: str, finish: str) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            ask = chat(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, max_tokens=500)
            stream = await rig.say(ask)
            (call,) = merge(stream.records).parts[0].calls
            assert call.name == "weather" and text_of(stream) == ""
            jsonschema.validate(json.loads(call.arguments), WEATHER["function"]["parameters"])  # type: ignore[index]
            assert finishes(stream) == {0: finish}

    asyncio.run(story())


def test_many_calls_may_be_forced_and_each_is_valid(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await rig.say(chat(tools=[WEATHER, CLOCK], tool_choice="required", max_tokens=400, n=3))
            for part in merge(stream.records).parts:
                assert part.calls and part.finish in ("tool_calls", "length")
                whole = part.calls if part.finish == "tool_calls" else part.calls[:-1]
                for call in whole:
                    assert call.name in ("weather", "clock") and isinstance(json.loads(call.arguments), dict)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "other"}, "tool_choice"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "auto"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "search"}]}, "tools[0]"),
        ({"tools": [CLOCK], "tool_choice": "clock", "regex": "a"}, "regex"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_tools_that_cannot_be_are_refused_by_name(pool: LimitedPool, fields: dict[str, object], param: str) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            with pytest.raises(InvalidInput) as caught:
                await rig.open(chat(**fields))
            assert caught.value.param == param

    asyncio.run(story())


def test_an_echoed_prompt_comes_first_with_its_scores(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await rig.say(Ask(raw="héy", max_tokens=3, echo=True, logprobs=1))
            prompt, *rest = [part for record in stream.records for part in record.parts]
            ids = list("héy".encode())
            assert prompt.is_prompt and prompt.text == "héy" and list(prompt.ids) == ids
            assert [score.logprob for score in prompt.scores] == [
                None,
                *(score_of(at, ids[at]) for at in range(1, len(ids))),
            ]
            assert b"".join(score.data for score in prompt.scores) == "héy".encode()
            scores = [score for part in rest for score in part.scores]
            said = ids_of(stream)
            assert [(score.id, score.logprob) for score in scores] == [
                (token, score_of(len(ids) + at, token)) for at, token in enumerate(said)
            ]
            assert [alternative.data for alternative in scores[0].top] == [b"A"]
            assert rest[0].offset == 3 and rest[0].index == 0

    asyncio.run(story())


def test_scores_alone_give_no_reply_and_cost_none(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            stream = await rig.say(Ask(raw="hey", max_tokens=1, echo=True, logprobs=0, score_only=True))
            assert text_of(stream) == "hey" and ids_of(stream) == [] and finishes(stream) == {0: "length"}
            assert stream.ending is not None and stream.ending.usage == Usage(3, 0, 0)

    asyncio.run(story())


def test_prompts_are_cut_continued_and_shown_as_asked(pool: LimitedPool) -> None:
    async def story() -> None:
        rig = ScriptedRig(pool)
        await rig.open(Ask(raw="abcdef", truncate_prompt_tokens=2))
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So it"}]
        await rig.open(Ask(messages=messages, continue_final_message=True))
        await rig.open(chat(add_generation_prompt=False))
        special = await rig.open(chat(skip_special_tokens=False))
        rig.worker.step({3: TOKENIZER.special_ids["<|im_start|>"]}, "length")
        assert rig.prompt(0) == "ef"
        assert rig.prompt(1) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSo it"
        assert rig.prompt(2) == "<|im_start|>user\nhi<|im_end|>\n"
        assert text_of(special) == "<|im_start|>"
        with pytest.raises(InvalidInput, match="last message"):
            await rig.open(chat(continue_final_message=True))
        rig.model.close()

    asyncio.run(story())


def test_matchers_are_gone_with_their_sequences(pool: LimitedPool) -> None:
    async def story() -> None:
        with network_rig(pool) as rig:
            await rig.say(Ask(raw="a", regex="[0-9]{3}", max_tokens=9))
            assert not rig.workers[0].matchers._matchers

    asyncio.run(story())
