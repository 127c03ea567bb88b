"""The one place where errors become HTTP. Owns statuses, types, bodies and headers of everything that is refused.

Added to the tree of `core.errors` by this face alone:

HeadraceError
├── MethodNotAllowed     405  the path is known, the method is not; `allow` names those that are
├── ReceiveTimeout       408  headers or body did not arrive in time
├── UnsupportedMedia     415  a content type, charset or encoding that is not read here
├── UpgradeRequired      426  the path speaks WebSocket, of a version that was not offered
├── HeadersTooLarge      431  too many headers, or too long
└── StreamFailed         any  the failure that ended a stream, as an error
"""

import math
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from headrace.core.errors import HeadraceError, MemoryCorrupted, Refused, RowFailed
from headrace.streams.record import Failure

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded",
}
# Of failures that the same request would meet again, or whose time is over.
_FINAL_CODES = frozenset(
    {RowFailed.code, MemoryCorrupted.code, "not_finite", "out_of_range", "mask", "failed", "deadline_exceeded"}
)
INTERNAL_MESSAGE = "The server failed to answer this request. Its id is in the x-request-id header."


class MethodNotAllowed(HeadraceError):
    code = "method_not_allowed"
    status = 405

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class ReceiveTimeout(HeadraceError):
    code = "receive_timeout"
    status = 408
    retryable = True


class UnsupportedMedia(HeadraceError):
    code = "unsupported_media_type"
    status = 415


class UpgradeRequired(HeadraceError):
    code = "upgrade_required"
    status = 426


class HeadersTooLarge(HeadraceError):
    code = "headers_too_large"
    status = 431


class StreamFailed(HeadraceError):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, param=failure.param)
        self.code = failure.code
        self.status = failure.status
        self.retryable = failure.retry_after_s is not None or failure.code not in _FINAL_CODES
        self.retry_after_s = failure.retry_after_s


class ErrorObject(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorObject


class ErrorReply(Struct, frozen=True):
    status: int
    body: bytes
    headers: dict[str, str]


def type_of(status: int) -> str:
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def failure_of(error: BaseException) -> Failure:
    """What may be shown of an error: nothing at all of one that is not in the tree."""
    if not isinstance(error, HeadraceError):
        return Failure("internal_error", INTERNAL_MESSAGE)
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    return Failure(error.code, error.message, error.status, error.param, retry_after_s)


def error_body(failure: Failure) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    found = ErrorObject(failure.message, type_of(failure.status), failure.param, failure.code)
    return msgspec.json.encode(ErrorBody(found))


def error_frame(failure: Failure) -> bytes:
    """A broken stream's last event before `[DONE]`, without an id."""
    return b"data: " + error_body(failure) + b"\n\n"


def error_reply(error: BaseException) -> ErrorReply:
    """The whole answer, but for what every answer carries."""
    failure = failure_of(error)
    headers: dict[str, str] = {}
    if failure.retry_after_s is not None:
        headers.update(retry_headers(failure.retry_after_s))
    if failure.status >= 500 and not getattr(error, "retryable", True):
        headers["x-should-retry"] = "false"
    if failure.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allow
    if isinstance(error, UpgradeRequired):
        headers.update({"upgrade": "websocket", "sec-websocket-version": "13"})
    return ErrorReply(failure.status, error_body(failure), headers)


def retry_headers(retry_after_s: float) -> dict[str, str]:
    """Whole seconds rounded up, and milliseconds for clients that read them."""
    wait_s = min(max(retry_after_s, 0.001), 1e6)
    return {"retry-after": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1000))}


def too_many_open() -> Refused:
    return Refused("Too many requests are open here. Try again shortly.", retry_after_s=1.0)


def shutting_down() -> Refused:
    return Refused("The server is shutting down. Try again shortly.", retry_after_s=1.0)
