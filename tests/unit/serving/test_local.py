"""Asks to text inside one process: prompts as templates write them, choices apart, stops that leak nothing."""

import re

import pytest

from headrace.core.errors import ContextLengthExceeded, InvalidInput
from headrace.core.event import Outcome
from headrace.serving.ask import Ask
from headrace.serving.local import Spoken
from tests.unit.serving.rig import END, TOKENIZER, LocalRig, local_rig


def say(rig: LocalRig, ask: Ask, key: int = 0) -> list[Spoken]:
    rig.service.submit(key, rig.service.prepare(ask))
    spoken: list[Spoken] = []
    while rig.service.num_open:
        spoken += rig.service.turn()
    assert rig.engine.load().used_blocks == 0
    return spoken


def test_a_prompt_is_what_the_template_makes_of_it_with_specials_only_of_its_own() -> None:
    with local_rig() as rig:
        prepared = rig.service.prepare(Ask(prompt="hi <|end|>"))
        text = TOKENIZER.encode_text("user: hi <|end|>")
        assert END not in text
        assert list(prepared.prompt_ids) == [*text, END, *TOKENIZER.encode_text("assistant: ")]
        assert rig.service.prepare(Ask(raw="abc")).prompt_ids == tuple(TOKENIZER.encode_text("abc"))


def test_a_prompt_is_cut_to_what_the_context_takes_beside_the_reply() -> None:
    with local_rig() as rig:
        for max_tokens, kept in ((28, 100), (None, 127), (128, 1)):
            ask = Ask(raw="a" * 200, truncate_prompt_tokens=-1, max_tokens=max_tokens)
            assert len(rig.service.prepare(ask).prompt_ids) == kept


def test_text_is_the_decoded_truth_of_the_runner() -> None:
    with local_rig() as rig:
        spoken = say(rig, Ask(raw="abc", max_tokens=20, seed=5, n=3))
        for choice in range(3):
            ids = [token for each in spoken if each.choice == choice for token in each.ids]
            truth = rig.runner.truth(TOKENIZER.encode_text("abc"), 20, seed=5, choice=choice)
            assert ids == truth
            assert "".join(each.text for each in spoken if each.choice == choice) == TOKENIZER.decode(ids)
        assert [each.finish_reason for each in spoken if each.ended] == ["length"] * 3


def test_a_stop_string_ends_the_sequence_and_what_came_after_is_overrun() -> None:
    with local_rig() as rig:
        whole = "".join(each.text for each in say(rig, Ask(raw="abc", max_tokens=40)))
        stop = whole[10:13]
        spoken = say(rig, Ask(raw="abc", max_tokens=40, stop=stop))
        assert "".join(each.text for each in spoken) == whole[: whole.index(stop)]
        (end,) = [each for each in spoken if each.ended]
        assert end.finish_reason == "stop"
        assert end.ended is not None and end.ended.outcome is Outcome.ABORTED
        assert end.ended.counters.emitted == len([token for each in spoken for token in each.ids])


def test_a_grammar_shapes_the_reply() -> None:
    with local_rig() as rig:
        spoken = say(rig, Ask(raw="abc", regex="[0-9]{3}-[a-f]+!", max_tokens=60, temperature=1.0))
        text = "".join(each.text for each in spoken)
        assert re.match("[0-9]{3}-[a-f]", text)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (Ask(raw="abc", stop=[""]), InvalidInput),
        (Ask(raw="abc", echo=True), InvalidInput),
        (Ask(raw="abc", regex="("), InvalidInput),
        (Ask(raw="abc", json_schema={"type": "nonsense"}), InvalidInput),
        (Ask(ids=[1, 2**20]), InvalidInput),
        (Ask(raw="a" * 200), ContextLengthExceeded),
        (Ask(raw="abc", temperature=-1.0), InvalidInput),
        (Ask(messages=[{"role": "wizard", "content": "x"}]), InvalidInput),
    ],
)
def test_what_is_refused_leaves_nothing_behind(ask: Ask, error: type[Exception]) -> None:
    with local_rig() as rig:
        with pytest.raises(error):
            rig.service.submit(0, rig.service.prepare(ask))
        assert rig.service.num_open == 0
        assert len(say(rig, Ask(raw="abc", max_tokens=3))) == 3
