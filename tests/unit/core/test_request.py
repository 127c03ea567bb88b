"""Checks of a request that need no engine: each refusal names its field."""

import math
from typing import Any

import pytest

from headrace.core.errors import InvalidInput
from headrace.core.request import (
    MAX_ALLOWED_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    Request,
    SamplingParams,
    check_ends,
    check_sampling,
    check_times,
)

VOCAB = 100
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TIMES = ("ttft_target_s", "itl_target_s", "queue_timeout_s", "deadline_s")


def refused_sampling(**fields: object) -> str | None:
    with pytest.raises(InvalidInput) as caught:
        check_sampling(SamplingParams(**fields), VOCAB)  # type: ignore[arg-type]
    return caught.value.param


def timed(**fields: float) -> Request:
    return Request("r", "a", (1,), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_name(name: str, value: float) -> None:
    assert refused_sampling(**{name: value}) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.01),
        ("temperature", 100.5),
        ("top_p", -0.1),
        ("top_p", 1.0001),
        ("min_p", -1e-9),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1001.0),
        ("presence_penalty", -101.0),
        ("presence_penalty", 101.0),
        ("frequency_penalty", -101.0),
        ("frequency_penalty", 101.0),
        ("top_k", -1),
        ("top_k", 2**31),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    assert refused_sampling(**{name: value}) == name


def test_the_ends_of_every_range_are_allowed() -> None:
    low = SamplingParams(0.0, 0, 0.0, 0.0, 1e-3, -100.0, -100.0, -(2**63), 0, 0, 0)
    high = SamplingParams(
        100.0, 2**31 - 1, 1.0, 1.0, 1e3, 100.0, 100.0, 2**64 - 1, MAX_LOGPROBS, MAX_LOGPROBS, 2**31 - 1
    )
    for sampling in (SamplingParams(), low, high):
        check_sampling(sampling, VOCAB)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    assert refused_sampling(stop_ids=(1, token)) == "stop_ids"
    assert refused_sampling(allowed_ids=(1, token)) == "allowed_ids"
    assert refused_sampling(logit_bias=((1, 0.0), (token, 0.0))) == "logit_bias"


def test_lists_are_bounded() -> None:
    assert refused_sampling(stop_ids=(1,) * (MAX_STOP_IDS + 1)) == "stop_ids"
    assert refused_sampling(allowed_ids=(1,) * (MAX_ALLOWED_IDS + 1)) == "allowed_ids"
    assert refused_sampling(logit_bias=((1, 0.0),) * (MAX_LOGIT_BIAS + 1)) == "logit_bias"
    most = SamplingParams(stop_ids=(0, VOCAB - 1) * (MAX_STOP_IDS // 2), logit_bias=((0, -5.0),) * MAX_LOGIT_BIAS)
    check_sampling(most, VOCAB)


@pytest.mark.parametrize(("bias", "wrong"), [((VOCAB, 1.0), "an id outside"), ((1, 1e5), "a bias beyond")])
def test_which_half_of_a_bias_is_wrong_is_told(bias: tuple[int, float], wrong: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_sampling(SamplingParams(logit_bias=(bias,)), VOCAB)
    assert caught.value.message.startswith(f"logit_bias holds {wrong}") and " or " not in caught.value.message


@pytest.mark.parametrize("bias", [math.nan, math.inf, -math.inf])
def test_a_bias_that_is_not_finite_is_refused(bias: float) -> None:
    assert refused_sampling(logit_bias=((1, bias),)) == "logit_bias"


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e6 + 1])
def test_a_time_that_is_not_positive_finite_seconds_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_times(timed(**{name: value}))
    assert caught.value.param == name


@pytest.mark.parametrize("value", [1e-9, 1.0, 1e6])
def test_positive_seconds_are_allowed(value: float) -> None:
    check_times(timed(**dict.fromkeys(TIMES, value)))
    check_times(timed())


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_ids": (2, 0), "min_tokens": 2},
        {"allowed_ids": (0,), "min_tokens": 1},
        {"allowed_ids": (28,), "stop_ids": (28,), "min_tokens": 2},
        {"allowed_ids": (28, 2), "stop_ids": (28,), "min_tokens": 2},
        {"allowed_ids": (28,), "stop_ids": (28,), "min_tokens": 2, "ignore_eos": True},
    ],
)
def test_a_reply_of_nothing_but_ends_that_may_not_end_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_ends(SamplingParams(**fields), (0, 2))
    assert caught.value.param == "allowed_ids"


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_ids": (2, 0)},
        {"allowed_ids": (2, 5), "min_tokens": 2},
        {"allowed_ids": (2, 0), "min_tokens": 2, "ignore_eos": True},
        {"stop_ids": (28,), "min_tokens": 2},
    ],
)
def test_a_reply_that_may_end_or_go_on_is_not(fields: dict[str, Any]) -> None:
    check_ends(SamplingParams(**fields), (0, 2))
