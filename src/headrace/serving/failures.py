"""Errors that travelled: refusals and failed ends of workers, back in the words of the error tree. Pure."""

from headrace.core.errors import HeadraceError, Refused, RowFailed, TimedOut, Unreachable
from headrace.core.event import Outcome
from headrace.core.messages import End, Refusal
from headrace.streams.record import Failure

WORKER_LOST = "the worker that answered this request was lost"
WORKER_KILLED = "workers died of this request, one after the other: it is not tried again"


def _tree(root: type[HeadraceError]) -> dict[str, type[HeadraceError]]:
    found = {root.code: root}
    for kind in root.__subclasses__():
        found |= {code: known for code, known in _tree(kind).items() if code not in found}
    return found


_KINDS = _tree(HeadraceError)


def error_of(refusal: Refusal) -> HeadraceError:
    """The error that a worker refused a submission with."""
    if refusal.code == "draining":
        return Unreachable("the worker is being stopped", retry_after_s=refusal.retry_after_s or 1.0)
    kind = _KINDS.get(refusal.code, HeadraceError)
    if issubclass(kind, Refused):
        return kind(refusal.message, retry_after_s=refusal.retry_after_s or 1.0, param=refusal.param)
    return kind(refusal.message, param=refusal.param)


def failure_of(error: HeadraceError) -> Failure:
    retry_after_s = error.retry_after_s if isinstance(error, Refused) else None
    return Failure(error.code, error.message, error.status, error.param, retry_after_s)


def failure_of_end(end: End) -> Failure:
    """Why a sequence ended that neither finished nor was stopped from here."""
    if end.outcome is Outcome.ABORTED:
        return failure_of(Unreachable("another gateway answers this request now"))
    kind = TimedOut if end.reason in ("timed_out", "deadline_exceeded") else RowFailed
    return Failure(end.reason, end.message or "this request failed in its worker", kind.status)
