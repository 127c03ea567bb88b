"""Ids of requests and of their replies. Owns how each looks and how one follows from the other."""

import os

# What an id that is chosen here begins with; and what the ids of replies have in its place.
_REQUEST = "req_"
CHAT_REPLY = "chatcmpl-"
TEXT_REPLY = "cmpl-"


def new_id() -> str:
    return _REQUEST + os.urandom(12).hex()


def reply_id(prefix: str, request_id: str) -> str:
    return prefix + request_id.removeprefix(_REQUEST)


def requests_of(id: str) -> list[str]:
    """The ids of requests that may be meant by one: itself, and where it is a reply's, what that was made from."""
    found = [id]
    for prefix in (CHAT_REPLY, TEXT_REPLY):
        if id.startswith(prefix):
            own = id.removeprefix(prefix)
            # One that the client chose has no beginning of ours.
            found += [_REQUEST + own, own]
    return found
