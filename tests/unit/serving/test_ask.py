"""Asks that contradict themselves are refused by the field; the rest reaches the sampler as it was said."""

from typing import Any

import pytest

from headrace.core.errors import InvalidInput
from headrace.core.request import SamplingParams
from headrace.serving.ask import Ask, check_ask, check_free, sampling_of
from headrace.serving.preparation import grammar_of


@pytest.mark.parametrize(
    ("ask", "param"),
    [
        (Ask(), "prompt"),
        (Ask(prompt="a", raw="b"), "raw"),
        (Ask(messages=[], ids=[1]), "ids"),
        (Ask(prompt="a", n=0), "n"),
        (Ask(prompt="a", n=129), "n"),
        (Ask(raw="a", tools=[{"type": "function"}]), "tools"),
        (Ask(raw="a", stop=["x" * 1024] * 3), "stop"),
        (Ask(raw="a", bad_words=["b"]), "bad_words"),
        (Ask(raw="a", deadline_s=0.0), "deadline_s"),
        (Ask(raw="a", ttft_target_s=float("nan")), "ttft_target_s"),
        (Ask(raw="a", truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        (Ask(raw="a", truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
        (Ask(raw="a", continue_final_message=True), "continue_final_message"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(ask: Ask, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_ask(ask)
    assert caught.value.param == param


def test_sampling_is_as_asked_and_a_missing_seed_is_filled_in() -> None:
    ask = Ask(raw="a", temperature=0.5, top_k=7, logit_bias={"3": -1.0}, stop_ids=[4], logprobs=2)
    expected = SamplingParams(temperature=0.5, top_k=7, logit_bias=((3, -1.0),), stop_ids=(4,), logprobs=2, seed=11)
    assert sampling_of(ask, seeds=lambda: 11, masked=False) == expected
    assert sampling_of(Ask(raw="a", seed=5), seeds=lambda: 11, masked=True).seed == 5


def test_biases_are_by_token_id() -> None:
    with pytest.raises(InvalidInput, match="logit_bias"):
        sampling_of(Ask(raw="a", logit_bias={"the": 1.0}), seeds=lambda: 0, masked=False)


def test_one_thing_shapes_a_reply() -> None:
    assert grammar_of(Ask(raw="a")) is None
    grammar = grammar_of(Ask(raw="a", choices=["yes", "no"]))
    assert grammar is not None and grammar.kind == "choice"
    with pytest.raises(InvalidInput, match="cannot both"):
        grammar_of(Ask(raw="a", regex="a+", json_object=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 2}, "min_tokens"), ({"allowed_ids": [5]}, "allowed_ids")],
)
def test_what_keeps_a_reply_from_its_shape_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_free(Ask(raw="a", regex="a", **fields))
    assert refused.value.param == param
    check_free(Ask(raw="a", regex="a", min_tokens=1))


@pytest.mark.parametrize("token", [-1, 2**31, 2**32 + 1, 2**64])
def test_an_id_that_no_array_holds_is_refused(token: int) -> None:
    with pytest.raises(InvalidInput, match="ids"):
        check_ask(Ask(ids=[1, token]))
