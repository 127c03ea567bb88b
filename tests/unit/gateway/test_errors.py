"""Errors become HTTP in one place."""

import inspect

import msgspec
import pytest

import headrace.core.errors
import headrace.gateway.errors
from headrace.core.errors import HeadraceError, QueueFull, RowFailed, RunnerFailed, Unauthenticated
from headrace.gateway.errors import StreamFailed, error_frame, error_reply, failure_of, retry_headers, type_of
from headrace.streams.record import Failure

TREE = [
    kind
    for module in (headrace.core.errors, headrace.gateway.errors)
    for _, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, HeadraceError)
]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_of_the_tree_has_a_status_and_a_type(kind: type[HeadraceError]) -> None:
    assert 400 <= kind.status < 600
    assert type_of(kind.status) in {
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "server_error", "overloaded",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (402, "insufficient_quota"), (403, "permission_error"), (429, "rate_limit_error"),
     (413, "invalid_request_error"), (500, "server_error"), (502, "server_error"), (504, "server_error")],
)  # fmt: skip
def test_types(status: int, kind: str) -> None:
    assert type_of(status) == kind


@pytest.mark.parametrize(
    ("wait_s", "seconds", "ms"), [(0.0, "1", "1"), (0.2, "1", "200"), (1.0, "1", "1000"), (1.01, "2", "1010")]
)
def test_retry_after_is_whole_seconds_rounded_up(wait_s: float, seconds: str, ms: str) -> None:
    assert retry_headers(wait_s) == {"retry-after": seconds, "retry-after-ms": ms}


def test_headers_follow_the_error() -> None:
    full = error_reply(QueueFull("later", retry_after_s=7.2))
    assert (full.status, full.headers) == (503, {"retry-after": "8", "retry-after-ms": "7200"})
    assert error_reply(Unauthenticated("no")).headers == {"www-authenticate": "Bearer"}
    assert error_reply(RowFailed("no")).headers == {"x-should-retry": "false"}
    assert error_reply(RunnerFailed("no")).headers == {}


def test_what_broke_a_stream_may_be_tried_again_unless_it_would_break_again() -> None:
    assert "x-should-retry" not in error_reply(StreamFailed(Failure("runner_failed", "", 500))).headers
    for code, status in (("row_failed", 500), ("mask", 500), ("not_finite", 500), ("deadline_exceeded", 504)):
        assert error_reply(StreamFailed(Failure(code, "", status))).headers["x-should-retry"] == "false"
    assert "x-should-retry" not in error_reply(StreamFailed(Failure("out_of_room", "", 500))).headers
    assert error_reply(StreamFailed(Failure("unreachable", "", 503, retry_after_s=2.0))).headers["retry-after"] == "2"


def test_an_error_outside_the_tree_shows_nothing() -> None:
    failure = failure_of(FileNotFoundError("/etc/secret"))
    assert (failure.status, failure.code) == (500, "internal_error")
    assert "secret" not in failure.message


def test_a_frame_is_one_event() -> None:
    frame = error_frame(Failure("x", "two\nlines", 500, "field"))
    assert frame.count(b"\n") == 2 and frame.endswith(b"\n\n")
    assert msgspec.json.decode(frame.removeprefix(b"data: "))["error"] == {
        "message": "two\nlines",
        "type": "server_error",
        "param": "field",
        "code": "x",
    }
