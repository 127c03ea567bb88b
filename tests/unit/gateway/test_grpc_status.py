"""Errors as gRPC's."""

import grpc
import pytest

from headrace.core.errors import (
    Expired,
    Forbidden,
    HeadraceError,
    InvalidInput,
    NotFound,
    QueueFull,
    TimedOut,
    TooLarge,
)
from headrace.gateway.errors import failure_of
from headrace.gateway.grpc.status import code_of


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInput("no"), grpc.StatusCode.INVALID_ARGUMENT),
        (Forbidden("no"), grpc.StatusCode.PERMISSION_DENIED),
        (NotFound("no"), grpc.StatusCode.NOT_FOUND),
        (Expired("no"), grpc.StatusCode.FAILED_PRECONDITION),
        (TooLarge("no"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (QueueFull("no", retry_after_s=1.0), grpc.StatusCode.UNAVAILABLE),
        (TimedOut("no"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL),
    ],
)
def test_every_kind_of_error_has_a_code(error: BaseException, code: grpc.StatusCode) -> None:
    assert code_of(failure_of(error)) is code


def test_no_error_of_the_tree_is_unknown_to_clients() -> None:
    kinds = [HeadraceError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    internal = {kind.status for kind in kinds if code_of(failure_of(_made(kind))) is grpc.StatusCode.INTERNAL}
    assert internal <= {405, 426, 500}


def _made(kind: type[HeadraceError]) -> HeadraceError:
    error = kind.__new__(kind)
    HeadraceError.__init__(error, "no")
    return error
