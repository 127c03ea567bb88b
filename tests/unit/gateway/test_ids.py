"""Ids of requests and of replies: what one names, the other finds."""

import pytest

from headrace.gateway.ids import CHAT_REPLY, TEXT_REPLY, new_id, reply_id, requests_of


@pytest.mark.parametrize("prefix", [CHAT_REPLY, TEXT_REPLY])
@pytest.mark.parametrize(
    "request_id", ["req_0123456789abcdef01234567", "my-story", "req_mine", "chatcmpl-mine", "cmpl-"]
)
def test_the_id_of_a_reply_leads_to_its_request(prefix: str, request_id: str) -> None:
    assert request_id in requests_of(reply_id(prefix, request_id))


def test_the_ids_that_are_made_here_are_found_too() -> None:
    made = new_id()
    assert requests_of(reply_id(CHAT_REPLY, made))[1] == made and new_id() != made


def test_an_id_is_first_of_all_its_own_and_none_that_is_no_replys_is_anothers() -> None:
    assert requests_of("chatcmpl-a") == ["chatcmpl-a", "req_a", "a"]
    for id in ("req_a", "a", "my-chatcmpl-a", "CMPL-a"):
        assert requests_of(id) == [id]
