"""The one place where errors become gRPC's: a code of its own for each status of the catalogue, and in the trailing
metadata what HTTP would say. Pure.
"""

from collections.abc import Mapping

import grpc

from headrace.gateway.errors import error_body, retry_headers
from headrace.streams.record import Failure

# The JSON that is the body of HTTP's errors.
ERROR_KEY = "headrace-error-bin"
# What gRPC's own clients wait before they try again.
_PUSHBACK_KEY = "grpc-retry-pushback-ms"

_CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    402: grpc.StatusCode.RESOURCE_EXHAUSTED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    # Not NOT_FOUND: it was here, and no other name or key would find it.
    410: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

Metadata = tuple[tuple[str, str | bytes], ...]


def code_of(failure: Failure) -> grpc.StatusCode:
    return _CODES.get(failure.status, grpc.StatusCode.INTERNAL)


def trailer_of(failure: Failure) -> Metadata:
    found: list[tuple[str, str | bytes]] = [(ERROR_KEY, error_body(failure))]
    if failure.retry_after_s is not None:
        waits = retry_headers(failure.retry_after_s)
        found += [*waits.items(), (_PUSHBACK_KEY, waits["retry-after-ms"])]
    return tuple(found)
