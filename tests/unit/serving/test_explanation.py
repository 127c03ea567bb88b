"""What is remembered of requests that are over: whole, for its tenant alone, and only so many."""

import gc

import pytest

from headrace.core.errors import NotFound
from headrace.serving.explanation import Explanation, Explanations
from headrace.streams.record import Usage


def told(request_id: str, tenant: str = "a", wall_s: float = 0.3) -> Explanation:
    stages = {"receive": 0.1, "wait:capacity": wall_s - 0.1}
    return Explanation(request_id, tenant, "m", "m-0", stages, wall_s, Usage(7, 4, 2), ("stop", "length"), 0.1, None)


def test_what_is_found_is_what_was_filed() -> None:
    explanations = Explanations()
    explanations.file(told("one"))
    assert explanations.find("a", "one") == told("one")


def test_each_tenant_finds_its_own_under_the_same_id() -> None:
    explanations = Explanations()
    explanations.file(told("one", "a", wall_s=1.0))
    explanations.file(told("one", "b", wall_s=2.0))
    assert explanations.find("a", "one").wall_s == 1.0
    assert explanations.find("b", "one").wall_s == 2.0
    with pytest.raises(NotFound, match="no request of that id"):
        explanations.find("c", "one")


def test_names_that_share_a_hash_are_not_told_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serving.explanation.hash", lambda _: 1, raising=False)
    explanations = Explanations()
    explanations.file(told("one", "a"))
    with pytest.raises(NotFound):
        explanations.find("b", "one")
    assert explanations.find("a", "one").tenant == "a"


def test_the_oldest_goes_and_one_filed_again_is_new() -> None:
    explanations = Explanations(remembered=2)
    for request_id in ("one", "two", "one", "three"):
        explanations.file(told(request_id))
    with pytest.raises(NotFound):
        explanations.find("a", "two")
    assert explanations.find("a", "one") == told("one")


def test_the_garbage_collector_has_nothing_to_look_at() -> None:
    explanations = Explanations()
    explanations.file(told("one"))
    assert not any(map(gc.is_tracked, explanations._found.values()))
