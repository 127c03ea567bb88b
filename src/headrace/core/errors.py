"""The one error tree. Owns codes, statuses and what may be retried; knows no protocol.

HeadraceError
├── InvalidInput              400  the caller's fault; `param` names the field
│   └── ContextLengthExceeded 400  prompt, or prompt plus output, longer than the context
├── InvalidModel              400  files that are not a model, or not one this engine runs
│   └── ModelTooLarge         400  weights or one sequence's KV do not fit into memory
├── Unauthenticated           401  no key, or none we know
├── Forbidden                 403  a key that may not do this
├── NotFound                  404  no such request, model, stream
│   └── ModelNotFound         404  a model that is not served here
├── Expired                   410  a stream that was here and is not kept any more
├── TooLarge                  413  a body beyond its bound
├── FetchFailed               502  a source of files could not be reached or broke off; what came is kept
├── Refused                   503  not now: `retry_after_s` says when
│   ├── QueueFull             503  the queue already holds its bound in seconds of work
│   ├── DeadlineUnmeetable    503  the wait alone would pass the deadline
│   └── Unreachable           503  no worker of this model is ready, or none answers
├── TimedOut                  504  queued or running past its limit
├── RowFailed                 500  one row of a step failed; the others did not
├── WorkerKilled              500  worker after worker died of this request
├── OutOfRoom                 500  a step found no memory on the device, which goes on with smaller ones
└── RunnerFailed              500  the device or its process is gone
    └── MemoryCorrupted       500  a KV cell was read unwritten, read freed, or written twice
"""


class HeadraceError(Exception):
    """Base of everything a caller may see. `message` is safe to show to a client."""

    code = "internal_error"
    status = 500
    retryable = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidInput(HeadraceError):
    code = "invalid_request"
    status = 400


class ContextLengthExceeded(InvalidInput):
    code = "context_length_exceeded"


class InvalidModel(HeadraceError):
    """What an operator named cannot be served; nothing of it is kept."""

    code = "invalid_model"
    status = 400


class ModelTooLarge(InvalidModel):
    code = "model_too_large"


class Unauthenticated(HeadraceError):
    code = "invalid_api_key"
    status = 401


class Forbidden(HeadraceError):
    code = "forbidden"
    status = 403


class NotFound(HeadraceError):
    code = "not_found"
    status = 404


class ModelNotFound(NotFound):
    code = "model_not_found"


class Expired(HeadraceError):
    code = "stream_expired"
    status = 410


class TooLarge(HeadraceError):
    code = "too_large"
    status = 413


class FetchFailed(HeadraceError):
    code = "fetch_failed"
    status = 502
    retryable = True


class Refused(HeadraceError):
    """Refused before any compute; the same request may succeed after `retry_after_s`."""

    code = "overloaded"
    status = 503
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class QueueFull(Refused):
    code = "queue_full"


class DeadlineUnmeetable(Refused):
    code = "deadline_unmeetable"


class Unreachable(Refused):
    code = "unreachable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s, param=param)


class TimedOut(HeadraceError):
    code = "timed_out"
    status = 504
    retryable = True


class RowFailed(HeadraceError):
    code = "row_failed"


class WorkerKilled(HeadraceError):
    code = "worker_killed"


class OutOfRoom(HeadraceError):
    code = "out_of_room"
    retryable = True


class RunnerFailed(HeadraceError):
    code = "runner_failed"
    retryable = True


class MemoryCorrupted(RunnerFailed):
    code = "memory_corrupted"
    retryable = False
